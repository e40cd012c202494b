"""``copytrace doctor --strict``: what vanished from a library is named, and what replaced it where that can be told."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from copytrace import doctor
from copytrace.model import Coverage, ProbeStatus, ReportData
from copytrace.successors import successor

OLD = {
    "__init__": "",
    "store": """
        class Store:
            def put(self, key, value): return None
            def fetch(self, key): return None
        class Cached(Store):
            def fetch(self, key): return None
        def compress(data): return data
    """,
}
TABLE = """
from copytrace.probes import Family, Probe, Site
PROBE = Probe(
    name="shelf",
    library="shelf",
    sites=(
        Site(target="shelf.store:Store.put", kind="request"),
        Site(target="shelf.store:Store.fetch", kind="request", name="fetching"),
        Site(target="shelf.store:compress", kind="encode"),
        Site(target="shelf.store:Store.gone_before", kind="request", versions="<1"),
    ),
    families=(Family(base="shelf.store:Store", methods=(Site(target="fetch", kind="request"),)),),
)
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a release of the package ``shelf``: ``release(store=source, ...)``."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(version: str = "2.0", **modules: str) -> None:
        package = tmp_path / "shelf"
        package.mkdir()
        for module, source in ({"__init__": ""} | modules).items():
            (package / f"{module}.py").write_text(textwrap.dedent(source))
        (package / "_copytrace.py").write_text(TABLE)
        metadata = tmp_path / f"shelf-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shelf\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text("[copytrace.probes]\nshelf = shelf._copytrace:PROBE\n")
        importlib.invalidate_caches()

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "shelf"]:
        del sys.modules[name]


def strictly(tmp_path: Path) -> tuple[int, list[str], str]:
    """Status, the lines on ``shelf`` after the table of probes, and standard error."""
    command = [sys.executable, "-m", "copytrace", "doctor", "--strict"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=False
    )
    lines = done.stdout.splitlines()
    after = lines.index("Next: copytrace run SCRIPT") + 1 if "Next: copytrace run SCRIPT" in lines else 0
    return done.returncode, lines[after:], done.stderr


def test_nothing_is_gone_from_a_release_that_has_all(release: Callable[..., None], tmp_path: Path) -> None:
    release(**OLD)
    assert strictly(tmp_path) == (0, [], "")


def test_what_is_gone_is_named_with_what_replaced_it(release: Callable[..., None], tmp_path: Path) -> None:
    release(
        store="""
            class Store:
                def put_bytes(self, key, value): return None
        """,
        codecs="def compress(data): return data",
        __init__="import shelf.codecs",
    )
    status, lines, err = strictly(tmp_path)
    assert status == 1
    assert err == "copytrace: 3 sites of installed libraries cannot be seen\n"
    assert sorted(lines) == [
        "shelf 2.0 has no shelf.store:Store.fetch; what replaced it is unknown",
        "shelf 2.0 has no shelf.store:Store.put; shelf.store:Store.put_bytes may have taken its place",
        "shelf 2.0 has no shelf.store:compress; shelf.codecs:compress may have taken its place",
    ]


def test_a_module_and_a_base_class_that_are_gone(release: Callable[..., None], tmp_path: Path) -> None:
    release(storage=OLD["store"], __init__="import shelf.storage")
    status, lines, _ = strictly(tmp_path)
    assert status == 1
    assert sorted(lines) == [
        "shelf 2.0 has no shelf.store; shelf.storage:Store may have taken its place",
        "shelf 2.0 has no shelf.store; shelf.storage:Store.fetch may have taken its place",
        "shelf 2.0 has no shelf.store; shelf.storage:Store.put may have taken its place",
        "shelf 2.0 has no shelf.store; shelf.storage:compress may have taken its place",
    ]


def test_what_cannot_be_patched_is_told(release: Callable[..., None], tmp_path: Path) -> None:
    release(store=textwrap.dedent(OLD["store"]) + "\ncompress = 5\n")
    status, lines, _ = strictly(tmp_path)
    assert (status, lines) == (
        1,
        ["shelf.store.compress cannot be probed: compress of shelf.store is a int, not a function"],
    )


def test_a_probe_that_cannot_be_loaded_is_told(release: Callable[..., None], tmp_path: Path) -> None:
    release(**OLD)
    (tmp_path / "shelf" / "_copytrace.py").write_text("raise RuntimeError('broken')")
    status, lines, _ = strictly(tmp_path)
    assert (status, lines) == (1, ["the probe shelf cannot be used: RuntimeError: broken"])


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("probed.calls:Base.metod", "probed.calls:Base.method"),
        ("probed.calls:Bass.method", "probed.calls:Base.method"),
        ("probed.call:Base.method", "probed.calls:Base.method"),
        ("probed.calls:functions", "probed.calls:function"),
        ("probed.calls:nothing_like_it_at_all", ""),
        ("no_such_package:anything", ""),
    ],
)
def test_successors(target: str, found: str) -> None:
    import probed.calls  # noqa: F401

    assert successor(target) == found


def test_a_report_without_faults_has_nothing_to_say() -> None:
    sites = ({"name": "a", "status": "attached", "reason": ""}, {"name": "b", "status": "waiting", "reason": "x"})
    probe = ProbeStatus("numcodecs", "numcodecs", "1", "attached", "", sites)
    report = ReportData({}, Coverage(True, True, True, 0, (probe,), 0, 0, 0, None, ()), (), ())
    assert doctor.vanished(report) == []


IMPORTED = """
import importlib, json, sys
import copytrace
from copytrace.probes._attach import _builtin
with copytrace.session(memray=False, transfers=False) as during:
    for probe in _builtin():
        try:
            importlib.import_module(probe.package)
        except ImportError:
            pass
with copytrace.session(memray=False, transfers=False) as after:
    pass
print(json.dumps([
    {f"{probe.name} {site['name']}": site["status"] for probe in session.report.coverage.probes for site in probe.sites}
    for session in (during, after)
]))
"""


def test_a_session_in_which_libraries_are_imported_finds_what_one_after_the_imports_finds(tmp_path: Path) -> None:
    """Each in the order in which it really is imported: fsspec.asyn and aiobotocore.client import others first."""
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    during, after = json.loads(done.stdout)
    assert during == after
    assert during["fsspec fsspec.asyn.sync"] == "attached"
