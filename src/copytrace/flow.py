"""Operations, look-ups and transfers -> edges: every movement of payload bytes, once.

A *mover* is a span whose site moves bytes by itself (a codec, a scatter, a join). It stands for one movement of its
bytes, and what the hook saw move inside it belongs to it: as its evidence when it goes from its inputs to its output,
as part of the transform inside a codec, and as a copy of its own when CPython or numpy moved the bytes once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from copytrace.layers import CARRIER_LIBRARIES
from copytrace.lookup import Sighting
from copytrace.model import DESTINATION, INPUT, OUTPUT, TRANSFER_KINDS
from copytrace.operations import is_mover
from copytrace.stacks import OWN_STACK

if TYPE_CHECKING:
    from copytrace.lookup import Located, Move, Region
    from copytrace.model import Trace
    from copytrace.operations import Operations, SpanView

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
    builder.edges.sort(key=lambda edge: edge.sequence)
    return Flow(builder.edges, builder.operation_of)


class _Builder:
    def __init__(self, trace: Trace, operations: Operations, located: Located) -> None:
        self.trace = trace
        self.spans = operations.spans
        self.located = located
        self.edges: list[Edge] = []
        self.owner: dict[int, int] = {}
        self.claims: dict[int, list[Edge]] = {}
        self.mover_edge: dict[int, Edge] = {}
        self.operation_of = [self._operation(region.span) for region in located.regions]
        self.allocated: dict[int, list[Region]] = {}
        own = {number for number, stack in enumerate(trace.allocations.stacks) if stack == OWN_STACK}
        for region in located.regions:
            if region.span and region.stack not in own:
                self.allocated.setdefault(region.span, []).append(region)

    def _operation(self, span: int) -> int:
        found = self.spans.get(span)
        return found.operation if found else 0

    def movers(self) -> None:
        """One edge a mover that moved bytes, the outermost where one calls another; what is inside belongs to it. But a
        codec that a mover calls before it moves is a step of its own, and gives what is then moved.
        """
        for span in self.spans.values():
            above = self.owner.get(span.parent, 0)
            outer = self.mover_edge[above] if above else None
            apart = outer is not None and span.site.kind in _TRANSFORMS and outer.kind not in _TRANSFORMS
            if is_mover(span) and (outer is None or apart):
                edge = self._mover_edge(span, self.located.sightings.get(span.id, []))
                if edge is not None:
                    self.edges.append(edge)
                    self.mover_edge[span.id] = edge
                    if outer is not None:
                        outer.source, outer.sequence = edge.destination, span.exit
                    above = span.id
            if above:
                self.owner[span.id] = above

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
        known = into.region is not None and bool(self.located.regions[into.region].rows)
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
        made = max(self.allocated.get(span.id, ()), key=lambda region: region.nbytes, default=None)
        if made is None:
            return []
        nbytes = made.nbytes - (_BYTES_HEADER if span.site.primitive.startswith(_MAKE_BYTES) else 0)
        if inputs and span.site.kind in ("copy", "gather"):
            nbytes = min(nbytes, sum(source.nbytes for source in inputs))
        return [Sighting(OUTPUT, made.id, made.address, nbytes, made.nbytes, True)]

    def moves(self) -> None:
        for move in self.located.moves:
            kind = TRANSFER_KINDS[move.kind]
            edge = self._edge(kind, move)
            owner = self.owner.get(move.span, 0)
            if kind == "copy" and owner:
                self.claims.setdefault(owner, []).append(edge)
            elif kind == "copy" and self._scatters(move.span):
                self.edges.append(replace(edge, kind="scatter"))
            elif move.count == 1:
                self.edges.append(edge)

    def _edge(self, kind: str, move: Move) -> Edge:
        return Edge(
            kind=kind,
            source=move.source,
            destination=move.destination,
            nbytes=move.nbytes,
            count=move.count,
            sequence=move.sequence,
            operation=self._operation(move.span),
            span=move.span,
            caller=move.caller,
            mover=False,
            evidence="transfer",
            observed=move.nbytes if kind == "copy" else 0,
        )

    def _scatters(self, span: int) -> bool:
        """Whether the site puts bytes into memory that exists, from a source that its probe cannot see."""
        return span in self.spans and self.spans[span].site.kind == "scatter"

    def reallocs(self) -> None:
        """A realloc that moved its block copied what was in it; the hook does not see it, for libc does it itself."""
        blocks = self.trace.allocations
        for region in self.located.regions:
            row = region.rows[0] if region.rows else -1
            if row < 0 or not blocks.moved[row] or blocks.previous[row] < 0:
                continue
            before = int(blocks.previous[row])
            old = int(self.located.region_of_row[before])
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
            owner = self.owner.get(span, 0)
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
            seen = self.located.sightings.get(owner, [])
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
        return span.enter <= self.located.regions[region].enter < span.exit and bool(self.located.regions[region].rows)

    def spread_operations(self) -> None:
        """Regions and moves of native threads, which have no spans, are of the operation whose buffers they touch."""
        for span_id, seen in self.located.sightings.items():
            operation = self._operation(span_id)
            for sighting in seen:
                if operation and sighting.region is not None and sighting.role == OUTPUT:
                    self._adopt(sighting.region, operation)
        for edge in self.edges:
            if edge.operation:
                self._adopt_ends(edge)
        open_edges = [edge for edge in self.edges if not edge.operation and not edge.span]
        sources = self._sources() if open_edges else {}
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
        region = self.located.regions[number]
        root = self.spans[operation]
        ended = not region.native and region.enter >= root.exit
        return bool(region.rows) and not region.span and region.enter >= root.enter and not ended

    def _sources(self) -> dict[int, list[tuple[int, int, int]]]:
        """Region -> (enter, exit, operation) of the operations that were handed it."""
        handed: dict[int, list[tuple[int, int, int]]] = {}
        for span_id, seen in self.located.sightings.items():
            span = self.spans.get(span_id)
            if span is None or not span.operation:
                continue
            for sighting in seen:
                if sighting.region is not None:
                    handed.setdefault(sighting.region, []).append((span.enter, span.exit, span.operation))
        return handed

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
