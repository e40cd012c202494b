"""A memray capture -> Allocations: lifetimes, the span that was open, resolved stacks, reallocs joined.

A capture has no clock. The marks of the recorder are in it as allocations of a size that only they have, one after
the other, so laying those against the log of marks gives every record its place in the session's sequence and
memray's thread numbers their threads.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copytrace.collecting import no_collection
from copytrace.frames import native_frame, python_frame
from copytrace.model import MARK_BASE, MARK_PERIOD, Allocations, Frame
from copytrace.places import OWN_FILE, relative

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FREE, MALLOC, REALLOC, MUNMAP = 5, 6, 7, 15
_FIELDS = attrgetter("tid", "address", "size", "allocator", "stack_id", "native_stack_id")
_BLOCK = 1 << 13
_MMAP_THRESHOLD = 128 << 10
_MAX_FRAMES = 60
_SMALLEST = 512
_MUCH = 64 << 10
_MOST = 6000
_MOST_NATIVE = 1500
"""Stacks that are resolved, and those of them with native frames."""


UNRESOLVED = (Frame("(not resolved)", "", 0),)
"""The stack of what is too little to be payload."""

OWN_STACK = (Frame("copytrace", "copytrace", 0, layer="copytrace"),)
"""The stack of what copytrace itself allocated."""


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


def read(segments: Sequence[Segment], marks: NDArray[Any]) -> tuple[Allocations, list[str]]:
    """Read the captures of a session, in order, and what could not be read of them."""
    notes: list[str] = []
    loaded: list[_Stream] = []
    with ExitStack() as readers:
        for segment in segments:
            try:
                loaded.append(_load(segment, len(loaded), sum(len(s.records) for s in loaded), readers))
            except (OSError, RuntimeError, ValueError) as error:
                notes.append(f"memray capture {segment.path.name} could not be read: {str(error).splitlines()[0]}")
        if not loaded:
            return absent("; ".join(notes) or "no memray capture"), notes
        rows = np.concatenate([stream.rows for stream in loaded])
        found = [match_marks(stream.rows, stream.first_mark, len(marks)) for stream in loaded]
        starts = np.cumsum([0, *(len(stream.rows) for stream in loaded[:-1])])
        position = np.concatenate([at + start for (at, _), start in zip(found, starts, strict=True)])
        index = np.concatenate([number for _, number in found])
        blocks = _lifetimes(rows, position, index, marks)
        return replace(blocks, stacks=_stacks(blocks, loaded)), notes


class _Stream(NamedTuple):
    """A capture in memory. ``rows`` have the order of ``_FIELDS``, but the stack is an index into ``records``, counted
    on over all streams (0: none), each of which is one record with that stack.
    """

    rows: NDArray[np.uint64]
    records: list[Any]
    first_mark: int
    native: bool


def _load(segment: Segment, number: int, offset: int, readers: ExitStack) -> _Stream:
    from memray import FileReader

    blocks: list[NDArray[np.uint64]] = []
    known: dict[int, int] = {0: 0}
    kept: list[Any] = []
    with no_collection():
        reader = readers.enter_context(FileReader(segment.path, max_memory_records=1))
        records = iter(reader.get_allocation_records())
        while batch := list(islice(records, _BLOCK)):
            flat = np.fromiter(chain.from_iterable(map(_FIELDS, batch)), np.uint64, 6 * len(batch))
            block = flat.reshape(-1, 6)
            keys = block[:, 4] << np.uint64(32) | block[:, 5]
            keys[(block[:, 3] == FREE) | (block[:, 3] == MUNMAP)] = 0
            distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            for key, row in zip(distinct.tolist(), first.tolist(), strict=True):
                if key not in known:
                    kept.append(batch[row])
                    known[key] = offset + len(kept)
            block[:, 4] = np.array([known[key] for key in distinct.tolist()], np.uint64)[inverse]
            block[:, 0] += np.uint64(number << 32)
            blocks.append(block)
    rows = np.concatenate(blocks) if blocks else np.zeros((0, 6), np.uint64)
    return _Stream(rows, kept, segment.first_mark, segment.native)


def _stacks(blocks: Allocations, loaded: Sequence[_Stream]) -> tuple[tuple[Frame, ...], ...]:
    """The stacks of what may be payload: allocated inside a span, or much of it.

    Resolving native frames takes up to a millisecond a stack, and importing a library inside a span makes tens of
    thousands of stacks: only those that most was allocated on are resolved, the very largest with native frames.
    """
    count = 1 + sum(len(stream.records) for stream in loaded)
    total = np.bincount(blocks.stack, blocks.size, count)
    inside = np.bincount(blocks.stack, (blocks.span > 0) & (blocks.size >= _SMALLEST), count)
    wanted = (inside > 0) | (total >= _MUCH)
    largest = np.argsort(np.where(wanted, total, -1.0), kind="stable")[::-1]
    wanted[largest[_MOST:]] = False
    with_native = np.zeros(count, bool)
    with_native[largest[:_MOST_NATIVE]] = True
    stacks: list[tuple[Frame, ...]] = [()]
    for stream in loaded:
        for record in stream.records:
            native = stream.native and bool(with_native[len(stacks)])
            stacks.append(_resolve(record, native) if wanted[len(stacks)] else UNRESOLVED)
    return tuple(stacks)


def _resolve(record: Any, native: bool) -> tuple[Frame, ...]:
    """The stack of a record, innermost first: Python frames, and native ones down to where they only run the
    interpreter. Callbacks of ``sys.monitoring`` have no Python frame in memray's stacks.
    """
    python = record.stack_trace(_MAX_FRAMES)
    if python and python[0][1] != OWN_FILE and relative(python[0][1])[1] == "own":
        return OWN_STACK
    mixed = python
    if native:
        with suppress(AssertionError):  # memray 1.20 raises it now and then for hybrid stacks
            mixed = record.hybrid_stack_trace(_MAX_FRAMES)
    known = set(python)
    frames: list[Frame] = []
    innermost = True
    for entry in mixed:
        if entry in known:
            innermost = False
            if relative(entry[1])[1] != "own":
                frames.append(python_frame(*entry))
        else:
            frame = native_frame(*entry)
            if innermost and "call_instrumentation" in frame.function:
                return OWN_STACK
            if innermost or frame.layer:
                frames.append(frame)
    return tuple(frames)


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


def match_marks(rows: NDArray[np.uint64], first_mark: int, total: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions in the stream of the marks that are in it, and which mark each is."""
    size = rows[:, 2]
    candidate = (rows[:, 3] == MALLOC) & (size >= MARK_BASE) & (size < MARK_BASE + MARK_PERIOD)
    position = np.flatnonzero(candidate)
    residue = (size[position] - np.uint64(MARK_BASE)).astype(np.int64)
    expected = first_mark + np.arange(len(position))
    if np.array_equal(residue, expected % MARK_PERIOD) and first_mark + len(position) <= total:
        return position, expected
    kept, index = [], []
    following = first_mark
    for at, value in zip(position.tolist(), residue.tolist(), strict=True):
        if following < total and value == following % MARK_PERIOD:
            kept.append(at)
            index.append(following)
            following += 1
    return np.array(kept, np.int64), np.array(index, np.int64)


