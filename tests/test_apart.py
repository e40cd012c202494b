"""The helper that reads captures: it answers as this process would, ends by itself and is no child."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import copytrace
from copytrace import allocations, apart, transfers
from copytrace.allocations import Segment
from copytrace.apart import Helper

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SIZE = 1_000_003


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Segment], NDArray[np.void]]:
    spool = tmp_path_factory.mktemp("captured") / "spool"
    with copytrace.session(spool=spool):
        kept = bytes(bytearray(SIZE))
    assert len(kept) == SIZE
    return [Segment(spool / "memray-1.bin", 0, True)], transfers.read(spool)[1]


@pytest.fixture
def helper() -> Iterator[Helper]:
    made = Helper()
    yield made
    made.after_fork()


def process_of(helper: Helper) -> int:
    """The process at the other end of the pipe."""
    assert helper._pipes is not None
    pipe = os.readlink(f"/proc/self/fd/{helper._pipes[0].fileno()}")
    found = []
    for place in Path("/proc").glob("[0-9]*/fd/0"):
        with suppress(OSError):
            if os.readlink(place) == pipe:
                found.append(int(place.parts[2]))
    assert len(found) == 1
    return found[0]


def ended(pid: int, seconds: float = 30) -> bool:
    until = time.monotonic() + seconds
    while _runs(pid):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        return b"copytrace.apart import serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def agree(one: tuple[allocations.Taken, list[str]] | None, other: tuple[allocations.Taken, list[str]]) -> bool:
    if one is None:
        return False
    (a, notes), (b, others) = one, other
    stacks = [[tuple(map(tuple, side)) for side in s] if s else None for s in a.stacks]
    wanted = [[tuple(map(tuple, side)) for side in s] if s else None for s in b.stacks]
    return bool((a.lives == b.lives).all()) and stacks == wanted and a.records == b.records and notes == others


def test_it_answers_as_this_process_would(helper: Helper, captured: tuple[list[Segment], NDArray[np.void]]) -> None:
    here = allocations.take(*captured)
    assert SIZE + 33 in here[0].lives["size"]
    assert agree(helper.ask(*captured), here)
    assert agree(helper.ask(*captured), here)


def test_it_says_what_could_not_be_read(
    helper: Helper, captured: tuple[list[Segment], NDArray[np.void]], tmp_path: Path
) -> None:
    absent = [captured[0][0]._replace(path=tmp_path / "nowhere.bin")]
    here = allocations.take(absent, captured[1])
    assert len(here[1]) == 1
    assert str(tmp_path) not in here[1][0]
    assert agree(helper.ask(absent, captured[1]), here)


def test_it_is_no_child_and_ends_when_nobody_asks(
    helper: Helper, captured: tuple[list[Segment], NDArray[np.void]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "_IDLE", 2.0)
    here = allocations.take(*captured)
    assert agree(helper.ask(*captured), here)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert ended(process_of(helper))
    assert agree(helper.ask(*captured), here)


def test_another_takes_the_place_of_one_that_was_killed(
    helper: Helper, captured: tuple[list[Segment], NDArray[np.void]]
) -> None:
    here = allocations.take(*captured)
    assert helper.ask(*captured)
    first = process_of(helper)
    os.kill(first, signal.SIGKILL)
    assert agree(helper.ask(*captured), here)
    assert process_of(helper) != first


def test_it_ends_with_its_process(
    helper: Helper, captured: tuple[list[Segment], NDArray[np.void]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apart, "_IDLE", 3600.0)
    assert helper.ask(*captured)
    pid = process_of(helper)
    helper.after_fork()
    assert ended(pid)


@pytest.mark.parametrize("program", ["", "/no/such/python", "/bin/false"])
def test_without_one_the_captures_are_read_here(
    helper: Helper,
    program: str,
    captured: tuple[list[Segment], NDArray[np.void]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    assert helper.ask(*captured) is None
    monkeypatch.setattr(allocations, "helper", helper)
    found, notes = allocations.read(*captured, here=False)
    assert (found.size == SIZE + 33).sum() == 1
    assert notes == []


def test_a_forked_child_has_one_of_its_own(captured: tuple[list[Segment], NDArray[np.void]]) -> None:
    assert apart.helper.ask(*captured)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if apart.helper.ask(*captured) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert apart.helper.ask(*captured)
