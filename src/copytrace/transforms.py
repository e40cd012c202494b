"""Codecs that no probe sees: those inside native code, told by what went in and what came out.

A compressor writes its output with instructions of its own and calls ``memcpy`` for parts of it at most. On a path
whose codecs compress and on which no probe saw them do it, a block that bytes went out of and that nothing was seen to
fill came out of a codec, and a block that bytes went into and none came out of went into it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from copytrace.flow import Edge
from copytrace.model import DESTINATION, INPUT, OUTPUT
from copytrace.native import crate_of
from copytrace.operations import compresses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from copytrace.flow import Flow
    from copytrace.lookup import Located
    from copytrace.model import Frame
    from copytrace.operations import Operation, Operations
    from copytrace.tree import SpanView

_CODEC = re.compile(
    r"^(ZSTD|HUF|FSE|HIST|LZ4|LZ4HC|blosc|blosc2|Blosc|BLOSC|snappy|Brotli|BZ2|lzma|libdeflate|H5Z)_?"
    r"|^(inflate|deflate|compress_block|fill_window|_tr_|longest_match)"
)
_CODEC_CRATES = frozenset(
    {
        "zstd",
        "zstd_safe",
        "zstd_sys",
        "ruzstd",
        "lz4_flex",
        "snap",
        "flate2",
        "miniz_oxide",
        "libz_rs_sys",
        "zlib_rs",
        "brotli",
    }
)
_SMALLEST_SHARE = 0.01
"""Of an operation's payload: smaller blocks are workspace."""


def complete(operations: Operations, located: Located, flow: Flow, moved_by: Sequence[Frame]) -> None:
    """Put one edge for each block that a codec filled in the place of what the hook saw move inside of it.

    ``moved_by`` are the functions that the callers of edges count up to.
    """
    seen = {edge.operation for edge in flow.edges if edge.mover and edge.kind in ("encode", "decode")}
    unseen = [op for op in operations.by_root.values() if compresses(op.codecs) and op.root.id not in seen]
    _adopt(unseen, operations, located, flow)
    edges_of: dict[int, list[Edge]] = defaultdict(list)
    for edge in flow.edges:
        edges_of[edge.operation].append(edge)
    blocks = _Blocks(located, flow)
    replaced: set[int] = set()
    made: list[Edge] = []
    for operation in unseen:
        codec = _Codec(operations, located, flow, operation, moved_by)
        edges, inside = codec.settle(edges_of[operation.root.id], blocks.of(operation))
        made += edges
        replaced.update(map(id, inside))
    flow.edges = [edge for edge in flow.edges if id(edge) not in replaced] + made
    flow.edges.sort(key=attrgetter("sequence"))


def _adopt(unseen: Iterable[Operation], operations: Operations, located: Located, flow: Flow) -> None:
    """What native threads allocated while only one operation was open, which is ``unseen``, belongs to it, and what
    they moved of it.
    """
    chosen = {op.root.id for op in unseen}
    alone = [root for root in _open_alone(operations) if root.id in chosen]
    if not alone:
        return
    ids = np.array([root.id for root in alone], np.int64)
    enter, leave = (np.array([getattr(root, name) for root in alone], np.uint64) for name in ("enter", "exit"))

    def open_at(moments: NDArray[np.uint64]) -> list[int]:
        place = np.searchsorted(enter, moments, side="right") - 1
        return np.where((place >= 0) & (moments < leave[place]), ids[place], 0).tolist()  # type: ignore[no-any-return]

    native = np.flatnonzero(located.regions.native)
    for number, operation in zip(native.tolist(), open_at(located.regions.enter[native]), strict=True):
        flow.operation_of[number] = flow.operation_of[number] or operation
    free = [edge for edge in flow.edges if not edge.operation]
    moments = np.array([edge.sequence for edge in free], np.uint64)
    for edge, operation in zip(free, open_at(moments), strict=True):
        ends = (edge.destination, edge.source)
        if operation and any(region is not None and flow.operation_of[region] == operation for region in ends):
            edge.operation = operation


def _open_alone(operations: Operations) -> list[SpanView]:
    """The operations' outermost spans during which no other operation was open, in order."""
    roots = sorted((op.root for op in operations.by_root.values()), key=attrgetter("enter"))
    over = accumulate((root.exit for root in roots), max, initial=0)
    following = [*(root.enter for root in roots[1:]), inf]
    return [
        root
        for root, before, after in zip(roots, over, following, strict=False)
        if before <= root.enter and root.exit <= after
    ]


class _Blocks:
    """The regions that were allocated, by operation."""

    def __init__(self, located: Located, flow: Flow) -> None:
        operation = np.array(flow.operation_of[: len(located.regions.first)], np.int64)
        self._order = np.argsort(operation, kind="stable")
        self._operation = operation[self._order]

    def of(self, operation: Operation) -> NDArray[np.int64]:
        """Those of an operation."""
        begin, end = np.searchsorted(self._operation, (operation.root.id, operation.root.id + 1))
        return self._order[begin:end]


