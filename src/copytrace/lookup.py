"""Which block of memory an address lay in at a moment of the session.

A *region* is a block during one life: an allocation (with those that realloc turned it into without moving it), or
memory from before the session that a probe was handed. Addresses are reused within microseconds, so every look-up is
made at its place in the sequence: the newest block alive then that covers the range.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.allocations import spans_of
from copytrace.captures import SMALLEST
from copytrace.carried import outlives
from copytrace.collecting import in_turn
from copytrace.model import OUTPUT, TRANSFER_KINDS, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from copytrace.carried import Carried

_FETCH, _FLUSH = TRANSFER_KINDS.index("fetch"), TRANSFER_KINDS.index("flush")
_SMALL = 64 << 10
_NEVER = np.iinfo(np.int64).max >> 1
_MOST_AT_ONE_START = 64
"""Blocks that a range is looked up in where many lay at one place: native threads make no marks, so that all which they
allocated there count as alive until the next mark.
"""


@dataclass(slots=True)
class Region:
    """``rows`` are rows of the allocations, empty for memory from before the session. ``nbytes`` is the size of the
    largest. ``native`` says that a thread without any Python frame allocated it. ``key`` is the same in each stretch of
    a trace: where in memray's stream the region was born, or a negative number for memory from before the session.
    """

    id: int
    address: int
    nbytes: int
    rows: list[int] = field(default_factory=list)
    span: int = 0
    stack: int = 0
    enter: int = 0
    native: bool = False
    key: int = 0


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
    """All look-ups of a trace. ``earlier`` are the regions that were in an earlier stretch, by their keys."""

    regions: list[Region]
    region_of_row: NDArray[np.int64]
    earlier: dict[int, Region]
    sightings: dict[int, list[Sighting]]
    moves: list[Move]


class _Blocks:
    """Blocks of memory and when each may be an end of a move; the arguments have shape (n,).

    At one start a block ends before the next begins, so that those in use at a moment are the newest of that start.
    """

    def __init__(
        self, start: NDArray[np.int64], end: NDArray[np.int64], since: NDArray[np.int64], until: NDArray[np.int64]
    ) -> None:
        self.order = np.lexsort((since, start))
        self.end, self.until = end[self.order], until[self.order]
        self.starts, self.first, group = np.unique(start[self.order], return_index=True, return_inverse=True)
        self.moments, rank = np.unique(since[self.order], return_inverse=True)
        self.key = group * (len(self.moments) + 1) + rank + 1
        self.reach = np.maximum.accumulate(np.maximum.reduceat(self.end, self.first)) if len(group) else self.end
        """How far the blocks at each start and below it go at most."""

    def find(
        self, address: NDArray[np.int64], nbytes: NDArray[np.int64], when: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], dict[int, list[int]]]:
        """The block that covers each range at that moment, -1 for none: of the nearest start, the newest. And of the
        ranges for which several of one start do, the newest of these, the newest first.
        """
        end = address + nbytes
        found = np.full(len(address), -1, np.int64)
        several: dict[int, list[int]] = {}
        group = np.searchsorted(self.starts, address, side="right") - 1
        rank = np.searchsorted(self.moments, when, side="right")
        left = np.flatnonzero(group >= 0)
        while len(left := left[self.reach[group[left]] >= end[left]]):
            at = np.searchsorted(self.key, group[left] * (len(self.moments) + 1) + rank[left], side="right") - 1
            asked, first = left, self.first[group[left]]
            for looked_at in count(1):
                here = (at >= first) & (self.until[at] > when[asked])
                asked, at, first = asked[here], at[here], first[here]
                covers = self.end[at] >= end[asked]
                again = covers & (found[asked] >= 0)
                for number, block in zip(asked[again].tolist(), at[again].tolist(), strict=True):
                    several.setdefault(number, [int(self.order[found[number]])]).append(int(self.order[block]))
                fresh = covers & ~again
                found[asked[fresh]] = at[fresh]
                more = (found[asked] < 0) | (looked_at < _MOST_AT_ONE_START)
                asked, at, first = asked[more], at[more] - 1, first[more]
                if not len(asked):
                    break
            left = left[found[left] < 0]
            group[left] -= 1
            left = left[group[left] >= 0]
        hit = found >= 0
        found[hit] = self.order[found[hit]]
        return found, several


class _Outside:
    """Memory from before the session of up to ``largest`` bytes, by address."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.starts: list[int] = []
        self.at: dict[int, list[tuple[int, int]]] = {}  # start -> (end, region), newest last

    def add(self, start: int, end: int, region: int) -> None:
        if start not in self.at:
            insort(self.starts, start)
        self.at.setdefault(start, []).append((end, region))

    def find(self, address: int, end: int) -> int | None:
        index = bisect_right(self.starts, address) - 1
        while index >= 0 and (start := self.starts[index]) >= end - self.largest:
            for block_end, region in reversed(self.at[start]):
                if end <= block_end:
                    return region
            index -= 1
        return None