def _lifetimes(
    rows: NDArray[np.uint64],
    position: NDArray[np.int64],
    index: NDArray[np.int64],
    marks: NDArray[Any],
) -> Allocations:
    count = len(rows)
    thread, address, size, allocator, stack = (rows[:, i] for i in range(5))
    freed = (allocator == FREE) | (allocator == MUNMAP)

    sequence = np.zeros(count + 1, np.uint64)
    sequence[position] = marks["sequence"][index]
    sequence = np.maximum.accumulate(sequence)

    threads = dict(zip(thread[position].tolist(), marks["thread"][index].tolist(), strict=True))
    numbers, inverse = np.unique(thread, return_inverse=True)
    named = np.array([threads.get(number, 0) for number in numbers.tolist()], np.uint64)
    span = spans_of(sequence[:-1], named[inverse], marks)

    order = np.lexsort((np.arange(count), address))
    same = np.zeros(count, bool)
    same[:-1] = address[order][:-1] == address[order][1:]
    following = np.full(count, count, np.int64)
    following[order[:-1]] = np.where(same[:-1], order[1:], count)

    is_mark = np.zeros(count, bool)
    is_mark[position] = True
    born = np.flatnonzero(~freed & ~is_mark & (size > 0))
    died = following[born]
    previous, moved = _reallocs(born, died, rows)
    return Allocations(
        address=address[born],
        size=size[born],
        born=born.astype(np.uint64),
        died=died.astype(np.uint64),
        enter=sequence[born],
        leave=sequence[died],
        span=span[born],
        thread=thread[born].astype(np.uint32),
        stack=stack[born].astype(np.uint32),
        previous=previous,
        moved=moved,
        records=count,
    )


def _reallocs(
    born: NDArray[np.int64], died: NDArray[np.int64], rows: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each allocation the row of the block it was reallocated from (-1 for none), and whether the bytes moved.

    memray writes a realloc as the end of the old block and, at once, the beginning of the new one. Blocks that glibc
    maps (they begin 16 bytes into a page) are moved by ``mremap``, which copies no bytes.
    """
    thread, address, size, allocator = (rows[:, i] for i in range(4))
    previous = np.full(len(born), -1, np.int64)
    moved = np.zeros(len(born), bool)
    if not len(born):
        return previous, moved
    before = np.maximum(born - 1, 0)
    again = (allocator[born] == REALLOC) & (allocator[before] == FREE) & (thread[before] == thread[born]) & (born > 0)
    ended = np.full(len(rows) + 1, -1, np.int64)
    ended[died] = np.arange(len(born))
    ended[len(rows)] = -1
    previous[again] = ended[before[again]]
    again &= previous >= 0
    old = born[previous]
    mapped = np.minimum(size[born], size[old]) >= _MMAP_THRESHOLD
    mapped &= ((address[born] & np.uint64(0xFFF)) == 16) & ((address[old] & np.uint64(0xFFF)) == 16)
    moved[again] = ((address[born] != address[old]) & ~mapped)[again]
    return previous, moved
