"""Every fault: results are those of an untraced run, all is put back, and no step is lost. ``reliability.py`` runs them
many times and writes the table of docs/reliability.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import copytrace
import reliability
from copytrace.errors import CopytraceError
from faults import ENDINGS, FAULTS, TESTED, Ending, Fault
from faulty import try_ending, try_fault
from full_disk import STEPS, take_all_but

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(fault: Fault, tmp_path: Path) -> None:
    found = try_fault(fault, tmp_path)
    assert found.wrong == ()
    assert found.lost == 0
    assert found.steps > 0


@pytest.mark.parametrize(
    "ending",
    [pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.slow else []) for each in ENDINGS.values()],
)
def test_ending(ending: Ending, tmp_path: Path) -> None:
    found = try_ending(ending, tmp_path)
    assert found.wrong == ()
    assert found.lost == 0
    assert found.steps > 0


def test_the_page_lists_every_fault() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reliability.md").read_text()
    rows = reliability.rows_of(page)
    assert list(rows) == [each.name for each in reliability.ALL]
    for name, (cause, times, steps, lost) in rows.items():
        assert cause
        assert times >= 1, name
        assert steps >= 0
        assert lost == 0, name


def test_every_fault_has_a_test() -> None:
    for each in TESTED:
        file, _, test = each.node.partition("::")
        assert f"def {test}(" in Path(__file__).with_name(file).read_text()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    yield place
    subprocess.run(["umount", place], check=True)


def on_full_disk(disk: Path, free: int, when: str) -> dict[str, Any]:
    """What ``full_disk.py`` says in a session, after its work came to what it comes to alone."""
    found = {}
    for how in ("alone", "traced"):
        command = [sys.executable, str(Path(__file__).with_name("full_disk.py")), disk, str(free), when, how]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), done
        found[how] = json.loads(done.stdout)
        (disk / "taken").unlink()
    assert found["traced"]["results"] == found["alone"]["results"]
    return found["traced"]


FREE = (0, 100_000, 1_000_000, 3_000_000, 9_000_000)


@pytest.mark.parametrize("free", [pytest.param(each, marks=[pytest.mark.slow] if each else []) for each in FREE])
def test_a_disk_that_becomes_full_loses_no_operation(disk: Path, free: int) -> None:
    """The room held ahead of memray's capture is given back when the session ends, and the spans are written there."""
    found = on_full_disk(disk, free, "within")
    assert found["error"] == ""
    assert found["steps"] == STEPS
    assert (found["lost"] > 0) == any("moves were lost" in note for note in found["notes"])
    assert (found["lost"] == 0) or free < 3_000_000
    assert not [note for note in found["notes"] if "swallowed" in note]
    assert found["saved"] == f"{disk}/out.copytrace: could not be written: No space left on device"
    assert found["left"] == ["spool", "taken"]


@pytest.mark.parametrize(
    "free", [pytest.param(each, marks=[pytest.mark.slow] if each not in (0, 3_000_000) else []) for each in FREE]
)
def test_a_disk_that_is_full_is_said(disk: Path, free: int) -> None:
    """What finds no room is lost, and the report says so; with no room at all a line says why nothing is recorded."""
    found = on_full_disk(disk, free, "before")
    if free <= 1_000_000:
        assert not (disk / "spool").exists()
        assert found["error"] == f"{disk}/spool: cannot be written: No space left on device"
        return
    assert found["error"] == ""
    assert any("the disk is nearly full" in note for note in found["notes"])
    assert 20 < found["steps"] <= STEPS
    assert free == 9_000_000 or found["steps"] < STEPS
    lost = "spans could not be written to the spool: No space left on device"
    assert found["steps"] == STEPS or lost in found["notes"]
    assert (found["lost"] > 0) == any("moves were lost" in note for note in found["notes"])
    assert found["saved"] == f"{disk}/out.copytrace: could not be written: No space left on device"


def test_a_program_is_not_run_when_the_disk_for_its_trace_is_full(disk: Path) -> None:
    take_all_but(0, disk)
    command = [sys.executable, "-m", "copytrace", "run", "-o", "x.copytrace", "-c", "print('ran')"]
    done = subprocess.run(command, cwd=disk, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"copytrace: \S*x\.copytrace\.partial: cannot be written: No space left on device\n", done.stderr
    )
    assert [path.name for path in disk.iterdir()] == ["taken"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory in which nothing can be made")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "copytrace", "run", "-o", "/proc/self/x.copytrace", "-c", "print('ran')"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"copytrace: /proc/self/x\.copytrace\.partial: cannot be made: .*\n", done.stderr)
    with pytest.raises(CopytraceError, match="cannot be made"), copytrace.session(spool=Path("/proc/self/spool")):
        pass
    with copytrace.session(memray=False) as session:
        pass
    with pytest.raises(CopytraceError, match="cannot write there"):
        session.save("/proc/self/x.copytrace")


def test_a_spool_that_is_removed_is_no_error_of_the_block(tmp_path: Path) -> None:
    session = copytrace.session("mine", spool=tmp_path / "spool")

    def work() -> None:
        with session:
            shutil.rmtree(tmp_path / "spool")
            raise LookupError("of the block")

    with pytest.raises(LookupError, match="of the block"):
        work()
    with pytest.raises(CopytraceError, match=r"session mine: what was recorded cannot be read: .*spool"):
        _ = session.report