def is_codec(frame: Frame) -> bool:
    """Whether a native function is part of a compressor."""
    return bool(_CODEC.match(frame.function)) or crate_of(frame.function) in _CODEC_CRATES


class _Codec:
    """The codecs of one operation."""

    def __init__(
        self,
        operations: Operations,
        located: Located,
        flow: Flow,
        operation: Operation,
        moved_by: Sequence[Frame],
    ) -> None:
        self.moved_by = moved_by
        self.located = located
        self.flow = flow
        self.operation = operation
        self.reads = operation.direction != "write"
        self.given: dict[int, int] = {}
        """Regions that a probe saw go in on a write or come out on a read -> bytes."""
        self.existing: set[int] = set()
        """Those of them that were there before."""
        self._look(operations)

    def _look(self, operations: Operations) -> None:
        roles = (OUTPUT, DESTINATION) if self.reads else (INPUT,)
        for number in operations.spans.beneath(self.operation.root.id):
            span = operations.spans[number]
            if not span.is_metadata and span.site.kind in ("operation", "context"):
                for seen in self.located.sightings.of(number):
                    if seen.role in roles and seen.region is not None:
                        self.given[seen.region] = max(seen.nbytes, self.given.get(seen.region, 0))
                        if seen.role == DESTINATION:
                            self.existing.add(seen.region)

    def settle(self, edges: Iterable[Edge], blocks: NDArray[np.int64]) -> tuple[list[Edge], list[Edge]]:
        """One edge for each block that a codec filled, and those of the operation's ``edges`` whose place they take.
        ``blocks`` are its regions.
        """
        inside = [edge for edge in edges if edge.kind == "copy" and not edge.mover and self._in_codec(edge)]
        inner = set(map(id, inside))
        came: dict[int, int] = defaultdict(int)
        went: dict[int, int] = defaultdict(int)
        for edge in edges:
            if id(edge) not in inner:
                if edge.destination is not None:
                    came[edge.destination] += edge.nbytes
                if edge.source is not None:
                    went[edge.source] += edge.nbytes
        owned = self._owned(blocks)
        made = [region for region in owned if self._was_made(region, came, went)]
        if not made:
            return [], []
        used = self._used(owned, came, went)
        into: dict[int | None, list[Edge]] = defaultdict(list)
        for edge in inside:
            into[edge.destination].append(edge)
        sources = (self._source(region, number, used, len(made)) for number, region in enumerate(made))
        return [self._edge(*ends, went, into[ends[0]]) for ends in zip(made, sources, strict=True)], inside

    def _in_codec(self, edge: Edge) -> bool:
        return edge.caller >= 0 and is_codec(self.moved_by[edge.caller])

    def _owned(self, blocks: NDArray[np.int64]) -> list[int]:
        least = max(_SMALLEST_SHARE * self.operation.payload / max(1, self.operation.chunks), 512)
        regions = self.located.regions
        owned = set(blocks[regions.nbytes[blocks] >= least].tolist())
        if self.reads:
            owned |= {region for region in self.given if regions[region].nbytes >= least}
        return sorted(sorted(owned), key=lambda region: regions[region].enter)

    def _was_made(self, region: int, came: dict[int, int], went: dict[int, int]) -> bool:
        if came.get(region) or not self.located.regions.is_block(region):
            return False
        return bool(went.get(region)) or (self.reads and region in self.given)

    def _used(self, owned: Iterable[int], came: dict[int, int], went: dict[int, int]) -> list[int]:
        """Regions that bytes went into and none came out of, in order; on a write also what the caller handed in."""
        known = set(owned)
        ends = [region for region in came if region in known and not went.get(region)]
        if self.reads:
            ends = [region for region in ends if region not in self.given]
        elif not ends:
            ends = [region for region in self.given if not went.get(region)]
        return sorted(ends, key=lambda region: self.located.regions[region].enter)

    def _source(self, region: int, number: int, used: list[int], made: int) -> int | None:
        if len(used) == made:
            return used[number]
        if len(used) == 1:
            return used[0]
        enter = self.located.regions[region].enter
        return next((source for source in reversed(used) if self.located.regions[source].enter <= enter), None)

    def _edge(self, region: int, source: int | None, went: dict[int, int], observed: list[Edge]) -> Edge:
        block = self.located.regions[region]
        nbytes = min(block.nbytes, went.get(region) or self.given.get(region) or block.nbytes)
        unsure = region in self.flow.inferred_operation
        return Edge(
            kind="decode" if self.reads else "encode",
            source=source,
            destination=region,
            nbytes=nbytes,
            count=1,
            sequence=max(block.enter, self.located.regions[source].enter) + 1 if source is not None else block.enter,
            operation=self.operation.root.id,
            span=block.span or (observed[0].span if observed else 0),
            caller=observed[0].caller if observed and region in self.existing else -1,
            mover=False,
            evidence="inferred" if unsure else "native",
            observed=min(nbytes, sum(edge.observed for edge in observed)),
        )