class _Outsides:
    """All memory from before the session, which becomes a region when a probe is handed it: of a stretch that which
    earlier ones have ``known`` first.
    """

    def __init__(self, regions: list[Region], known: list[tuple[int, int]]) -> None:
        self.regions = regions
        self.known = known
        self.small, self.large = _Outside(_SMALL), _Outside(1 << 62)
        for number, (address, nbytes) in enumerate(known, 1):
            self._place(address, nbytes, -number)

    def find(self, address: int, end: int) -> int | None:
        known = self.small.find(address, end)
        return self.large.find(address, end) if known is None else known

    def add(self, address: int, nbytes: int) -> int:
        self.known.append((address, nbytes))
        return self._place(address, nbytes, -len(self.known))

    def _place(self, address: int, nbytes: int, key: int) -> int:
        number = len(self.regions)
        self.regions.append(Region(number, address, nbytes, key=key))
        (self.small if nbytes <= _SMALL else self.large).add(address, address + nbytes, number)
        return number


def locate(trace: Trace, carried: Carried) -> Located:
    """Look up both ends of every transfer and every buffer that a probe saw in a stretch, after those before it."""
    blocks = trace.allocations
    regions, region_of_row = _make_regions(trace, carried)
    outside = _Outsides(regions, carried.outside)
    earlier = {region.key: region for region in regions if region.key < carried.since}
    asked = _questions(trace)
    start = blocks.address.astype(np.int64)
    live = _Blocks(
        start,
        start + blocks.size.astype(np.int64),
        _after(blocks.enter),
        _before(_next_marks(trace)),
    )
    found, several = live.find(asked["address"], asked["nbytes"], asked["when"])
    region = np.where(found >= 0, region_of_row[found], -1) if len(start) else found
    _settle(asked, region, {at: [int(region_of_row[row]) for row in rows] for at, rows in several.items()}, outside)
    carried.note_regions(blocks, regions)
    return Located(regions, region_of_row, earlier, _sightings(trace, asked, region), _moves(trace, asked, region))


_QUESTION_DTYPE = np.dtype(
    [("when", "<i8"), ("address", "<i8"), ("nbytes", "<i8"), ("what", "u1"), ("row", "<i8"), ("writes", "?")]
)
"""``row`` of what was seen or of the transfers. ``writes``: there is something in the range from then on."""
_SEEN, _SOURCE, _DESTINATION = range(3)


def _after(sequence: NDArray[Any]) -> NDArray[np.int64]:
    """Moments between a mark and the next, on a scale on which the marks are even: what happens after it."""
    return 2 * sequence.astype(np.int64) + 1


def _before(sequence: NDArray[Any]) -> NDArray[np.int64]:
    """The moments of marks on the same scale."""
    return 2 * sequence.astype(np.int64)


def _questions(trace: Trace) -> NDArray[Any]:
    """The ranges to look up, in the order in which they have to be answered."""
    seen, rows = trace.seen, trace.transfers.rows
    exact = rows["count"] == 1
    asked = []
    if len(seen):
        order = np.searchsorted(trace.spans["id"], seen["span"])
        sequence = np.where(seen["role"] == OUTPUT, trace.spans["exit"][order], trace.spans["enter"][order])
        large = np.flatnonzero(seen["extent"] >= SMALLEST)
        writes = (seen["role"] != OUTPUT) | (seen["nbytes"] > 0)
        asked.append(_question(_SEEN, large, _before(sequence), seen["address"], seen["extent"], writes))
    none = np.zeros(len(rows), bool)
    moment = _after(rows["sequence"])
    ends = ((_SOURCE, "source", _FETCH, none), (_DESTINATION, "destination", _FLUSH, ~none))
    for what, name, not_memory, writes in ends:
        chosen = np.flatnonzero(exact & (rows["kind"] != not_memory))
        asked.append(_question(what, chosen, moment, rows[name], rows["nbytes"], writes))
    result = np.concatenate(asked)
    return result[np.lexsort((result["what"], result["when"]))]


def _question(
    what: int,
    rows: NDArray[np.int64],
    when: NDArray[np.int64],
    address: NDArray[Any],
    nbytes: NDArray[Any],
    writes: NDArray[np.bool_],
) -> NDArray[Any]:
    result = np.zeros(len(rows), _QUESTION_DTYPE)
    result["what"], result["row"], result["when"] = what, rows, when[rows]
    result["address"], result["nbytes"], result["writes"] = address[rows], nbytes[rows], writes[rows]
    return result


def _next_marks(trace: Trace) -> NDArray[np.uint64]:
    """The sequence of the first mark after each allocation ended, until which it may be an end of a move: between two
    marks the order of a free and a transfer is not known.
    """
    blocks, sequences = trace.allocations, trace.marks["sequence"]
    after = np.searchsorted(sequences, blocks.leave, side="right")
    result = np.full(len(after), _NEVER, np.uint64)
    known = (after < len(sequences)) & ~outlives(blocks)
    result[known] = sequences[after[known]]
    return result


