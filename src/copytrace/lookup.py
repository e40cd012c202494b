"""Which block of memory an address lay in at a moment of the session.

A *region* is a block during one life: an allocation (with those that realloc turned it into without moving it), or
memory from before the session that a probe was handed. Addresses are reused within microseconds, so every look-up is
made at its place in the sequence: the newest block alive then that covers the range.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from copytrace.allocations import spans_of
from copytrace.model import OUTPUT, Trace
from copytrace.operations import is_metadata

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALLEST = 512
"""Bytes; smaller blocks come from CPython's own pools and memray does not see them."""

_DIES, _SEEN, _BORN, _MOVES = range(4)
_SMALL = 64 << 10


@dataclass(slots=True)
class Region:
    """``rows`` are rows of the allocations, empty for memory from before the session. ``nbytes`` is the size of the
    largest. ``native`` says that a thread without any Python frame allocated it.
    """

    id: int
    address: int
    nbytes: int
    rows: list[int] = field(default_factory=list)
    span: int = 0
    stack: int = 0
    enter: int = 0
    native: bool = False
    written: bool = False


@dataclass(slots=True)
class Sighting:
    """A buffer that a span was handed or gave out, and the region it lay in (None when that is not known)."""

    role: int
    region: int | None
    address: int
    nbytes: int
    extent: int
    contiguous: bool


@dataclass(slots=True)
class Move:
    """A transfer whose ends were looked up. ``span`` was innermost on its thread, 0 when that thread has no spans."""

    sequence: int
    kind: int
    source: int | None
    destination: int | None
    nbytes: int
    caller: int
    span: int
    thread: int
    count: int
    destination_address: int = 0


@dataclass(slots=True)
class Located:
    """All look-ups of a trace."""

    regions: list[Region]
    region_of_row: NDArray[np.int64]
    sightings: dict[int, list[Sighting]]
    moves: list[Move]


