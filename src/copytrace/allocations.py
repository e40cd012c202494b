"""A memray capture -> Allocations: lifetimes, the span that was open, reallocs joined, stacks.

A capture has no clock. The marks of the recorder are in it as allocations of a size that only they have, one after
the other, so laying those against the log of marks gives every record its place in the session's sequence and
memray's thread numbers their threads. Records are taken in block by block; what is kept of them is the allocations
that are alive and those of :data:`SMALLEST` bytes and more that were.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copytrace import stacks
from copytrace.apart import helper
from copytrace.collecting import no_collection
from copytrace.model import MARK_BASE, MARK_PERIOD, Allocations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SMALLEST = 512
"""Bytes; smaller blocks come from CPython's own pools, which memray does not see, and are left out."""

FREE, MALLOC, REALLOC, MUNMAP = 5, 6, 7, 15
_FIELDS = attrgetter("tid", "address", "size", "allocator", "stack_id", "native_stack_id")
_BATCH = 1 << 16
_MMAP_THRESHOLD = 128 << 10

_LIFE_DTYPE = np.dtype(
    [
        ("address", "<u8"),
        ("size", "<u8"),
        ("born", "<i8"),
        ("died", "<i8"),
        ("enter", "<u8"),
        ("leave", "<u8"),
        ("span", "<u8"),
        ("thread", "<u8"),
        ("stack", "<u4"),
        ("previous", "<i8"),
        ("moved", "?"),
    ]
)
"""``born`` and ``died`` are positions in the stream of all records; ``previous`` is the ``born`` of another, or -1."""


class Segment(NamedTuple):
    """One capture file of a session. ``first_mark`` is how many marks had been made when it began."""

    path: Path
    first_mark: int
    native: bool


def absent(reason: str) -> Allocations:
    """No allocations, and why."""
    none = np.zeros(0, np.uint64)
    small = np.zeros(0, np.uint32)
    return Allocations(
        none,
        none,
        none,
        none,
        none,
        none,
        none,
        small,
        small,
        np.zeros(0, np.int64),
        np.zeros(0, bool),
        recorded=False,
        reason=reason,
    )


class Taken(NamedTuple):
    """What captures hold. ``lives`` has dtype ``_LIFE_DTYPE`` and the order of birth; ``stacks`` are as
    :func:`copytrace.stacks.gather` returns them; ``records`` were read.
    """

    lives: NDArray[Any]
    stacks: list[stacks.Gathered | None]
    records: int


def read(segments: Sequence[Segment], marks: NDArray[Any], *, here: bool = True) -> tuple[Allocations, list[str]]:
    """Read the captures of a session, in order, and what could not be read of them.

    What reading takes is this process's when ``here``, and elsewhere a helper's if one can be had.
    """
    taken, notes = (None if here else helper.ask(segments, marks)) or take(segments, marks)
    if len(notes) == len(segments):
        return absent("; ".join(notes) or "no memray capture"), notes
    lives = taken.lives
    previous = np.searchsorted(lives["born"], lives["previous"])
    previous[lives["previous"] < 0] = -1
    return Allocations(
        address=np.ascontiguousarray(lives["address"]),
        size=np.ascontiguousarray(lives["size"]),
        born=lives["born"].astype(np.uint64),
        died=lives["died"].astype(np.uint64),
        enter=np.ascontiguousarray(lives["enter"]),
        leave=np.ascontiguousarray(lives["leave"]),
        span=np.ascontiguousarray(lives["span"]),
        thread=lives["thread"].astype(np.uint32),
        stack=np.ascontiguousarray(lives["stack"]),
        previous=previous,
        moved=np.ascontiguousarray(lives["moved"]),
        stacks=((), *map(stacks.named, taken.stacks)),
        records=taken.records,
    ), notes


def take(segments: Sequence[Segment], marks: NDArray[Any]) -> tuple[Taken, list[str]]:
    """Take in what captures hold, in this process, and what could not be read of them."""
    notes: list[str] = []
    intake = _Intake(marks)
    with ExitStack() as readers:
        for number, segment in enumerate(segments):
            try:
                with no_collection():
                    _take(intake, segment, number, readers)
            except (OSError, RuntimeError, ValueError) as error:
                reason = str(error).partition("\n")[0].replace(str(segment.path), segment.path.name)
                notes.append(f"memray capture {segment.path.name} could not be read: {reason}")
        return intake.taken(), notes


