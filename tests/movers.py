"""Builds and drives ``moves/moves.c``: a library whose moves are known beforehand, in several forms of linkage."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from copytrace import transfers
from copytrace.transfers import Recording, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SOURCE = Path(__file__).parent / "moves" / "moves.c"

COPIES = ["memcpy", "memmove", "mempcpy", "memcpy_chk", "memmove_chk", "mempcpy_chk", "pointer", "hidden"]
FETCHES = [
    *("read", "read_chk", "pread", "pread_chk", "readv", "preadv", "preadv2"),
    *("recv", "recv_chk", "recvfrom", "recvmsg"),
]
FLUSHES = ["write", "pwrite", "writev", "pwritev", "pwritev2", "send", "sendto", "sendmsg"]
STREAMS = ["fread", "fwrite"]
CALLS = [*COPIES, *FETCHES, *FLUSHES, *STREAMS]
"""In the order of the table in moves.c."""
VECTORS = {"readv", "preadv", "preadv2", "recvmsg", "writev", "pwritev", "pwritev2", "sendmsg"}

LINKAGES = {
    "lazy": ["-Wl,-z,lazy"],
    "now": ["-Wl,-z,now", "-Wl,-z,relro"],
    "got": ["-fno-plt", "-Wl,-z,now", "-Wl,-z,relro"],
}
"""Bound on the first call; bound at once and read-only; called through the table itself."""


class Step(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_uint32),
        ("descriptor", ctypes.c_int32),
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("pieces", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("result", ctypes.c_int64),
    )


class Program(ctypes.Structure):
    _fields_ = (("steps", ctypes.POINTER(Step)), ("count", ctypes.c_uint64), ("thread", ctypes.c_uint64))


class Move(NamedTuple):
    """A row, with the name of its caller."""

    thread: int
    kind: str
    source: int
    destination: int
    nbytes: int
    caller: str


@cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="copytrace-moves-"))


@cache
def build(linkage: str, name: str = "") -> Path:
    """Compile the library; each ``name`` is a file of its own, which the loader takes for another library."""
    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    if not shutil.which(compiler):
        pytest.skip(f"no C compiler ({compiler})")
    path = _directory() / f"moves_{linkage}{name}.so"
    options = [
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fno-builtin",
        "-fno-optimize-sibling-calls",
        "-fPIC",
        "-shared",
        "-pthread",
    ]
    subprocess.run([compiler, *options, *LINKAGES[linkage], SOURCE, "-o", path], check=True)
    return path


@cache
def load(linkage: str = "now") -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(linkage)))
    library.moves_nanoseconds.restype = ctypes.c_double
    library.moves_recurse.restype = library.moves_stop_workers.restype = ctypes.c_uint64
    library.moves_realloc.restype = ctypes.c_void_p
    library.moves_realloc.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.moves_hold_worker.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    for function in (
        library.moves_in_raw_child,
        library.moves_repeat,
        library.moves_nanoseconds,
        library.moves_recurse,
        library.moves_run_threads,
    ):
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    return library


def copy(source: int, destination: int, size: int, call: str = "memcpy") -> Step:
    return Step(call=CALLS.index(call), source=source, destination=destination, size=size, pieces=1)


def program(steps: Sequence[Step]) -> Program:
    """The caller keeps it alive while it runs."""
    array = (Step * max(len(steps), 1))(*steps)
    return Program(steps=array, count=len(steps))


def run(steps: Sequence[Step], linkage: str = "now") -> Program:
    """Run steps on this thread; the results are in ``program.steps``."""
    made = program(steps)
    load(linkage).moves_run(ctypes.byref(made))
    return made


def run_threads(lists: Sequence[Sequence[Step]], linkage: str = "now") -> list[Program]:
    """Run each list of steps in a native thread that Python does not know."""
    made = (Program * len(lists))(*(program(steps) for steps in lists))
    assert load(linkage).moves_run_threads(ctypes.byref(made), len(lists)) == 0
    return list(made)


def repeat(step: Step, times: int) -> None:
    load().moves_repeat(ctypes.byref(step), times)


def function_of(call: str) -> str:
    return "hidden_copy" if call == "hidden" else f"moves_{call}"


def expected(step: Step, thread: int) -> list[Move]:
    """The rows that a step must leave, given its result."""
    call = CALLS[step.call]
    source, destination, size = step.source or 0, step.destination or 0, step.size
    if call in COPIES:
        return (
            [Move(thread, "copy", source, destination, size, function_of(call))]
            if size and source != destination
            else []
        )
    moves, left = [], max(step.result, 0)
    pieces = step.pieces if call in VECTORS else 1
    for n in range(pieces):
        offset = n * (size // pieces)
        length = min(left, size // pieces if n + 1 < pieces else size - offset)
        left -= length
        if length and call in FETCHES:
            moves.append(Move(thread, "fetch", step.descriptor, destination + offset, length, function_of(call)))
        elif length:
            moves.append(Move(thread, "flush", source + offset, step.descriptor, length, function_of(call)))
    return moves


def all_expected(made: Program) -> list[Move]:
    return [move for step in made.steps[: made.count] for move in expected(step, made.thread)]


def counters(spool: Path) -> tuple[int, ...]:
    """The next sequence, sequences taken too late, marks, moves lost and marks lost, as the extension counted them."""
    numbers = np.fromfile(spool / "counters.bin", "<u8", 19)
    return tuple(int(numbers[n]) for n in (3, 4, 16, 17, 18))


class Recorded(NamedTuple):
    moves: list[Move]
    """The library's rows, in their order."""
    small: Counter[str]
    """Bytes of its small moves by caller."""
    small_moves: Counter[str]
    lost: int
    marks: Any