class _Tier:
    """Blocks of up to ``largest`` bytes that are alive now, by address."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.starts: list[int] = []
        self.at: dict[int, list[tuple[int, int]]] = {}  # start -> (end, region), newest last

    def add(self, start: int, end: int, region: int) -> None:
        here = self.at.get(start)
        if here is None:
            insort(self.starts, start)
            self.at[start] = [(end, region)]
        else:
            here.append((end, region))

    def remove(self, start: int, end: int, region: int) -> None:
        here = self.at.get(start, [])
        if (end, region) in here:
            here.remove((end, region))
            if not here:
                del self.at[start]
                del self.starts[bisect_right(self.starts, start) - 1]

    def find(self, address: int, end: int) -> list[int]:
        index = bisect_right(self.starts, address) - 1
        least = end - self.largest
        while index >= 0 and (start := self.starts[index]) >= least:
            found = [region for block_end, region in reversed(self.at[start]) if end <= block_end]
            if found:
                return found
            index -= 1
        return []


class _Blocks:
    """Blocks alive now, small and large ones apart, so that few neighbours have to be looked at."""

    def __init__(self) -> None:
        self.small = _Tier(_SMALL)
        self.large = _Tier(1 << 62)

    def _tier(self, start: int, end: int) -> _Tier:
        return self.small if end - start <= _SMALL else self.large

    def add(self, start: int, end: int, region: int) -> None:
        self._tier(start, end).add(start, end, region)

    def remove(self, start: int, end: int, region: int) -> None:
        self._tier(start, end).remove(start, end, region)

    def find(self, address: int, nbytes: int) -> list[int]:
        """Regions that cover the range, the likeliest first: nearest start, then newest."""
        end = address + nbytes
        return self.small.find(address, end) or self.large.find(address, end)


def locate(trace: Trace) -> Located:
    """Look up both ends of every transfer and every buffer that a probe saw."""
    blocks, marks = trace.allocations, trace.marks
    rows = trace.transfers.rows
    sequences = marks["sequence"]

    interesting = np.flatnonzero(blocks.size >= _threshold(trace))
    regions, region_of_row = _make_regions(trace, interesting)

    after = np.searchsorted(sequences, blocks.leave[interesting], side="right")
    outlived = blocks.died[interesting] >= blocks.records
    next_mark = np.full(len(interesting), np.iinfo(np.uint64).max, np.uint64)
    has_next = (after < len(sequences)) & ~outlived
    next_mark[has_next] = sequences[after[has_next]]

    seen = trace.seen
    order_of_span = np.searchsorted(trace.spans["id"], seen["span"]) if len(trace.spans) else np.zeros(0, np.int64)
    when = (
        np.where(seen["role"] == OUTPUT, trace.spans["exit"][order_of_span], trace.spans["enter"][order_of_span])
        if len(seen)
        else np.zeros(0, np.uint64)
    )

    sequence = np.concatenate([next_mark, when, blocks.enter[interesting], rows["sequence"]])
    phase = np.repeat(
        np.array([_DIES, _SEEN, _BORN, _MOVES], np.uint8), [len(interesting), len(seen), len(interesting), len(rows)]
    )
    index = np.concatenate([interesting, np.arange(len(seen)), interesting, np.arange(len(rows))])
    order = np.lexsort((np.arange(len(phase)), phase, sequence))
    order = order[sequence[order] < np.iinfo(np.uint64).max]

    spans = spans_of(rows["sequence"], rows["thread"], marks).tolist()
    address, size = blocks.address.tolist(), blocks.size.tolist()
    member = region_of_row.tolist()
    seen_rows, move_rows = seen.tolist(), rows.tolist()
    live, outside = _Blocks(), _Blocks()
    sightings: dict[int, list[Sighting]] = {}
    moves: list[Move] = []

    def find(where: int, nbytes: int, *, reading: bool) -> int | None:
        found = live.find(where, nbytes) or outside.find(where, nbytes)
        if not found:
            return None
        if reading and len(found) > 1:
            return next((region for region in found if regions[region].written), found[0])
        return found[0]

    for kind, at in zip(phase[order].tolist(), index[order].tolist(), strict=True):
        if kind == _BORN:
            live.add(address[at], address[at] + size[at], member[at])
        elif kind == _DIES:
            live.remove(address[at], address[at] + size[at], member[at])
        elif kind == _SEEN:
            span, role, contiguous, where, extent, nbytes = seen_rows[at]
            if extent < SMALLEST:
                region = None
            else:
                region = find(where, extent, reading=True)
                if region is None:
                    region = len(regions)
                    regions.append(Region(region, where, extent, span=0, written=True))
                    outside.add(where, where + extent, region)
                elif role != OUTPUT or nbytes:
                    regions[region].written = True
            sightings.setdefault(span, []).append(Sighting(role, region, where, nbytes, extent, bool(contiguous)))
        else:
            number, thread, what, source, destination, nbytes, caller, count = move_rows[at]
            into = find(destination, nbytes, reading=False) if what != 2 and count == 1 else None
            out = find(source, nbytes, reading=True) if what != 1 and count == 1 else None
            if into is not None:
                regions[into].written = True
            moves.append(Move(number, what, out, into, nbytes, caller, spans[at], thread, count, destination))
    return Located(regions, region_of_row, sightings, moves)


def _threshold(trace: Trace) -> int:
    """Bytes from which a block can be an end of a transfer or of a buffer that was seen, or become one by realloc.

    Where transfers are inferred, any block may be a piece of the payload.
    """
    if not trace.transfers.recorded:
        return SMALLEST
    extents = trace.seen["extent"][(trace.seen["extent"] >= SMALLEST) & ~_of_metadata(trace)]
    smallest = [int(column.min()) for column in (trace.transfers.rows["nbytes"], extents) if len(column)]
    return max(SMALLEST, min(smallest, default=SMALLEST) // 2)


def _of_metadata(trace: Trace) -> NDArray[np.bool_]:
    """Which buffers were seen in requests for metadata, which are on no path."""
    about = np.array([is_metadata(attributes) for attributes in trace.attributes] or [False], bool)
    spans = trace.spans["id"][about[trace.spans["attributes"]]]
    return np.isin(trace.seen["span"], spans)


def _make_regions(trace: Trace, interesting: NDArray[np.int64]) -> tuple[list[Region], NDArray[np.int64]]:
    blocks = trace.allocations
    regions: list[Region] = []
    region_of_row = np.full(len(blocks.address), -1, np.int64)
    native = [all(frame.native for frame in stack) for stack in blocks.stacks]
    columns = zip(
        interesting.tolist(),
        blocks.address[interesting].tolist(),
        blocks.size[interesting].tolist(),
        blocks.previous[interesting].tolist(),
        blocks.moved[interesting].tolist(),
        blocks.span[interesting].tolist(),
        blocks.stack[interesting].tolist(),
        blocks.enter[interesting].tolist(),
        strict=True,
    )
    for row, address, size, previous, moved, span, stack, enter in columns:
        known = region_of_row[previous] if previous >= 0 and not moved else -1
        if known >= 0:
            region = regions[known]
            region.rows.append(row)
            region.nbytes = max(region.nbytes, size)
            region_of_row[row] = known
        else:
            region_of_row[row] = len(regions)
            regions.append(Region(len(regions), address, size, [row], span, stack, enter, native[stack] and not span))
    return regions, region_of_row