def spans_of(sequence: NDArray[np.uint64], thread: NDArray[np.uint64], marks: NDArray[Any]) -> NDArray[np.uint64]:
    """The innermost span on each ``thread`` at each ``sequence``; shape (n,)."""
    result = np.zeros(len(sequence), np.uint64)
    for number in np.unique(marks["thread"]):
        own = marks[marks["thread"] == number]
        mine = np.flatnonzero(thread == number)
        latest = np.searchsorted(own["sequence"], sequence[mine], side="right") - 1
        known = latest >= 0
        result[mine[known]] = own["span"][latest[known]]
    return result


def match_marks(residue: NDArray[np.int64], following: int, total: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which allocations that have the size of a mark are marks, and which marks: those from ``following`` on.

    ``residue`` is how much each is larger than :data:`copytrace.model.MARK_BASE`; there are ``total`` marks.
    """
    kept: list[NDArray[np.int64]] = []
    index: list[NDArray[np.int64]] = []
    at = 0
    while at < len(residue) and following < total:
        expected = following + np.arange(min(len(residue) - at, total - following))
        strays = np.flatnonzero(residue[at : at + len(expected)] != expected % MARK_PERIOD)
        matched = int(strays[0]) if len(strays) else len(expected)
        kept.append(np.arange(at, at + matched))
        index.append(expected[:matched])
        at += matched + 1
        following += matched
    return (np.concatenate(kept), np.concatenate(index)) if kept else (np.zeros(0, np.int64), np.zeros(0, np.int64))


def _take(intake: _Intake, segment: Segment, number: int, readers: ExitStack) -> None:
    from memray import FileReader

    reader = readers.enter_context(FileReader(segment.path, max_memory_records=1))
    records = iter(reader.get_allocation_records())
    first = list(islice(records, 1))
    rows_of = _row_taker(first)
    records = chain(first, records)
    known: dict[int, int] = {}
    intake.begin(number, segment)
    while len(rows := rows_of(records, known, intake.kept)):
        intake.add(rows)


type _RowTaker = Callable[[Iterator[Any], dict[int, int], list[Any]], NDArray[np.int64]]
"""Takes the next records as rows: thread, address, size, allocator, and the number of the stack of what may be kept,
from 1. ``known`` has the stacks of this capture; of each new one the record is put into ``kept``.
"""


def _row_taker(records: Sequence[Any]) -> _RowTaker:
    """The extension where memray holds ``records`` as it expects, in half the time."""
    try:
        from copytrace._rows import take
    except ImportError:
        return _take_rows

    def take_rows(records: Iterator[Any], known: dict[int, int], kept: list[Any]) -> NDArray[np.int64]:
        return np.frombuffer(take(records, _BATCH, SMALLEST, known, kept), np.int64).reshape(-1, 5)

    try:
        same = all(np.array_equal(take_rows(iter([r]), {}, []), _take_rows(iter([r]), {}, [])) for r in records)
    except TypeError:
        same = False
    return take_rows if same else _take_rows


def _take_rows(records: Iterator[Any], known: dict[int, int], kept: list[Any]) -> NDArray[np.int64]:
    batch = list(islice(records, _BATCH))
    rows = np.fromiter(chain.from_iterable(map(_FIELDS, batch)), np.int64, 6 * len(batch)).reshape(-1, 6)
    keys = rows[:, 4] << 32 | rows[:, 5]
    rows[:, 4] = 0
    told = np.flatnonzero((rows[:, 2] >= SMALLEST) & ~_is_end(rows[:, 3]))
    distinct, first, inverse = np.unique(keys[told], return_index=True, return_inverse=True)
    for key, at in zip(distinct.tolist(), told[first].tolist(), strict=True):
        if key not in known:
            kept.append(batch[at])
            known[key] = len(kept)
    rows[told, 4] = np.array([known[key] for key in distinct.tolist()], np.int64)[inverse]
    return rows[:, :5]


class _Intake:
    """What was taken in so far."""

    def __init__(self, marks: NDArray[Any]) -> None:
        self.marks = marks
        self.kept: list[Any] = []
        """One record with each stack."""
        self.begins: list[tuple[int, bool]] = []
        """How many of those there were when a capture began, and whether it has native frames."""
        self.count = 0
        self.ended: list[NDArray[Any]] = []
        self.alive = np.zeros(0, _LIFE_DTYPE)
        self.threads: dict[int, int] = {}
        self.sequence = 0
        self.last = np.zeros((1, 5), np.int64)
        self.last_ended = np.zeros(1, _LIFE_DTYPE)

    def begin(self, number: int, segment: Segment) -> None:
        """Begin with the next capture."""
        self.thread_base = number << 32
        self.following = segment.first_mark
        self.begins.append((len(self.kept), segment.native))

    def add(self, rows: NDArray[np.int64]) -> None:
        """Take in the next records."""
        thread, address, size, allocator, stack = (np.ascontiguousarray(rows[:, i]) for i in range(5))
        thread = thread + self.thread_base
        position, sequence = self._sequence(thread, size, allocator)
        known = len(self.alive)
        following = _following(np.concatenate([self.alive["address"].astype(np.int64), address]))

        opens = ~_is_end(allocator) & (size >= SMALLEST)
        opens[position] = False
        born = np.flatnonzero(opens)
        lives = np.zeros(known + len(born), _LIFE_DTYPE)
        lives[:known] = self.alive
        fresh = lives[known:]
        fresh["address"], fresh["size"], fresh["born"] = address[born], size[born], self.count + born
        fresh["enter"], fresh["thread"], fresh["stack"] = sequence[born], thread[born], stack[born]

        ends = following[np.concatenate([np.arange(known), known + born])] - known
        over = ends >= 0
        lives["died"] = self.count + ends
        lives["leave"][over] = sequence[ends[over]]
        self._join_reallocs(rows, lives, ends, born)
        self.ended.append(lives[over])
        self.alive = lives[~over]
        self.count += len(rows)
        self.sequence = int(sequence[-1])

    def _sequence(
        self, thread: NDArray[np.int64], size: NDArray[np.int64], allocator: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Where the marks are, and the sequence at each record."""
        candidate = np.flatnonzero((allocator == MALLOC) & (size >= MARK_BASE) & (size < MARK_BASE + MARK_PERIOD))
        chosen, index = match_marks(size[candidate] - MARK_BASE, self.following, len(self.marks))
        position = candidate[chosen]
        sequence = np.zeros(len(size), np.uint64)
        sequence[position] = self.marks["sequence"][index]
        sequence[0] = max(int(sequence[0]), self.sequence)
        if len(index):
            self.following = int(index[-1]) + 1
            self.threads.update(zip(thread[position].tolist(), self.marks["thread"][index].tolist(), strict=True))
        return position, np.maximum.accumulate(sequence)

    def _join_reallocs(
        self, rows: NDArray[np.int64], lives: NDArray[Any], ends: NDArray[np.int64], born: NDArray[np.int64]
    ) -> None:
        """Name in each life the one that it was reallocated from, and whether the bytes moved.

        memray writes a realloc as the end of the old block and, at once, the beginning of the new one. Blocks that
        glibc maps (they begin 16 bytes into a page) are moved by ``mremap``, which copies no bytes.
        """
        before = np.concatenate([self.last, rows])[:-1]
        ended = np.full(len(rows) + 1, -1, np.int64)
        ended[1 + ends[ends >= 0]] = np.flatnonzero(ends >= 0)
        candidates = np.concatenate([lives, self.last_ended])
        ended[0] = len(lives) if self.last_ended["size"][0] else -1
        fresh = lives[len(lives) - len(born) :]
        again = (rows[born, 3] == REALLOC) & (before[born, 3] == FREE) & (before[born, 0] == rows[born, 0])
        again &= ended[born] >= 0
        old = candidates[ended[born]]
        mapped = np.minimum(fresh["size"], old["size"]) >= _MMAP_THRESHOLD
        mapped &= ((fresh["address"] & 0xFFF) == 16) & ((old["address"] & 0xFFF) == 16)
        fresh["previous"] = np.where(again, old["born"], -1)
        fresh["moved"] = again & (fresh["address"] != old["address"]) & ~mapped
        self.last = rows[-1:]
        self.last_ended = candidates[ended[-1:]] if ended[-1] >= 0 else np.zeros(1, _LIFE_DTYPE)

    def taken(self) -> Taken:
        """All of it."""
        self.alive["died"], self.alive["leave"] = self.count, self.sequence
        lives = np.concatenate([*self.ended, self.alive])
        lives = lives[np.argsort(lives["born"])]
        numbers, inverse = np.unique(lives["thread"], return_inverse=True)
        named = np.array([self.threads.get(number, 0) for number in numbers.tolist()], np.uint64)[inverse]
        lives["span"] = spans_of(lives["enter"], named, self.marks)
        gathered = stacks.gather(self.kept, self._natives(), lives["stack"], lives["size"], lives["span"])
        return Taken(lives, gathered, self.count)

    def _natives(self) -> NDArray[np.bool_]:
        """Whether the capture of each kept record has native frames."""
        native = np.zeros(len(self.kept), bool)
        for first, of_capture in self.begins:
            native[first:] = of_capture
        return native


def _is_end(allocator: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.isin(allocator, (FREE, MUNMAP))


def _following(address: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each record the next one at the same address, -1 for none."""
    order = np.argsort(address, kind="stable")
    ordered = address[order]
    following = np.full(len(address), -1, np.int64)
    following[order[:-1]] = np.where(ordered[:-1] == ordered[1:], order[1:], -1)
    return following
