"""Codecs that no probe sees: those inside native code, told by what went in and what came out.

A compressor writes its output with instructions of its own and calls ``memcpy`` for parts of it at most. On a path
whose codecs compress and on which no probe saw them do it, a block that bytes went out of and that nothing was seen to
fill came out of a codec, and a block that bytes went into and none came out of went into it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from copytrace.flow import Edge
from copytrace.model import DESTINATION, INPUT, OUTPUT
from copytrace.native import crate_of
from copytrace.operations import compresses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from copytrace.flow import Flow
    from copytrace.lookup import Located
    from copytrace.model import Frame
    from copytrace.operations import Operation, Operations

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
    for operation in unseen:
        _adopt(operation, operations, located, flow)
        edges = [edge for edge in flow.edges if edge.operation == operation.root.id]
        _Codec(operations, located, flow, operation, moved_by).settle(edges)
    flow.edges.sort(key=attrgetter("sequence"))


def _adopt(operation: Operation, operations: Operations, located: Located, flow: Flow) -> None:
    """What native threads allocated while only this operation was open belongs to it, and what they moved of it."""
    root = operation.root
    for other in operations.by_root.values():
        if other is not operation and other.root.enter < root.exit and root.enter < other.root.exit:
            return
    regions = located.regions
    opened = (regions.enter >= root.enter) & (regions.enter < root.exit)
    for number in np.flatnonzero(regions.native & opened).tolist():
        flow.operation_of[number] = flow.operation_of[number] or root.id
    for edge in flow.edges:
        if not edge.operation and root.enter <= edge.sequence < root.exit:
            ends = (edge.destination, edge.source)
            if any(region is not None and flow.operation_of[region] == root.id for region in ends):
                edge.operation = root.id


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

    def settle(self, edges: Iterable[Edge]) -> None:
        inside = [edge for edge in edges if edge.kind == "copy" and not edge.mover and self._in_codec(edge)]
        inner = set(map(id, inside))
        outside = [edge for edge in edges if id(edge) not in inner]
        came: dict[int, int] = defaultdict(int)
        went: dict[int, int] = defaultdict(int)
        for edge in outside:
            if edge.destination is not None:
                came[edge.destination] += edge.nbytes
            if edge.source is not None:
                went[edge.source] += edge.nbytes
        made = [region for region in self._owned() if self._was_made(region, came, went)]
        if not made:
            return
        used = self._used(came, went)
        self.flow.edges = [edge for edge in self.flow.edges if id(edge) not in inner]
        for number, region in enumerate(made):
            observed = [edge for edge in inside if edge.destination == region]
            self.flow.edges.append(self._edge(region, self._source(region, number, used, len(made)), went, observed))

    def _in_codec(self, edge: Edge) -> bool:
        return edge.caller >= 0 and is_codec(self.moved_by[edge.caller])

    def _owned(self) -> list[int]:
        least = max(_SMALLEST_SHARE * self.operation.payload / max(1, self.operation.chunks), 512)
        regions = self.located.regions
        operation = np.array(self.flow.operation_of[: len(regions.nbytes)], np.int64)
        owned = set(np.flatnonzero((operation == self.operation.root.id) & (regions.nbytes >= least)).tolist())
        if self.reads:
            owned |= {region for region in self.given if regions[region].nbytes >= least}
        return sorted(sorted(owned), key=lambda region: regions[region].enter)

    def _was_made(self, region: int, came: dict[int, int], went: dict[int, int]) -> bool:
        if came.get(region) or not self.located.regions.is_block(region):
            return False
        return bool(went.get(region)) or (self.reads and region in self.given)

    def _used(self, came: dict[int, int], went: dict[int, int]) -> list[int]:
        """Regions that bytes went into and none came out of, in order; on a write also what the caller handed in."""
        owned = set(self._owned())
        ends = [region for region in came if region in owned and not went.get(region)]
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
