"""A memray capture -> Allocations: lifetimes, the span that was open, reallocs joined, stacks.

A capture has no clock. The marks of the recorder are in it by a size that only they have, one after the other, so
laying those against the log of marks gives every record its place in the session's sequence and memray's thread numbers
their threads. Records are taken in block by block; what is kept of them is the allocations
that are alive and those of :data:`SMALLEST` bytes and more that were.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copytrace.captures import FREE, MALLOC, MUNMAP, REALLOC, SMALLEST, is_end, open_capture
from copytrace.collecting import no_collection
from copytrace.model import MARK_ADDRESS, MARK_BASE, MARK_COUNT, MARK_PERIOD, Allocations
from copytrace.stacks import Stacks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from copytrace.captures import Capture
    from copytrace.transfers import MarkTable

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
        ("stack", "<i8"),
        ("previous", "<i8"),
        ("moved", "?"),
    ]
)
"""``born`` and ``died`` are positions in the stream of all records; ``previous`` is the ``born`` of another, or -1."""


class Segment(NamedTuple):
    """One capture file of a session. ``first_mark`` is how many marks there were before those that it may have."""

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


def read(
    segments: Sequence[Segment],
    marks: NDArray[Any] | MarkTable,
    cuts: Sequence[int] = (),
    notes: list[str] | None = None,
) -> Iterator[Allocations]:
    """Read the captures of a session, in order, as one table for each stretch of it: up to each of the sequences
    ``cuts``, at which no span was open, and from the last of them on. A table has what was alive at some moment of its
    stretch; what outlives it ends at its ``records``. Of what cannot be read a note is added to ``notes``.

    ``marks`` are all of them, a row each, in order.
    """
    unread: list[str] = []
    intake = _Intake(marks)
    tables = _stretches(intake, segments, cuts, unread)
    while True:
        with no_collection():  # not while whoever asked is at work
            table = next(tables, None)
        if table is None:
            break
        yield table if len(unread) < len(segments) else absent("; ".join(unread) or "no memray capture")
    if notes is not None:
        notes += unread
        if intake.unseen:
            notes.append(
                f"{intake.unseen} calls began or ended while one memray capture ended and the next began: "
                "what they allocated then was not recorded"
            )


def _stretches(
    intake: _Intake, segments: Sequence[Segment], cuts: Sequence[int], unread: list[str]
) -> Iterator[Allocations]:
    left = list(cuts)[::-1]
    for number, segment in enumerate(segments):
        try:
            capture = open_capture(segment.path)
            intake.begin(number, segment, capture)
            while len(rows := capture.take(_BATCH)):
                position, sequence = intake.place(rows)
                at = 0
                while left and sequence[-1] >= left[-1]:
                    until = int(np.searchsorted(sequence, np.uint64(left.pop())))
                    intake.add(rows, position, sequence, at, until)
                    at = until
                    yield intake.table()
                intake.add(rows, position, sequence, at, len(rows))
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0].replace(str(segment.path), segment.path.name)
            unread.append(f"memray capture {segment.path.name} could not be read: {reason}")
    yield from (intake.table() for _ in range(len(left) + 1))


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


def number_marks(size: NDArray[np.int64], following: int) -> NDArray[np.int64]:
    """Which marks unmapped these sizes, in order: the first is ``following`` or comes after it."""
    numbers = size - 1
    return following - 1 + np.cumsum(np.diff(numbers, prepend=following - 1) % MARK_COUNT)


def first_ahead(residue: NDArray[np.int64], following: int) -> int:
    """By how many marks the first of a capture comes after ``following``: two in a row are no other allocations."""
    rows = np.flatnonzero(np.diff(residue) % MARK_PERIOD == 1)
    return int(residue[rows[0]] - following) % MARK_PERIOD if len(rows) else 0


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


class _Intake:
    """What was taken in of the stretch that is being read, and what is alive."""

    def __init__(self, marks: NDArray[Any] | MarkTable) -> None:
        self.marks = marks
        self.stacks = Stacks()
        self.known_stacks = 0
        self.count = 0
        self.begun = 0
        """The sequence at which the stretch began."""
        self.ended: list[NDArray[Any]] = []
        self.alive = np.zeros(0, _LIFE_DTYPE)
        self.threads: dict[int, int] = {}
        self.unmapped = False
        """Whether marks unmap."""
        self.following = self.reached = 0
        """How many marks there were before the next that may come, and up to the last that came."""
        self.aligned = False
        """Whether one came in this capture."""
        self.unseen = 0
        """How many marks fell between two captures."""
        self.sequence = 0
        self.last = np.zeros((1, 5), np.int64)
        self.last_ended = np.zeros(1, _LIFE_DTYPE)

    def begin(self, number: int, segment: Segment, capture: Capture) -> None:
        """Begin with the next capture."""
        self.thread_base = number << 32
        self.following = segment.first_mark
        self.aligned = False
        self.stack_base = self.known_stacks
        self.stacks.begin(self.stack_base, capture, native=segment.native)

    def place(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Where the marks are among the next records, and the sequence at each record."""
        thread, size = rows[:, 0] + self.thread_base, rows[:, 2]
        position = np.flatnonzero((rows[:, 3] == MUNMAP) & (rows[:, 1] == MARK_ADDRESS))
        self.unmapped |= len(position) > 0
        if self.unmapped:
            index = number_marks(size[position], self.following)
            index = index[index < len(self.marks)]
            position = position[: len(index)]
        else:
            made = (rows[:, 3] == MALLOC) & (size >= MARK_BASE) & (size < MARK_BASE + MARK_PERIOD)
            position = np.flatnonzero(made)
            residue = size[position] - MARK_BASE
            if not self.aligned:
                self.following += first_ahead(residue, self.following)
            chosen, index = match_marks(residue, self.following, len(self.marks))
            position = position[chosen]
        sequence = np.zeros(len(size), np.uint64)
        if len(index):
            first = int(index[0])
            self.unseen += first - self.reached if self.reached else 0
            self.reached = self.following = int(index[-1]) + 1
            self.aligned = True
            marks = self.marks[max(first - 1, 0) : self.reached]
            sequence[0] = marks["sequence"][0] if first else 0
            marks = marks[index - self.reached]
            sequence[position] = marks["sequence"]
            self.threads.update(zip(thread[position].tolist(), marks["thread"].tolist(), strict=True))
        sequence[0] = max(int(sequence[0]), self.sequence)
        return position, np.maximum.accumulate(sequence)

    def add(
        self, rows: NDArray[np.int64], position: NDArray[np.int64], sequence: NDArray[np.uint64], begin: int, end: int
    ) -> None:
        """Take in the records from ``begin`` to ``end``, of which those at ``position`` are marks."""
        if begin == end:
            return
        position = position[(position >= begin) & (position < end)] - begin
        rows, sequence = rows[begin:end], sequence[begin:end]
        thread, address, size, allocator, stack = (np.ascontiguousarray(rows[:, i]) for i in range(5))
        known = len(self.alive)
        following = _following(np.concatenate([self.alive["address"].astype(np.int64), address]))

        opens = ~is_end(allocator) & (size >= SMALLEST)
        opens[position] = False
        born = np.flatnonzero(opens)
        lives = np.zeros(known + len(born), _LIFE_DTYPE)
        lives[:known] = self.alive
        fresh = lives[known:]
        fresh["address"], fresh["size"], fresh["born"] = address[born], size[born], self.count + born
        fresh["enter"], fresh["thread"] = sequence[born], thread[born] + self.thread_base
        fresh["stack"] = stack[born] + self.stack_base
        self.known_stacks = max(self.known_stacks, int(stack.max()) + self.stack_base)

        ends = following[np.concatenate([np.arange(known), known + born])] - known
        over = ends >= 0
        lives["died"] = self.count + ends
        lives["leave"][over] = sequence[ends[over]]
        self._join_reallocs(rows, lives, ends, born)
        self.ended.append(lives[over])
        self.alive = lives[~over]
        self.count += len(rows)
        self.sequence = int(sequence[-1])

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

    def table(self) -> Allocations:
        """The stretch up to here; what follows is of the next."""
        self.alive["died"], self.alive["leave"] = self.count, self.sequence
        lives = np.concatenate([*self.ended, self.alive])
        lives = lives[np.argsort(lives["born"])]
        numbers, inverse = np.unique(lives["thread"], return_inverse=True)
        named = np.array([self.threads.get(number, 0) for number in numbers.tolist()], np.uint64)[inverse]
        first, last = (
            bisect_left(self.marks, at, key=itemgetter("sequence")) for at in (self.begun, self.sequence + 1)
        )
        fresh = lives["enter"] >= self.begun
        lives["span"][fresh] = spans_of(lives["enter"][fresh], named[fresh], self.marks[first:last])
        self.ended, self.alive = [], lives[lives["died"] == self.count]
        self.begun = self.sequence + 1
        previous = np.searchsorted(lives["born"], lives["previous"])
        known = (lives["previous"] >= 0) & (lives["born"][np.minimum(previous, len(lives) - 1)] == lives["previous"])
        stack, frames = self.stacks.resolve(lives["stack"], lives["size"], lives["span"])
        return Allocations(
            address=np.ascontiguousarray(lives["address"]),
            size=np.ascontiguousarray(lives["size"]),
            born=lives["born"].astype(np.uint64),
            died=lives["died"].astype(np.uint64),
            enter=np.ascontiguousarray(lives["enter"]),
            leave=np.ascontiguousarray(lives["leave"]),
            span=np.ascontiguousarray(lives["span"]),
            thread=lives["thread"].astype(np.uint32),
            stack=stack,
            previous=np.where(known, previous, -1),
            moved=np.ascontiguousarray(lives["moved"]),
            stacks=frames,
            records=self.count,
        )


def _following(address: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each record the next one at the same address, -1 for none."""
    order = np.argsort(address)  # ten times as fast as a stable one; equal ones are put in order below
    ordered = address[order]
    group = np.cumsum(np.append(0, ordered[1:] != ordered[:-1])) if len(order) else order
    order = np.sort(group * len(order) + order) % max(len(order), 1)
    following = np.full(len(address), -1, np.int64)
    following[order[:-1]] = np.where(ordered[:-1] == ordered[1:], order[1:], -1)
    return following
