"""Operations, look-ups and transfers -> edges: every movement of payload bytes, once.

A *mover* is a span whose site moves bytes by itself (a codec, a scatter, a join). It stands for one movement of its
bytes, and what the hook saw move inside it belongs to it: as its evidence when it goes from its inputs to its output,
as part of the transform inside a codec, and as a copy of its own when CPython or numpy moved the bytes once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from copytrace.collecting import in_turn
from copytrace.layers import CARRIER_LIBRARIES
from copytrace.lookup import Sighting
from copytrace.model import COPY_KINDS, DESTINATION, INPUT, OUTPUT, TRANSFER_KINDS
from copytrace.stacks import OWN_STACK

if TYPE_CHECKING:
    from copytrace.lookup import Located
    from copytrace.model import Trace
    from copytrace.operations import Operations
    from copytrace.tree import SpanView

_TRANSFORMS = frozenset({"encode", "decode"})
_SEEN_ENOUGH = 0.9
_ALWAYS_SEEN = 8192
"""Bytes of a copy from which the hook keeps its move, where it is one move."""
_MAKE_BYTES = ("bytes", "memoryview.tobytes", "numpy.ndarray.tobytes", "BytesIO.read", "mmap.read")
_BYTES_HEADER = 33
"""Bytes of a ``bytes`` object beside its content: ``sys.getsizeof(b"")``."""


@dataclass(slots=True)
class Edge:
    """Bytes that moved from one region to another (None: not known, or the kernel for a fetch or flush).

    ``operation`` and ``span`` are span ids, 0 for none. ``caller`` is an index into the transfers' callers, -1 when
    no native function is known. ``mover`` says that the span's site is what moved the bytes. ``observed`` are the
    bytes that the hook saw of it. ``held`` says that nothing but the memory that held the bytes tells of it.
    """

    kind: str
    source: int | None
    destination: int | None
    nbytes: int
    count: int
    sequence: int
    operation: int
    span: int
    caller: int
    mover: bool
    evidence: str
    observed: int = 0
    held: bool = False


@dataclass(slots=True)
class Flow:
    """All edges of a session in order, and the operation of each region (0: none)."""

    edges: list[Edge]
    operation_of: list[int]
    inferred_operation: set[int] = field(default_factory=set)


def build(trace: Trace, operations: Operations, located: Located) -> Flow:
    """The movements of a session. Without the hook, those that no probe saw are left to :mod:`copytrace.inference`."""
    builder = _Builder(trace, operations, located)
    builder.movers()
    builder.moves()
    builder.reallocs()
    builder.settle_claims()
    builder.spread_operations()
    builder.edges.sort(key=attrgetter("sequence"))
    return Flow(builder.edges, builder.operation_of)


class _Builder:
    def __init__(self, trace: Trace, operations: Operations, located: Located) -> None:
        self.trace = trace
        self.spans = operations.spans
        self.located = located
        self.edges: list[Edge] = []
        self.claims: dict[int, list[Edge]] = {}
        self.mover_edge: dict[int, Edge] = {}
        regions = located.regions
        self.operation_of: list[int] = self.spans.operations_of(regions.span).tolist()
        self.operation_of += [0] * (regions.count - len(self.operation_of))
        self.largest = self._largest_of_spans()
        """The largest block that was allocated in each span."""
        self.movers_above = self._movers_above()

    def _largest_of_spans(self) -> dict[int, int]:
        regions = self.located.regions
        own = np.array([stack == OWN_STACK for stack in self.trace.allocations.stacks] or [False])
        rows = np.flatnonzero((regions.span > 0) & ~own[regions.stack])
        rows = rows[np.lexsort((rows, -regions.nbytes[rows].astype(np.int64), regions.span[rows]))]
        spans, first = np.unique(regions.span[rows], return_index=True)
        return dict(zip(spans.tolist(), rows[first].tolist(), strict=True))

    def _movers_above(self) -> dict[int, int]:
        """The span of the nearest mover of each span that is one or is in one."""
        spans = self.spans
        nearest = spans.nearest(np.where(spans.of_kind(COPY_KINDS), spans.ids, 0))
        inside = nearest > 0
        return dict(zip(spans.ids[inside].tolist(), nearest[inside].tolist(), strict=True))

    def _owner(self, span: int) -> int:
        """The mover that what happened in a span belongs to, 0 for none."""
        above = self.movers_above.get(span, 0)
        while above and above not in self.mover_edge:
            above = self.movers_above.get(self.spans[above].parent, 0)
        return above

    def _operation(self, span: int) -> int:
        found = self.spans.get(span)
        return found.operation if found else 0

    def movers(self) -> None:
        """One edge a mover that moved bytes, the outermost where one calls another; what is inside belongs to it. But a
        codec that a mover calls before it moves is a step of its own, and gives what is then moved.
        """
        for span in self.spans.at(np.flatnonzero(self.spans.of_kind(COPY_KINDS))):
            above = self._owner(span.parent)
            outer = self.mover_edge[above] if above else None
            if outer is not None and (span.site.kind not in _TRANSFORMS or outer.kind in _TRANSFORMS):
                continue
            edge = self._mover_edge(span, self.located.sightings.of(span.id))
            if edge is not None:
                self.edges.append(edge)
                self.mover_edge[span.id] = edge
                if outer is not None:
                    outer.source, outer.sequence = edge.destination, span.exit

    def _mover_edge(self, span: SpanView, seen: list[Sighting]) -> Edge | None:
        inputs = [s for s in seen if s.role == INPUT and s.nbytes]
        outputs = [s for s in seen if s.role == OUTPUT and s.nbytes] or [
            s for s in seen if s.role == DESTINATION and s.nbytes
        ]
        if not outputs and span.site.kind != "scatter":
            outputs = self._allocated_by(span, inputs)
        if not outputs or (span.error and not any(s.role == DESTINATION for s in seen)):
            return None
        into = max(outputs, key=lambda s: s.nbytes)
        kind = span.site.kind
        if kind == "scatter" and not inputs:
            return None
        if any(_overlap(into, source) for source in inputs):
            return None
        if kind == "copy" and inputs and not all(source.contiguous for source in inputs):
            kind = "gather"
        largest = max(inputs, key=lambda s: s.nbytes, default=None)
        known = into.region is not None and self.located.regions.is_block(into.region)
        return Edge(
            kind=kind,
            source=largest.region if largest else None,
            destination=into.region,
            nbytes=into.nbytes,
            count=len(inputs) if kind == "join" and inputs else 1,
            sequence=span.enter,
            operation=span.operation,
            span=span.id,
            caller=-1,
            mover=True,
            evidence="pointer" if known and kind != "scatter" else "call",
        )

    def _allocated_by(self, span: SpanView, inputs: list[Sighting]) -> list[Sighting]:
        """What came out of a primitive, whose result no probe can see: the largest block that was allocated in it."""
        if span.id not in self.largest:
            return []
        made = self.located.regions[self.largest[span.id]]
        nbytes = made.nbytes - (_BYTES_HEADER if span.site.primitive.startswith(_MAKE_BYTES) else 0)
        if inputs and span.site.kind in ("copy", "gather"):
            nbytes = min(nbytes, sum(source.nbytes for source in inputs))
        return [Sighting(OUTPUT, made.id, made.address, nbytes, made.nbytes, True)]

    def moves(self) -> None:
        """One edge a move, those inside a mover apart. Where a site puts bytes into memory that exists, its probe may
        not see their source, so that it is no mover.
        """
        rows, moves, spans = self.trace.transfers.rows, self.located.moves, self.spans
        scatters = set(spans.ids[spans.of_kind({"scatter"})].tolist())
        columns = [rows[name] for name in ("kind", "nbytes", "count", "sequence", "caller")]
        ends = moves.source, moves.destination
        for number, nbytes, count, sequence, caller, span, operation, source, destination in zip(
            *map(in_turn, (*columns, moves.span, spans.operations_of(moves.span), *ends)), strict=True
        ):
            kind = TRANSFER_KINDS[number]
            owner = self._owner(span) if kind == "copy" else 0
            scattered = kind == "copy" and span in scatters
            if not owner and not scattered and count > 1:
                continue
            edge = Edge(
                kind="scatter" if scattered and not owner else kind,
                source=source if source >= 0 else None,
                destination=destination if destination >= 0 else None,
                nbytes=nbytes,
                count=count,
                sequence=sequence,
                operation=operation,
                span=span,
                caller=caller,
                mover=False,
                evidence="transfer",
                observed=nbytes if kind == "copy" else 0,
            )
            (self.claims.setdefault(owner, []) if owner else self.edges).append(edge)

    def reallocs(self) -> None:
        """A realloc that moved its block copied what was in it; the hook does not see it, for libc does it itself."""
        blocks, regions = self.trace.allocations, self.located.regions
        moved = np.flatnonzero(blocks.moved[regions.first] & (blocks.previous[regions.first] >= 0))
        for region in regions.at(moved):
            row = region.rows[0]
            before = int(blocks.previous[row])
            old = int(regions.of_row[before])
            span = int(blocks.span[row])
            edge = Edge(
                kind="copy",
                source=old,
                destination=region.id,
                nbytes=int(min(blocks.size[before], blocks.size[row])),
                count=1,
                sequence=int(blocks.enter[row]),
                operation=self._operation(span),
                span=span,
                caller=-1,
                mover=False,
                evidence="stack",
            )
            owner = self._owner(span)
            if owner:
                self.claims.setdefault(owner, []).append(edge)
            else:
                self.edges.append(edge)

    def settle_claims(self) -> None:
        """Give the moves inside a mover to it; those that moved its bytes once more become copies of their own."""
        if self.trace.transfers.recorded and not self.trace.transfers.lost:
            self._tell_gathers()
        divided: set[int] = set()
        for owner, moves in self.claims.items():
            main = self.mover_edge[owner]
            span = self.spans[owner]
            seen = self.located.sightings.of(owner)
            inputs = {s.region for s in seen if s.role == INPUT and s.region is not None}
            if main.source is not None:
                inputs.add(main.source)
            transform = main.kind in _TRANSFORMS
            by_interpreter = [m for m in moves if not transform or self._by_interpreter(m)]
            direct = [
                m
                for m in moves
                if m.destination == main.destination
                and (transform or not inputs or m.source in inputs or m.source is None)
            ]
            if transform:
                direct = [m for m in direct if m.source in inputs]
            if not direct:
                direct = [m for m in by_interpreter if m.source in inputs]
            main.observed = sum(m.observed for m in (moves if transform else direct))
            if main.kind == "join" and direct:
                main.count = len(direct)
            if not transform and main.observed >= _SEEN_ENOUGH * main.nbytes:
                main.evidence = "transfer"
                if main.source is None or main.kind == "join":
                    divided.add(id(main))
                    self.edges += _by_source(main, direct)
            taken = set(map(id, direct))
            inside = [m for m in by_interpreter if id(m) not in taken and self._made_inside(m.source, span)]
            self.edges += inside
        self.edges = [edge for edge in self.edges if id(edge) not in divided]

    def _tell_gathers(self) -> None:
        """A copy by CPython or numpy of which the hook saw no move went element by element."""
        for owner, edge in self.mover_edge.items():
            by_primitive = edge.kind == "copy" and self.spans[owner].site.library == "python"
            if by_primitive and edge.nbytes >= _ALWAYS_SEEN and owner not in self.claims:
                edge.kind = "gather"

    def _by_interpreter(self, move: Edge) -> bool:
        if move.caller < 0:
            return False
        caller = self.trace.transfers.callers[move.caller]
        return bool(CARRIER_LIBRARIES.match(caller.file))

    def _made_inside(self, region: int | None, span: SpanView) -> bool:
        if region is None:
            return False
        return self.located.regions.is_block(region) and span.enter <= self.located.regions[region].enter < span.exit

    def spread_operations(self) -> None:
        """Regions and moves of native threads, which have no spans, are of the operation whose buffers they touch."""
        seen = self.located.sightings
        operations = self.spans.operations_of(seen.span)
        given = np.flatnonzero((operations > 0) & (seen.region >= 0) & (seen.role == OUTPUT))
        for region, by in zip(seen.region[given].tolist(), operations[given].tolist(), strict=True):
            self._adopt(region, by)
        for edge in self.edges:
            if edge.operation:
                self._adopt_ends(edge)
        open_edges = [edge for edge in self.edges if not edge.operation and not edge.span]
        sources = self._sources(open_edges) if open_edges else {}
        while open_edges:
            left = []
            for edge in open_edges:
                operation = self._from_ends(edge, sources)
                if operation:
                    edge.operation = operation
                    self._adopt_ends(edge)
                else:
                    left.append(edge)
            if len(left) == len(open_edges):
                break
            open_edges = left

    def _adopt_ends(self, edge: Edge) -> None:
        for region in (edge.source, edge.destination):
            if region is not None:
                self._adopt(region, edge.operation)

    def _adopt(self, region: int, operation: int) -> None:
        if not self.operation_of[region] and self._unowned(region, operation):
            self.operation_of[region] = operation

    def _is_open(self, operation: int, sequence: int) -> bool:
        root = self.spans[operation]
        return root.enter <= sequence < root.exit

    def _unowned(self, number: int, operation: int) -> bool:
        """Whether a block was allocated outside all spans for ``operation``: by a native thread or an event loop."""
        regions = self.located.regions
        if not regions.is_block(number) or regions[number].span:
            return False
        region, root = regions[number], self.spans[operation]
        return region.enter >= root.enter and (region.native or region.enter < root.exit)

    def _sources(self, edges: list[Edge]) -> dict[int, list[tuple[int, int, int]]]:
        """Region at an end of ``edges`` -> (enter, exit, operation) of the spans of operations that were handed it."""
        seen, spans = self.located.sightings, self.spans
        ends = {region for edge in edges for region in (edge.source, edge.destination) if region is not None}
        rows = spans.rows_of(seen.span)
        handed = np.flatnonzero((rows >= 0) & np.isin(seen.region, list(ends)))
        handed = handed[spans.operation[rows[handed]] > 0]
        found: dict[int, list[tuple[int, int, int]]] = {}
        for region, span in zip(seen.region[handed].tolist(), spans.at(rows[handed]), strict=True):
            found.setdefault(region, []).append((span.enter, span.exit, span.operation))
        return found

    def _from_ends(self, edge: Edge, handed: dict[int, list[tuple[int, int, int]]]) -> int:
        for region in (edge.destination, edge.source):
            if region is None:
                continue
            operation = self.operation_of[region]
            if operation and (self._unowned(region, operation) or self._is_open(operation, edge.sequence)):
                return operation
            for enter, leave, operation in handed.get(region, ()):
                if enter <= edge.sequence <= leave:
                    return operation
        return 0


def _overlap(one: Sighting, other: Sighting) -> bool:
    if one.region is None and other.region is None and not (one.address and other.address):
        return False
    return one.address < other.address + other.extent and other.address < one.address + one.extent


def _by_source(main: Edge, direct: list[Edge]) -> list[Edge]:
    """A mover's edge as one for each block that its bytes came from: no probe sees what a list or ``BytesIO`` holds."""
    pieces: dict[int | None, Edge] = {}
    for move in direct:
        piece = pieces.get(move.source)
        if piece is None:
            pieces[move.source] = replace(main, source=move.source, nbytes=move.nbytes, count=1, observed=move.observed)
        else:
            piece.nbytes += move.nbytes
            piece.count += 1
            piece.observed += move.observed
    return list(pieces.values())