def recorded(spool: Path, *, ended: bool = True) -> Recorded:
    """What was written of the library's own moves; those of Python and numpy are left out."""
    moved, marks = read(spool)
    assert moved.recorded, moved.reason
    if ended:
        next_sequence, late, taken, lost, lost_marks = counters(spool)
        assert len(moved.rows) + moved.lost + len(marks) + lost_marks + late == next_sequence - 1
        assert (len(marks) + lost_marks, moved.lost) == (taken, lost)
    assert np.all(np.diff(moved.rows["sequence"].astype(np.int64)) > 0)
    assert np.all(moved.rows["count"] == 1)
    own = [frame.file.startswith("moves_") for frame in moved.callers]
    names = [frame.function for frame in moved.callers]
    moves = [
        Move(
            int(r["thread"]),
            ("copy", "fetch", "flush")[r["kind"]],
            int(r["source"]),
            int(r["destination"]),
            int(r["nbytes"]),
            names[r["caller"]],
        )
        for r in moved.rows
        if own[r["caller"]]
    ]
    small, small_moves = Counter[str](), Counter[str]()
    for caller, count, nbytes in moved.small:
        if own[caller]:
            small[names[caller]] += nbytes
            small_moves[names[caller]] += count
    return Recorded(moves, small, small_moves, moved.lost, marks)


def record(spool: Path, work: Callable[[], object], *, min_bytes: int = 1) -> Recorded:
    """Record while ``work`` runs."""
    for linkage in LINKAGES:
        load(linkage)
    recording = Recording(spool, min_bytes=min_bytes)
    recording.start()
    try:
        work()
    finally:
        recording.stop()
    return recorded(spool)


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    """A test that fails in the middle of a recording does not spoil the next."""
    yield
    if transfers._active is not None:
        transfers._active.stop()
        pytest.fail("a recording was left open")


class Memory:
    """Two blocks of memory that outlive the moves between them."""

    def __init__(self, size: int) -> None:
        self.left = np.arange(size, dtype=np.uint64).astype(np.uint8)
        self.right = np.zeros(size, np.uint8)
        self.source = self.left.ctypes.data
        self.destination = self.right.ctypes.data
