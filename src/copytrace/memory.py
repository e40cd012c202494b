"""What operations hold over time: rows of the allocations by operation, the high-water mark of a path, its timeline."""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copytrace.carried import outlives
from copytrace.model import Timeline
from copytrace.naming import by_import
from copytrace.stacks import OWN_STACK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from copytrace.carried import Carried
    from copytrace.flow import Flow
    from copytrace.lookup import Located
    from copytrace.model import Allocations, Frame, Trace
    from copytrace.operations import Operation, Operations
    from copytrace.regions import Region

_MOMENTS = 200
"""Most moments of a timeline."""

_POOL = re.compile(r"unix_mmap|_?mi_(os|prim|arena|reserve)|(je_|os_)?pages_map|extent_alloc_mmap")
"""Functions of mimalloc and jemalloc that take memory by ``mmap``, to hand it out themselves."""


class HighWater(NamedTuple):
    """When a path held most: ``total`` bytes, in the rows ``alive``. ``set_up`` are rows then alive that its store or
    its client had set up outside all operations (its model of the service), ``open`` the operations that were open.
    """

    total: int
    alive: list[int]
    set_up: list[int]
    open: set[int]


class Memory:
    """The allocations of a stretch of a trace, by operation. ``operation_of_row`` is 0 for what belongs to none, and
    for our own; ``owners`` is the same as a list.

    Nobody holds what an import allocates, nor a pool: ``pools`` are the rows of memory that an allocator took to hand
    it out itself, of which is not known how much is in use.
    """

    def __init__(self, trace: Trace, operations: Operations, located: Located, moved: Flow, carried: Carried) -> None:
        self.blocks = trace.allocations
        self.located = located
        self.operation_of_row = _operations_of_rows(trace, operations, located, moved)
        earlier = carried.earlier(self.blocks)
        born = self.blocks.born[earlier].tolist()
        for row, place in zip(earlier.tolist(), born, strict=True):
            self.operation_of_row[row] = carried.owners.get(place, 0)
        self.owners: list[int] = self.operation_of_row.tolist()
        self.regions_of: list[int] = located.regions.of_row.tolist()
        self.is_lasting = outlives(self.blocks)
        stacks = self.blocks.stacks or ((),)
        importing = np.array([by_import(stack) for stack in stacks])
        self.imported: set[int] = set(np.flatnonzero(importing[located.regions.stack]).tolist())
        """The regions that imports allocated."""
        pooled = np.array([_is_pool(stack) for stack in stacks])[self.blocks.stack]
        self._held = ~(pooled | importing[self.blocks.stack])
        self.pools: list[int] = np.flatnonzero(pooled & (self.blocks.born >= carried.since)).tolist()
        self._set_up = _set_up(self.blocks, operations, np.flatnonzero(self._held & (self.operation_of_row == 0)))
        for row, place in zip(earlier.tolist(), born, strict=True):
            if place in carried.set_up:
                self._set_up.setdefault(carried.set_up[place], []).append(row)
        self._sites: dict[int, set[str]] = {}
        spans = operations.spans
        for operation, site, _ in spans.sites_of_operations:
            self._sites.setdefault(operation, set()).add(spans.sites[site].name)
        sequence = np.concatenate([trace.spans["enter"], trace.spans["exit"]]).astype(np.float64)
        order = np.argsort(sequence)
        moment = np.concatenate([trace.spans["started"], trace.spans["ended"]]).astype(np.float64)[order]
        before = np.array(carried.clock, np.float64).reshape(-1, 2)
        self._sequence = np.concatenate([before[:, 0], sequence[order]])
        self._moment = np.concatenate([before[:, 1], moment])
        self._began = float(self._moment[min(len(before), len(self._moment) - 1)]) if len(self._moment) else 0.0
        self._hand_on(carried)

    def _hand_on(self, carried: Carried) -> None:
        """Tell the next stretch what lives on."""
        lasting = np.flatnonzero(self.is_lasting & (self.operation_of_row != 0))
        carried.owners = dict(
            zip(self.blocks.born[lasting].tolist(), self.operation_of_row[lasting].tolist(), strict=True)
        )
        carried.set_up = {
            int(self.blocks.born[row]): name
            for name, rows in self._set_up.items()
            for row in rows
            if self.is_lasting[row]
        }
        if len(self._sequence) > len(carried.clock):
            first, last = len(carried.clock), len(self._sequence) - 1
            carried.clock += [(int(self._sequence[at]), int(self._moment[at])) for at in (first, last)]

    def rows_of(self, operations: Iterable[int]) -> NDArray[np.int64]:
        """The rows that operations hold, which are given by their spans."""
        return np.flatnonzero(np.isin(self.operation_of_row, list(operations)) & self._held)

    def high_water(self, rows: NDArray[np.int64], group: Sequence[Operation], names: Collection[str]) -> HighWater:
        """When most of ``rows``, of which there are some, was held at once. ``group`` are operations of the path and
        ``names`` those of its store and of the sites that were called in it.
        """
        blocks = self.blocks
        position, change = self._changes(rows)
        order = np.lexsort((change, position))
        held = np.cumsum(change[order])
        highest = int(np.argmax(held))
        at = order[highest]
        moment = int(position[at])
        sequence = int(blocks.enter[rows[at % len(rows)]])
        alive = rows[(blocks.born[rows] <= moment) & (blocks.died[rows] > moment)].tolist()
        set_up = [row for name, some in self._set_up.items() if name in names for row in some]
        kept = [row for row in set_up if blocks.born[row] <= moment < blocks.died[row]]
        opened = {op.root.id for op in group if op.root.enter <= sequence < op.root.exit}
        return HighWater(int(held[highest]), alive, kept, opened)

    def sites_of(self, group: Sequence[Operation]) -> set[str]:
        """The names of the sites that were called in operations."""
        return set[str]().union(*(self._sites[op.root.id] for op in group))

    def allocated_in(self, operation: int, numbers: set[int]) -> set[int]:
        """Those of some regions that an operation allocated or reallocated."""
        regions = self.located.regions
        blocks = np.array([number for number in numbers if regions.is_block(number)], np.int64)
        inside = self.operation_of_row[regions.first[blocks]] == operation
        later = regions.later.keys() & numbers
        again = (number for number in later if any(self.owners[row] == operation for row in regions.later[number]))
        return {*blocks[inside].tolist(), *again}

    def lives(self, numbers: set[int]) -> tuple[float, dict[int, float]] | None:
        """For how many nanoseconds at most regions were kept that ended in the stretch, and of those that outlive it,
        by key, since when they are; None when one of them is not known.
        """
        regions = self.located.regions
        chosen = np.array(sorted(numbers), np.int64)
        if not len(self._sequence) or not all(map(regions.is_block, numbers)):
            return None
        last = regions.first[chosen]
        for at in np.flatnonzero(np.isin(chosen, list(regions.later))).tolist():
            last[at] = regions.last(int(chosen[at]))
        begun, ended = self._time(regions.enter[chosen]), self._time(self.blocks.leave[last])
        living = self.is_lasting[last]
        longest = float(np.max(ended - begun, where=~living, initial=0.0))
        return longest, dict(zip(regions.key[chosen[living]].tolist(), begun[living].tolist(), strict=True))

    def ends(self, keys: Iterable[int]) -> dict[int, float]:
        """Nanoseconds at which those of the regions of earlier stretches ended that do not outlive this one."""
        found = {key: self.located.earlier.get(key) for key in keys}
        gone = {key: self._began for key, region in found.items() if region is None}
        here = {key: region for key, region in found.items() if region is not None}
        ended = zip(here, self._ended(list(here.values())), strict=True)
        return gone | {key: end for key, end in ended if end is not None}

    def _ended(self, regions: Sequence[Region]) -> list[float | None]:
        last = np.array([region.rows[-1] for region in regions], np.int64)
        moments = self._time(self.blocks.leave[last]).tolist()
        living = self.is_lasting[last].tolist()
        return [None if lives_on else moment for moment, lives_on in zip(moments, living, strict=True)]

    def timeline(self, op: Operation, roles: Mapping[int, str], layer_of: Callable[[int, int], str]) -> Timeline | None:
        """Live bytes of an operation by layer; ``roles`` are those of its regions, ``layer_of`` names the layer of a
        region in an operation, and the layer of those of one stack is one.
        """
        if not self.blocks.recorded or not len(self._sequence):
            return None
        rows = self.rows_of([op.root.id])
        region = self.located.regions.of_row[rows]
        held = [roles.get(number, "temporary") in ("extra", "temporary") for number in region.tolist()]
        rows, region = rows[np.array(held, bool)], region[np.array(held, bool)]
        if not len(rows):
            return Timeline((0.0,), (), (), op.payload)
        position, change = self._changes(rows)
        when = self._time(np.concatenate([self.blocks.enter[rows], self.blocks.leave[rows]]))
        stack = self.located.regions.stack[region]
        _, first, inverse = np.unique(stack, return_index=True, return_inverse=True)
        named = [layer_of(number, op.root.id) for number in region[first].tolist()]
        layers = sorted(set(named))
        of_layer = np.array([layers.index(layer) for layer in named])[inverse]
        order = np.lexsort((change, position))
        steps = np.zeros((len(layers), len(order)), np.int64)
        steps[np.concatenate([of_layer, of_layer])[order], np.arange(len(order))] = change[order]
        live = np.cumsum(steps, axis=1)
        kept = _peaks(live.sum(axis=0), _MOMENTS)
        begun = self._time(np.array([op.root.enter]))[0]
        ended = self._time(np.array([op.root.exit]))[0]
        milliseconds = (_spread(np.maximum.accumulate(when[order]), ended)[kept] - begun) / 1e6
        return Timeline(
            tuple(round(float(moment), 3) for moment in milliseconds),
            tuple(layers),
            tuple(tuple(row) for row in live[:, kept].tolist()),
            op.payload,
        )

    def _changes(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        size = self.blocks.size[rows].astype(np.int64)
        return np.concatenate([self.blocks.born[rows], self.blocks.died[rows]]), np.concatenate([size, -size])

    def _time(self, sequence: NDArray[Any]) -> NDArray[np.float64]:
        """Nanoseconds at which sequences were taken, between the spans around them."""
        moments: NDArray[np.float64] = np.interp(sequence.astype(np.float64), self._sequence, self._moment)
        return moments


def _operations_of_rows(trace: Trace, operations: Operations, located: Located, moved: Flow) -> NDArray[np.int64]:
    blocks, regions = trace.allocations, located.regions
    result = operations.spans.operations_of(blocks.span)
    told = np.array(moved.operation_of[: len(regions.first)], np.int64)
    for region in regions.at(np.flatnonzero((told > 0) & (regions.span == 0))):
        operation = moved.operation_of[region.id]
        left = operations.spans[operation].exit
        inside = (row for row in region.rows if row == region.rows[0] or blocks.enter[row] < left)
        result[[row for row in inside if not result[row]]] = operation
    own = np.array([stack == OWN_STACK for stack in blocks.stacks] or [False], bool)
    result[own[blocks.stack]] = 0
    return result


def _set_up(blocks: Allocations, operations: Operations, free: NDArray[np.int64]) -> dict[str, list[int]]:
    """Those of the rows ``free`` of any operation that were allocated when a store was asked for metadata, by the
    store, or in a call that names who called, by its site.
    """
    asked: dict[int, str] = {}
    stores: dict[int, str] = {}
    for span in operations.spans.at(np.flatnonzero(operations.spans.operation == 0)):
        store = str(span.attributes.get("store", "")) if span.site.kind == "request" else ""
        stores[span.id] = stores.get(span.parent) or store
        name = span.site.name if span.site.kind == "context" else asked.get(span.parent, "")
        asked[span.id] = stores[span.id] or name
    by_name: dict[str, list[int]] = {}
    free = free[np.isin(blocks.span[free], list(asked))]
    for row, span_id in zip(free.tolist(), blocks.span[free].tolist(), strict=True):
        by_name.setdefault(asked[span_id], []).append(row)
    return by_name


def _is_pool(stack: Sequence[Frame]) -> bool:
    inmost = takewhile(lambda frame: frame.native and not frame.layer, stack)
    return any(_POOL.match(frame.function) for frame in inmost)


def _spread(moments: NDArray[np.float64], end: float) -> NDArray[np.float64]:
    """Rising ``moments`` with equal ones spread evenly up to the next or the ``end``: native threads make no marks, so
    that of their allocations only the order is known.
    """
    distinct, first, counts = np.unique(moments, return_index=True, return_counts=True)
    room = np.append(distinct[1:], max(end, distinct[-1])) - distinct
    share = (np.arange(len(moments)) - np.repeat(first, counts)) / np.repeat(counts, counts)
    spread: NDArray[np.float64] = moments + np.repeat(room, counts) * share
    return spread


def _peaks(total: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Indices of at most ``most`` moments, in order: in each stretch the one at which most was held, and the last."""
    if len(total) <= most:
        return np.arange(len(total))
    edges = np.linspace(0, len(total) - 1, most, dtype=np.int64)
    highest = [int(a + np.argmax(total[a:b])) for a, b in pairwise(edges.tolist()) if b > a]
    return np.unique([*highest, len(total) - 1])
