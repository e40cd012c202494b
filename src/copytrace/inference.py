"""Without the hook: the movements that must have happened, read off the buffers that were held.

What goes in must come out: on a path the payload flows from a source through buffers to a sink, so every family of
extra buffers that is large enough to hold it stands for one movement through it, of at most the payload.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from copytrace.flow import Edge
from copytrace.layers import layer_of_module
from copytrace.model import INPUT, OUTPUT
from copytrace.naming import by_import
from copytrace.operations import keeps_in_memory

if TYPE_CHECKING:
    from copytrace.flow import Flow
    from copytrace.lookup import Located
    from copytrace.model import Trace
    from copytrace.operations import Operation, Operations
    from copytrace.regions import Region
    from copytrace.tree import SpanView

_SHARE = 0.5
"""Share of an operation's payload that a family of buffers must hold to stand for a movement of it."""


def complete(trace: Trace, operations: Operations, located: Located, flow: Flow) -> None:
    """Add to ``flow`` what the hook would have seen: fetches, flushes, and copies that no probe saw."""
    by_operation: dict[int, list[Region]] = defaultdict(list)
    _adopt_native(operations, located, flow)
    told = np.array(flow.operation_of[: len(located.regions.first)], np.int64)
    for region in located.regions.at(np.flatnonzero(told)):
        by_operation[flow.operation_of[region.id]].append(region)
    produced: set[int | None] = {edge.destination for edge in flow.edges}
    for operation in operations.by_root.values():
        requests = _requests(operation, operations, located, flow)
        produced |= {edge.destination for edge in requests}
        flow.edges += requests
        flow.edges += _families(trace, operation, by_operation[operation.root.id], produced, located, flow)
    flow.edges.sort(key=lambda edge: edge.sequence)


def _adopt_native(operations: Operations, located: Located, flow: Flow) -> None:
    """Blocks that native threads allocated belong to the one operation that was open; to the newest when there were
    several.
    """
    for region in located.regions.at(np.flatnonzero(located.regions.native)):
        if flow.operation_of[region.id]:
            continue
        opened = [op.root for op in operations.by_root.values() if op.root.enter <= region.enter < op.root.exit]
        if opened:
            flow.operation_of[region.id] = max(opened, key=lambda root: root.enter).id
            if len(opened) > 1:
                flow.inferred_operation.add(region.id)


def _requests(operation: Operation, operations: Operations, located: Located, flow: Flow) -> list[Edge]:
    """A fetch for what the innermost store gave out, a flush for what it was given, unless it keeps its bytes in
    memory or is the user's own and may do so.
    """
    edges: list[Edge] = []

    def settle(span: SpanView) -> bool:
        """Whether it is known of the bytes of this request, or of one beneath it, where they went."""
        beneath = [settle(operations.spans[child]) for child in operations.spans.children(span.id)]
        if any(beneath):
            return True
        if span.site.kind != "request" or span.is_metadata or span.error:
            return False
        if keeps_in_memory(str(span.attributes.get("store", "")), span.site.name):
            return True
        if layer_of_module(span.site.name) == "user":
            return False
        found = _request(span, operation, located, flow)
        edges.extend(found)
        return bool(found)

    settle(operation.root)
    return edges


def _request(span: SpanView, operation: Operation, located: Located, flow: Flow) -> list[Edge]:
    fetches = span.site.direction != "write"
    role = OUTPUT if fetches else INPUT
    return [
        Edge(
            kind="fetch" if fetches else "flush",
            source=None if fetches else seen.region,
            destination=seen.region if fetches else None,
            nbytes=seen.nbytes,
            count=1,
            sequence=span.exit,
            operation=operation.root.id,
            span=span.id,
            caller=-1,
            mover=False,
            evidence="call",
        )
        for seen in located.sightings.of(span.id)
        if seen.role == role
        and seen.region is not None
        and not (fetches and flow.operation_of[seen.region] != operation.root.id)
    ]


def _families(
    trace: Trace,
    operation: Operation,
    regions: list[Region],
    produced: set[int | None],
    located: Located,
    flow: Flow,
) -> list[Edge]:
    """One movement for each family of buffers that holds the payload and that nothing is known to have filled."""
    families: dict[int, list[Region]] = defaultdict(list)
    results = {s.region for s in located.sightings.of(operation.root.id) if s.role != INPUT}
    for region in regions:
        if region.id not in produced and region.id not in results:
            families[region.stack].append(region)
    edges = []
    for stack, family in families.items():
        held = sum(region.nbytes for region in family)
        frames = trace.allocations.stacks[stack]
        if held < _SHARE * operation.payload or not operation.payload or not frames:
            continue
        native = all(frame.native for frame in frames)
        if not native and not _fills(frames[0].function):
            continue
        if by_import(frames):
            continue
        carried = min(held, operation.payload)
        share = carried / held
        doubtful = any(region.id in flow.inferred_operation for region in family)
        edges += [
            Edge(
                kind="copy",
                source=None,
                destination=region.id,
                nbytes=round(region.nbytes * share),
                count=1,
                sequence=region.enter,
                operation=operation.root.id,
                span=region.span,
                caller=-1,
                mover=False,
                evidence="inferred" if doubtful else "native" if native else "stack",
                held=True,
            )
            for region in family
        ]
    return edges


def _fills(function: str) -> bool:
    """Whether a CPython or numpy function that allocates also fills what it allocates (an empty array is no copy)."""
    return not any(word in function.lower() for word in ("empty", "zeros", "calloc", "newfromdescr"))
