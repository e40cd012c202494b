"""Which block of memory an address lay in at a moment of the session.

Addresses are reused within microseconds, so every look-up is made at its place in the sequence: the newest block alive
then that covers the range.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copytrace.allocations import spans_of
from copytrace.captures import SMALLEST
from copytrace.carried import outlives
from copytrace.model import OUTPUT, TRANSFER_KINDS, Trace
from copytrace.regions import Regions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from copytrace.carried import Carried
    from copytrace.regions import Region

_FETCH, _FLUSH = TRANSFER_KINDS.index("fetch"), TRANSFER_KINDS.index("flush")
_SMALL = 64 << 10
_NEVER = np.iinfo(np.int64).max >> 1
_MOST_AT_ONE_START = 64
"""Blocks that a range is looked up in where many lay at one place: native threads make no marks, so that all which they
allocated there count as alive until the next mark.
"""


@dataclass(slots=True)
class Sighting:
    """A buffer that a span was handed or gave out, and the region it lay in (None when that is not known)."""

    role: int
    region: int | None
    address: int
    nbytes: int
    extent: int
    contiguous: bool


class Moves(NamedTuple):
    """The transfers, whose ends were looked up: regions, -1 for none. ``span`` was innermost on the thread of each, 0
    when that thread has no spans. Columns have shape (n,).
    """

    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    span: NDArray[np.uint64]


@dataclass(slots=True)
class Located:
    """All look-ups of a trace. ``earlier`` are the regions that were in an earlier stretch, by their keys."""

    regions: Regions
    earlier: dict[int, Region]
    sightings: Sightings
    moves: Moves


class Sightings:
    """What probes saw, in columns of shape (n,) in the order in which they saw it; ``region`` is -1 where that is not
    known.
    """

    def __init__(self, seen: NDArray[Any], region: NDArray[np.int64]) -> None:
        self.span, self.role, self.region = seen["span"], seen["role"], region
        order = np.argsort(self.span, kind="stable")
        spans, first, counts = np.unique(self.span[order], return_index=True, return_counts=True)
        ends = zip(first.tolist(), (first + counts).tolist(), strict=True)
        self._places = dict(zip(spans.tolist(), ends, strict=True))
        self._seen, self._region = seen[order].tolist(), region[order].tolist()

    def of(self, span: int) -> list[Sighting]:
        """Those of a span."""
        begin, end = self._places.get(span, (0, 0))
        return [
            Sighting(role, found if found >= 0 else None, address, nbytes, extent, bool(contiguous))
            for (_, role, contiguous, address, extent, nbytes), found in zip(
                self._seen[begin:end], self._region[begin:end], strict=True
            )
        ]


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

    def __init__(self, regions: Regions, known: list[tuple[int, int]]) -> None:
        self.regions = regions
        self.known = known
        self.small, self.large = _Outside(_SMALL), _Outside(1 << 62)
        for number, (address, nbytes) in enumerate(known, 1):
            self._place(address, nbytes, -number)

    def find(self, address: int, end: int) -> int | None:
        known = self.small.find(address, end) if self.small.starts else None
        return self.large.find(address, end) if known is None else known

    def add(self, address: int, nbytes: int) -> int:
        self.known.append((address, nbytes))
        return self._place(address, nbytes, -len(self.known))

    def _place(self, address: int, nbytes: int, key: int) -> int:
        number = self.regions.add_outside(address, nbytes, key)
        (self.small if nbytes <= _SMALL else self.large).add(address, address + nbytes, number)
        return number


def locate(trace: Trace, carried: Carried) -> Located:
    """Look up both ends of every transfer and every buffer that a probe saw in a stretch, after those before it."""
    blocks = trace.allocations
    regions = Regions(trace, carried)
    outside = _Outsides(regions, carried.outside)
    earlier = np.flatnonzero(regions.key < carried.since)
    asked = _questions(trace)
    start = blocks.address.astype(np.int64)
    live = _Blocks(
        start,
        start + blocks.size.astype(np.int64),
        _after(blocks.enter),
        _before(_next_marks(trace)),
    )
    found, several = live.find(asked["address"], asked["nbytes"], asked["when"])
    region = np.where(found >= 0, regions.of_row[found], -1) if len(start) else found
    regions.make(np.unique(np.concatenate([region[region >= 0], earlier])))
    known = {region.key: region for region in regions.values() if region.key < carried.since}
    _settle(asked, region, {at: [int(regions.of_row[row]) for row in rows] for at, rows in several.items()}, outside)
    carried.note_regions(blocks, regions)
    return Located(regions, known, _sightings(trace, asked, region), _moves(trace, asked, region))


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


def _sightings(trace: Trace, asked: NDArray[Any], region: NDArray[np.int64]) -> Sightings:
    of_row = np.full(len(trace.seen), -1, np.int64)
    about = asked["what"] == _SEEN
    of_row[asked["row"][about]] = region[about]
    return Sightings(trace.seen, of_row)


def _moves(trace: Trace, asked: NDArray[Any], region: NDArray[np.int64]) -> Moves:
    rows = trace.transfers.rows
    ends = np.full((2, len(rows)), -1, np.int64)
    for side, what in enumerate((_SOURCE, _DESTINATION)):
        about = asked["what"] == what
        ends[side, asked["row"][about]] = region[about]
    return Moves(ends[0], ends[1], spans_of(rows["sequence"], rows["thread"], trace.marks))
