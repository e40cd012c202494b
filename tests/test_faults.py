"""Every fault: results are those of an untraced run, all is put back, and no step is lost. ``reliability.py`` runs them
many times and writes the table of docs/reliability.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import copytrace
import reliability
from copytrace.errors import CopytraceError
from faults import ENDINGS, FAULTS, TESTED, Ending, Fault
from faulty import try_ending, try_fault

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
