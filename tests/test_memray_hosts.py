"""Scripts and test suites that use memray themselves behave as they do alone, and are attributed all the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("memray")

HOSTS = Path(__file__).with_name("hosts")
NBYTES = 4 * 3_000_017
ARENA = 1 << 20
"""Without the extension spans are made of Python objects, for which CPython may take an arena while a tracker runs."""
WORKING = (
    "plain",
    "outside",
    "without native traces",
    "destination",
    "by attribute",
    "outside",
    "temporary",
    "raises",
)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )


def traced(modes: tuple[str, ...], cwd: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The script under ``copytrace run``, and its report."""
    done = python("-m", "copytrace", "run", "-q", "-o", "out.copytrace", str(HOSTS / "tracked.py"), *modes, cwd=cwd)
    shown = python("-m", "copytrace", "report", "out.copytrace", "--format", "json", cwd=cwd)
    assert (shown.returncode, shown.stderr) == (0, "")
    return done, json.loads(shown.stdout)


def both(tmp_path: Path, *modes: str) -> tuple[Any, Any, dict[str, Any]]:
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    alone.mkdir()
    beside.mkdir()
    bare = python(str(HOSTS / "tracked.py"), *modes, cwd=alone)
    done, report = traced(modes, beside)
    files = {path.name for path in alone.iterdir()}
    assert {path.name for path in beside.iterdir()} == files | {"out.copytrace"}
    assert done.returncode == bare.returncode
    return bare, done, report


def write_of(report: dict[str, Any]) -> dict[str, Any]:
    (path,) = [path for path in report["paths"] if path["direction"] == "write"]
    return dict(path)


def test_a_script_with_trackers_is_as_it_is_alone_and_attributed(tmp_path: Path) -> None:
    bare, done, report = both(tmp_path, *WORKING)
    assert bare.returncode == 1
    assert done.stderr.splitlines()[-1:] == bare.stderr.splitlines()[-1:] == ["KeyError: 'inside'"]
    alone, beside = ([int(line) for line in run.stdout.split()] for run in (bare, done))
    assert len(beside) == len(alone) == len(WORKING) - WORKING.count("outside")
    for one, other in zip(alone, beside, strict=True):
        assert abs(one - other) <= 0.01 * one + (0 if report["coverage"]["transfers"] else ARENA)
    path = write_of(report)
    steps = path["steps"]
    assert {(step["kind"], step["layer"], step["site"]["function"]) for step in steps} == {
        ("copy", "zarr.storage", "zarr.storage._memory._copy_buffer")
    }
    assert sum(step["count"] for step in steps) == len(WORKING)
    assert path["copied_bytes"] == len(WORKING) * NBYTES
    assert path["operations"] == len(WORKING)
    assert report["coverage"]["memray"] is True
    assert report["coverage"]["unattributed_bytes"] == 0
    assert 0.99 < path["extra_at_peak_bytes"] / NBYTES < 2.1
    assert len(report["coverage"]["notes"]) == (0 if report["coverage"]["transfers"] else 1)


def test_an_aggregated_capture_is_left_alone_and_the_report_says_what_was_lost(tmp_path: Path) -> None:
    bare, done, report = both(tmp_path, "aggregated", "plain")
    alone, beside = (int(run.stdout.split()[0]) for run in (bare, done))
    assert abs(alone - beside) <= 0.01 * alone
    assert any("aggregated" in note for note in report["coverage"]["notes"])
    path = write_of(report)
    assert (path["payload_bytes"], path["copied_bytes"]) == (2 * NBYTES, 2 * NBYTES)


@pytest.mark.parametrize("mode", ["exists", "two at once"])
def test_what_memray_refuses_is_refused_as_it_is_alone(mode: str, tmp_path: Path) -> None:
    bare, done, report = both(tmp_path, mode)
    assert bare.returncode == 1
    assert done.stderr.splitlines()[-1] == bare.stderr.splitlines()[-1]
    assert done.stdout == bare.stdout
    assert report["coverage"]["memray"] is True


SESSION = """
import json
import numpy as np
import zarr
import copytrace
from zarr.storage import MemoryStore
source = np.arange(3_000_017, dtype="f4")
array = zarr.create_array(MemoryStore(), shape=source.shape, chunks=source.shape, dtype="f4", compressors=None)
"""