def _settle(asked: NDArray[Any], region: NDArray[np.int64], several: dict[int, list[int]], outside: _Outsides) -> None:
    """Answer in ``region`` what the allocations leave open: memory from before the session, which becomes a region when
    a probe was handed it, and of several blocks at one place the newest that something was written to by then, or else
    that nothing was seen to be written to.
    """
    clear = (region >= 0) & asked["writes"]
    clear[list(several)] &= asked["what"][list(several)] == _DESTINATION
    written, first = np.unique(region[clear], return_index=True)
    since = dict(zip(written.tolist(), np.flatnonzero(clear)[first].tolist(), strict=True))
    open_ones = np.union1d(np.flatnonzero(region < 0), np.array(list(several), np.int64))
    questions = asked[["address", "nbytes", "what", "writes"]][open_ones].tolist()
    for at, (address, nbytes, what, writes) in zip(open_ones.tolist(), questions, strict=True):
        if at in several:
            if what == _DESTINATION:
                continue
            choice = several[at]
            region[at] = min(choice, key=lambda number: 1 if number not in since else 0 if since[number] < at else 2)
            if writes:
                since[int(region[at])] = min(since.get(int(region[at]), at), at)
            continue
        known = outside.find(address, address + nbytes)
        if known is None and what == _SEEN:
            known = outside.add(address, nbytes)
        if known is not None:
            region[at] = known


def _sightings(trace: Trace, asked: NDArray[Any], region: NDArray[np.int64]) -> dict[int, list[Sighting]]:
    seen = trace.seen
    of_row = np.full(len(seen), -1, np.int64)
    about = asked["what"] == _SEEN
    of_row[asked["row"][about]] = region[about]
    result: dict[int, list[Sighting]] = {}
    for (span, role, contiguous, address, extent, nbytes), found in zip(in_turn(seen), in_turn(of_row), strict=True):
        sighting = Sighting(role, found if found >= 0 else None, address, nbytes, extent, bool(contiguous))
        result.setdefault(span, []).append(sighting)
    return result


def _moves(trace: Trace, asked: NDArray[Any], region: NDArray[np.int64]) -> list[Move]:
    rows = trace.transfers.rows
    ends = np.full((2, len(rows)), -1, np.int64)
    for side, what in enumerate((_SOURCE, _DESTINATION)):
        about = asked["what"] == what
        ends[side, asked["row"][about]] = region[about]
    spans = spans_of(rows["sequence"], rows["thread"], trace.marks)
    return [
        Move(
            number,
            kind,
            source if source >= 0 else None,
            destination if destination >= 0 else None,
            nbytes,
            caller,
            span,
            thread,
            count,
            address,
        )
        for (number, thread, kind, _, address, nbytes, caller, count), span, source, destination in zip(
            in_turn(rows), in_turn(spans), *map(in_turn, ends), strict=True
        )
    ]


def _make_regions(trace: Trace, carried: Carried) -> tuple[list[Region], NDArray[np.int64]]:
    """The regions of all allocations, and which of them each is of."""
    blocks = trace.allocations
    native = np.array([all(frame.native for frame in stack) for stack in blocks.stacks] or [False])
    goes_on = (blocks.previous >= 0) & ~blocks.moved
    first = np.flatnonzero(~goes_on)
    names = ("address", "size", "span", "stack", "enter", "born")
    columns = (in_turn(getattr(blocks, name)[first]) for name in names)
    alone = in_turn(native[blocks.stack[first]] & (blocks.span[first] == 0))
    regions = [
        Region(number, address, size, [row], span, stack, enter, without_python, born)
        for number, (row, without_python, address, size, span, stack, enter, born) in enumerate(
            zip(in_turn(first), alone, *columns, strict=True)
        )
    ]
    region_of_row = np.full(len(blocks.address), -1, np.int64)
    region_of_row[first] = np.arange(len(first))
    for row in np.flatnonzero(goes_on).tolist():
        number = int(region_of_row[blocks.previous[row]])
        regions[number].rows.append(row)
        regions[number].nbytes = max(regions[number].nbytes, int(blocks.size[row]))
        region_of_row[row] = number
    begun = np.isin(blocks.born[first], np.array(list(carried.regions), np.uint64))
    for number in np.flatnonzero(begun).tolist():
        _continue(regions[number], carried, native)
    return regions, region_of_row


def _continue(region: Region, carried: Carried, native: NDArray[np.bool_]) -> None:
    """Give a region that began in an earlier stretch what it began with."""
    beginning = carried.regions[region.key]
    region.key, region.span, region.enter = beginning.key, beginning.span, beginning.enter
    region.nbytes = max(region.nbytes, beginning.nbytes)
    region.stack = carried.stacks[beginning.stack]
    region.native = bool(native[region.stack]) and not region.span
