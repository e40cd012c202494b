"""A memray capture -> Allocations: lifetimes, the span that was open, resolved stacks, reallocs joined.

A capture has no clock. The marks of the recorder are in it as allocations of a size that only they have, one after
the other, so laying those against the log of marks gives every record its place in the session's sequence and
memray's thread numbers their threads.
"""

from __future__ import annotations

import gc
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copytrace.frames import native_frame, python_frame
from copytrace.model import MARK_BASE, MARK_PERIOD, Allocations, Frame
from copytrace.places import OWN_FILE, relative

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FREE, MALLOC, REALLOC, MUNMAP = 5, 6, 7, 15
_FIELDS = attrgetter("tid", "address", "size", "allocator", "stack_id", "native_stack_id")
_BLOCK = 1 << 16
_MMAP_THRESHOLD = 128 << 10
_MAX_FRAMES = 60


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
    rows: list[NDArray[np.uint64]] = []
    positions: list[NDArray[np.int64]] = []
    indices: list[NDArray[np.int64]] = []
    stacks: list[tuple[Frame, ...]] = [()]
    offset = 0
    for segment in segments:
        try:
            stream = _load(segment, stacks)
        except (OSError, RuntimeError, ValueError) as error:
            notes.append(f"memray capture {segment.path.name} could not be read: {str(error).splitlines()[0]}")
            continue
        position, index = match_marks(stream, segment.first_mark, len(marks))
        rows.append(stream)
        positions.append(position + offset)
        indices.append(index)
        offset += len(stream)
    if not rows:
        return absent("; ".join(notes) or "no memray capture"), notes
    table = np.concatenate(rows)
    return _lifetimes(table, np.concatenate(positions), np.concatenate(indices), marks, tuple(stacks)), notes


def _load(segment: Segment, stacks: list[tuple[Frame, ...]]) -> NDArray[np.uint64]:
    """The records of one capture, shape (records, 6): thread, address, size, allocator, index into ``stacks``, 0."""
    from memray import FileReader

    blocks: list[NDArray[np.uint64]] = []
    known: dict[int, int] = {}
    collecting = gc.isenabled()
    gc.disable()
    try:
        with FileReader(segment.path, max_memory_records=1) as reader:
            records = iter(reader.get_allocation_records())
            while batch := list(islice(records, _BLOCK)):
                flat = np.fromiter(chain.from_iterable(map(_FIELDS, batch)), np.uint64, 6 * len(batch))
                block = flat.reshape(-1, 6)
                keys = block[:, 4] << np.uint64(32) | block[:, 5]
                keys[(block[:, 3] == FREE) | (block[:, 3] == MUNMAP)] = 0
                distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
                for key, row in zip(distinct.tolist(), first.tolist(), strict=True):
                    if key not in known:
                        known[key] = len(stacks) if key else 0
                        if key:
                            stacks.append(_resolve(batch[row], segment.native))
                block[:, 4] = np.array([known[key] for key in distinct.tolist()], np.uint64)[inverse]
                blocks.append(block)
    finally:
        if collecting:
            gc.enable()
    return np.concatenate(blocks) if blocks else np.zeros((0, 6), np.uint64)


def _resolve(record: Any, native: bool) -> tuple[Frame, ...]:
    """The stack of a record, innermost first: Python frames, and native ones down to where they only run the
    interpreter. Callbacks of ``sys.monitoring`` have no Python frame in memray's stacks.
    """
    python = record.stack_trace(_MAX_FRAMES)
    if native:
        try:
            mixed = record.hybrid_stack_trace(_MAX_FRAMES)
        except AssertionError:  # memray 1.20 raises it now and then for hybrid stacks
            mixed = python
    else:
        mixed = python
    known = set(python)
    if python and python[0][1] != OWN_FILE and relative(python[0][1])[1] == "own":
        return OWN_STACK
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
    stacks: tuple[tuple[Frame, ...], ...],
) -> Allocations:
    count = len(rows)
    thread, address, size, allocator, stack = (rows[:, i] for i in range(5))
    freed = (allocator == FREE) | (allocator == MUNMAP)

    sequence = np.zeros(count + 1, np.uint64)
    sequence[position] = marks["sequence"][index]
    sequence = np.maximum.accumulate(sequence)

    span = np.zeros(count, np.uint64)
    for tid in np.unique(thread[position]):
        own = position[thread[position] == tid]
        of_thread = np.flatnonzero(thread == tid)
        latest = np.searchsorted(own, of_thread, side="right") - 1
        known = latest >= 0
        spans = marks["span"][index[thread[position] == tid]]
        span[of_thread[known]] = spans[latest[known]]

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
        stacks=stacks,
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