def test_a_session_under_memray_run_does_not_disturb_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        SESSION
        + """
with copytrace.session() as session:
    array[:] = source
report = session.report
print(json.dumps([report.coverage.memray, report.coverage.notes, [p.copied_bytes for p in report.paths]]))
"""
    )
    done = python("-m", "memray", "run", "-q", "--native", "-o", "out.bin", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    memray, notes, copied = json.loads(done.stdout)
    assert (memray, copied) == (False, [NBYTES])
    assert len([note for note in notes if "another memray tracker is running" in note]) >= 1
    stats = python("-m", "memray", "stats", "out.bin", cwd=tmp_path)
    assert stats.returncode == 0
    assert "zarr" in stats.stdout or "Total allocations" in stats.stdout


def test_a_session_in_a_test_under_pytest_memray_does_not_disturb_it(tmp_path: Path) -> None:
    pytest.importorskip("pytest_memray")
    (tmp_path / "test_it.py").write_text(
        SESSION
        + """
import pytest

@pytest.mark.limit_memory("100 MB")
def test_within():
    with copytrace.session() as session:
        array[:] = source
    assert not session.report.coverage.memray
    assert any("another memray tracker is running" in note for note in session.report.coverage.notes)
    assert [path.copied_bytes for path in session.report.paths] == [source.nbytes]

@pytest.mark.limit_memory("1 MB")
def test_beyond():
    with copytrace.session():
        array[:] = source
"""
    )
    done = python("-m", "pytest", "--memray", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "Test was limited to 1.0MiB but allocated" in done.stdout.replace("MB", "MiB")
    assert done.returncode == 1


# --- the public report of obstore's extra copies ----------------------------------------------------------------------

REPORTED = """
import sys
from memray import FileReader, Tracker
import numpy as np
import zarr

store = "data.zarr"
if sys.argv[1] == "obstore":
    from obstore.store import LocalStore
    from zarr.storage import ObjectStore
    store = ObjectStore(LocalStore("data.zarr", mkdir=True))
a = np.random.default_rng(0).random((5000, 5000), dtype="f4")
z = zarr.create_array(store, shape=a.shape, chunks=a.shape, dtype=a.dtype, compressors=None)
with Tracker("profile.bin", native_traces=True):
    z[:] = a
print(FileReader("profile.bin").metadata.peak_memory)
"""
PROJECT = Path(__file__).parents[1]


@pytest.fixture(scope="module", params=["0.11.0", "0.11.1"])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An environment with zarr 3.3.0 and a version of obstore."""
    directory = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(directory)], check=True)
    wanted = ["zarr==3.3.0", "numcodecs==0.17.1", f"obstore=={request.param}", "memray==1.20.0", str(PROJECT)]
    install = ["uv", "pip", "install", "-q", "--python", str(directory / "bin" / "python"), *wanted]
    subprocess.run(install, check=True)
    return request.param, directory / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("uv"), reason="uv makes the environments")
@pytest.mark.parametrize("store", ["obstore", "local"])
def test_the_public_report_of_obstore(environment: tuple[str, Path], store: str, tmp_path: Path) -> None:
    obstore, interpreter = environment
    (tmp_path / "report.py").write_text(REPORTED)
    peaks, runs = [], ([], ["-m", "copytrace", "run", "-q", "-o", "out.copytrace"])
    for prefix in runs:
        shutil.rmtree(tmp_path / "data.zarr", ignore_errors=True)
        (tmp_path / "profile.bin").unlink(missing_ok=True)
        command = [str(interpreter), *prefix, "report.py", store]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    multipart = (obstore, store) == ("0.11.0", "obstore")
    assert multipart or abs(peaks[0] - peaks[1]) <= 0.01 * peaks[0], "parts in flight differ from run to run"
    command = [str(interpreter), "-m", "copytrace", "report", "out.copytrace", "--format", "json"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    path = write_of(json.loads(shown.stdout))
    assert path["payload_bytes"] == 100_000_000
    if not multipart:
        assert (path["copies"], path["avoidable"]) == (0.0, 0.0)
        mask = [buffer["peak_bytes"] for buffer in path["buffers"] if "all_equal" in buffer["label"]]
        assert path["extra_at_peak_bytes"] - sum(mask) < 1_000_000
        return
    assert 1.98 <= path["copies"] <= 2.02
    assert 0.15 <= path["extra_at_peak"] <= 0.75
    assert path["avoidable"] >= 1
    copies = [step for step in path["steps"] if step["kind"] in ("copy", "join")]
    assert {step["layer"] for step in copies} == {"obstore"}
    assert any("put_multipart_inner" in step["site"]["function"] for step in copies)
