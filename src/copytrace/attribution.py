"""Spans x allocations x transfers -> the flow graph of each path and who is answerable for each of its edges. Pure: no
I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace import flow, inference, lookup, operations
from copytrace.allocations import OWN_STACK
from copytrace.layers import CARRIERS, layer_of_module, layer_of_native, project_of
from copytrace.model import (
    COPY_KINDS,
    DESTINATION,
    IO_KINDS,
    OUTPUT,
    Buffer,
    Coverage,
    Frame,
    LayerTotal,
    Path,
    ReportData,
    SiteRef,
    Step,
)
from copytrace.naming import Name, by_stack, callers, imports, is_rust, reference
from copytrace.native import crate_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from copytrace.flow import Edge
    from copytrace.lookup import Region
    from copytrace.model import Trace
    from copytrace.operations import Operation, SpanView

IO = -1
"""The kernel's end of a fetch or flush."""

_RAW_CODECS = frozenset(
    {"bytes", "transpose", "sharding", "sharding_indexed", "crc32c", "vlen-utf8", "vlen-bytes", "endian"}
)
_OWNING_STORES = ("MemoryStore", "ManagedMemoryStore", "GpuMemoryStore", "ObjectStore(MemoryStore)")
_UNKNOWN = "(unknown)"


def attribute(trace: Trace) -> ReportData:
    """The report of a trace."""
    ops = operations.group(trace)
    located = lookup.locate(trace)
    moved = flow.build(trace, ops, located)
    if not trace.transfers.recorded:
        inference.complete(trace, ops, located, moved)
    work = _Attribution(trace, ops, located, moved)
    paths = work.paths()
    return ReportData(
        environment=trace.environment,
        coverage=work.coverage(paths),
        paths=tuple(paths),
        layers=_layer_totals(paths),
        label=trace.label,
        spans=len(trace.spans),
        records=trace.allocations.records,
    )


@dataclass(slots=True)
class _Group:
    """Regions of one site on a path, as one buffer of the report."""

    id: str
    role: str
    label: str
    layer: str
    site: SiteRef
    regions: set[int] = field(default_factory=set)
    bytes: int = 0
    pieces: int = 0


class _Attribution:
    def __init__(self, trace: Trace, ops: operations.Operations, located: lookup.Located, moved: flow.Flow) -> None:
        self.trace = trace
        self.ops = ops
        self.located = located
        self.flow = moved
        self.versions: Mapping[str, str] = trace.environment.get("packages", {})
        self.callers = trace.transfers.callers
        self.clock_sequence, self.clock_time = _clock(trace)
        self.library_of_operation: dict[int, str] = {}
        self.row_operation = self._row_operations()
        self.on_path_bytes = 0
        self.named_bytes = 0
        self.used: set[int] = set()
        self.names: dict[tuple[int, str], Name | None] = {}

    # --- which rows belong to which operation

    def _row_operations(self) -> NDArray[np.int64]:
        blocks = self.trace.allocations
        spans = self.trace.spans["id"]
        of_span = np.array([self.ops.spans[number].operation for number in spans.tolist()], np.int64)
        found = np.searchsorted(spans, blocks.span)
        result = np.zeros(len(blocks.address), np.int64)
        if len(spans):
            found = np.minimum(found, len(spans) - 1)
            known = spans[found] == blocks.span
            result[known] = of_span[found[known]]
        for region in self.located.regions:
            operation = self.flow.operation_of[region.id]
            if operation and not region.span:
                result[region.rows] = operation
        own = np.array([stack == OWN_STACK for stack in blocks.stacks] or [False], bool)
        result[own[blocks.stack]] = 0
        return result

    # --- paths

    def paths(self) -> list[Path]:
        members: dict[str, list[Operation]] = defaultdict(list)
        for op in self.ops.by_root.values():
            members[op.label].append(op)
        edges: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.flow.edges:
            if edge.operation:
                edges[edge.operation].append(edge)
        return [self._path(label, group, edges) for label, group in members.items()]

    def _path(self, label: str, group: list[Operation], all_edges: dict[int, list[Edge]]) -> Path:
        first = group[0]
        payload = sum(op.payload for op in group)
        roles: dict[int, str] = {}
        edges: list[Edge] = []
        for op in group:
            kept, of_op = self._on_path(op, all_edges.get(op.root.id, []))
            edges += kept
            roles |= of_op
        edges.sort(key=lambda edge: edge.sequence)
        self.used.update(map(id, edges))
        numbers = {op.root.id for op in group}
        rows = np.flatnonzero(np.isin(self.row_operation, np.fromiter(numbers, np.int64)))
        alive, owners = self._high_water(rows, roles, group)
        groups = self._buffers(edges, roles, group, rows)
        group_of = {region: g for g in groups for region in g.regions}
        peak_of: Counter[str] = Counter()
        extra_peak = 0
        extra_rows = 0
        for row in alive:
            region = int(self.located.region_of_row[row])
            size = int(self.trace.allocations.size[row])
            role = roles.get(region, "temporary")
            if region in group_of:
                peak_of[group_of[region].id] += size
            if role in ("extra", "temporary"):
                extra_peak += size
                extra_rows += 1
        steps = self._steps(edges, group_of, payload, peak_of)
        steps, best = self._judge(steps, first)
        copied = sum(step.bytes for step in steps if step.kind in COPY_KINDS)
        fetched = sum(step.bytes for step in steps if step.kind == "fetch")
        flushed = sum(step.bytes for step in steps if step.kind == "flush")
        decoded = sum(step.bytes for step in steps if step.kind == "decode")
        avoidable = sum(step.avoidable_bytes for step in steps)
        held = sum(op.payload for op in group if op.root.id in owners) or payload
        unnamed = sum(step.bytes for step in steps if step.kind in COPY_KINDS and not step.layer)
        observed = sum(edge.observed for edge in edges)
        return Path(
            label=label,
            direction=first.direction,
            api=first.api,
            store=first.store,
            codecs=first.codecs,
            operations=len(group),
            chunks=sum(op.chunks for op in group),
            errors=sum(op.errors for op in group),
            payload_bytes=payload,
            copied_bytes=copied,
            copies=_ratio(copied, payload),
            extra_at_peak_bytes=extra_peak,
            extra_at_peak=_ratio(extra_peak, held),
            best_achievable=best,
            avoidable=_ratio(avoidable, payload),
            fetched_bytes=fetched,
            flushed_bytes=flushed,
            read_amplification=_ratio(fetched, payload) if first.direction == "read" else None,
            decode_amplification=_ratio(decoded, payload) if first.direction == "read" and decoded else None,
            unattributed_bytes=unnamed,
            explained=None
            if not self.trace.transfers.recorded
            else 1.0
            if not observed
            else 1 - min(unnamed, observed) / observed,
            buffers=tuple(
                Buffer(g.id, g.role, g.label, g.layer, g.site, g.bytes, peak_of[g.id], g.pieces) for g in groups
            ),
            steps=tuple(steps),
        )

    def _on_path(self, op: Operation, edges: list[Edge]) -> tuple[list[Edge], dict[int, str]]:
        """The edges of an operation that lie on the way of its payload, and the role of each region on it."""
        anchors, results = self._anchors(op)
        ordered = self._ordered_by_hand(op, edges)
        anchors |= {region for edge in ordered for region in (edge.source, edge.destination) if region is not None}
        taken = set(map(id, ordered))
        parent: dict[int, int] = {}

        def find(region: int) -> int:
            while (up := parent.setdefault(region, region)) != region:
                parent[region] = region = parent.setdefault(up, up)
            return region

        for edge in edges:
            if edge.kind in COPY_KINDS and edge.source is not None and edge.destination is not None:
                parent[find(edge.source)] = find(edge.destination)
        reached = {find(region) for region in anchors}
        kept, touched = [], set(anchors)
        for edge in edges:
            ends = [region for region in (edge.source, edge.destination) if region is not None]
            if edge.mover or id(edge) in taken or any(find(region) in reached for region in ends):
                kept.append(edge)
                touched.update(ends)
        roles = {}
        for region in touched:
            inside = any(self.row_operation[row] == op.root.id for row in self.located.regions[region].rows)
            if region in results:
                roles[region] = "result"
            elif inside:
                roles[region] = "extra"
            else:
                roles[region] = "source"
        return kept, roles

    def _ordered_by_hand(self, op: Operation, edges: Iterable[Edge]) -> list[Edge]:
        """What an operation named by hand moved in code that no probe knows (``target[:] = source``), of which nothing
        else tells that it is payload: all but imports and what is less than a hundredth of the payload, taken together.
        """
        families: dict[tuple[str, int, int], list[Edge]] = defaultdict(list)
        for edge in edges:
            span = self.ops.spans.get(edge.span)
            if span is not None and span.by_hand and not edge.mover:
                into = self.located.regions[edge.destination] if edge.destination is not None else None
                stack = into.stack if into is not None and into.rows else 0
                families[edge.kind, edge.caller, stack].append(edge)
        stacks = self.trace.allocations.stacks
        return [
            edge
            for (_, _, stack), family in families.items()
            if sum(edge.nbytes for edge in family) * 100 >= op.payload
            and not (stack and any(imports(frame) for frame in stacks[stack]))
            for edge in family
        ]

    def _anchors(self, op: Operation) -> tuple[set[int], set[int]]:
        """Regions that hold payload because a probe saw it there, and those of them that are the result."""
        anchors: set[int] = set()
        results: set[int] = set()
        stack = [op.root.id]
        while stack:
            number = stack.pop()
            span = self.ops.spans[number]
            stack += span.children
            if span.is_metadata:
                continue
            for sighting in self.located.sightings.get(number, ()):
                if sighting.region is None:
                    continue
                anchors.add(sighting.region)
                if span is not op.root and span.site.kind != "operation":
                    continue
                if sighting.role in (OUTPUT, DESTINATION) and op.direction != "write":
                    results.add(sighting.region)
        return anchors, results

    # --- memory

    def _high_water(
        self, rows: NDArray[np.int64], roles: Mapping[int, str], group: Sequence[Operation]
    ) -> tuple[list[int], set[int]]:
        """Rows alive when the path held most, and the operations that held them or were open then."""
        if not len(rows):
            return [], {op.root.id for op in group}
        blocks = self.trace.allocations
        size = blocks.size[rows].astype(np.int64)
        position = np.concatenate([blocks.born[rows], blocks.died[rows]])
        change = np.concatenate([size, -size])
        order = np.lexsort((change, position))
        at = order[int(np.argmax(np.cumsum(change[order])))]
        moment = int(position[at])
        row = rows[at % len(rows)]
        sequence = int(blocks.enter[row])
        alive = rows[(blocks.born[rows] <= moment) & (blocks.died[rows] > moment)].tolist()
        owners = {op.root.id for op in group if op.root.enter <= sequence < op.root.exit}
        owners |= {
            int(self.row_operation[row]) for row in alive if roles.get(int(self.located.region_of_row[row])) == "extra"
        }
        return alive, owners

    def _buffers(
        self, edges: Sequence[Edge], roles: Mapping[int, str], group: Sequence[Operation], rows: NDArray[np.int64]
    ) -> list[_Group]:
        """The buffers of a path in the order in which bytes first reached or left them, temporaries last."""
        groups: dict[tuple[str, str, str], _Group] = {}

        def add(region: Region, role: str) -> None:
            name = self._name_region(region, group[0].root.id)
            frame = name.frame if name else None
            label = self._label(region, role, name)
            key = (role, label, frame.function if frame else "")
            found = groups.get(key)
            if found is None:
                site = reference(frame, self.versions) if frame else SiteRef("")
                found = groups[key] = _Group(f"b{len(groups) + 1}", role, label, name.layer if name else "", site)
            if region.id not in found.regions:
                found.regions.add(region.id)
                found.bytes += region.nbytes
                found.pieces += 1

        for edge in edges:
            for end in (edge.source, edge.destination):
                if end is not None:
                    add(self.located.regions[end], roles[end])
        temporary: Counter[int] = Counter()
        for row in rows.tolist():
            region = int(self.located.region_of_row[row])
            if region >= 0 and region not in roles:
                temporary[region] = 1
        large = max(1 << 12, sum(op.payload for op in group) // 100)
        for number in temporary:
            if self.located.regions[number].nbytes >= large:
                add(self.located.regions[number], "temporary")
        return list(groups.values())

    def _label(self, region: Region, role: str, name: Name | None) -> str:
        if role in ("source", "result") and not region.rows:
            return role
        stack = self.trace.allocations.stacks[region.stack] if region.rows else ()
        if name is None:
            return stack[0].function if stack else role
        inner = name.frame.function
        beneath = next((frame for frame in name.callers if frame.function != inner), None)
        text = f"{name.primitive} < {inner}" if name.primitive and name.primitive != inner else inner
        return f"{text} < {beneath.function}" if beneath and text == inner else text

    def _name_region(self, region: Region, operation: int) -> Name | None:
        if not region.rows:
            return None
        library = self._library(operation)
        key = (region.stack, library)
        if key not in self.names:
            stack = self.trace.allocations.stacks[region.stack]
            name = by_stack(stack, library)
            if name is None:
                frame = next((frame for frame in stack if is_rust(frame)), None)
                name = Name(library, frame, "", ()) if frame and library else None
            self.names[key] = name
        return self.names[key]

    def _library(self, operation: int) -> str:
        """The native library at work in an operation, for frames of crates that several libraries are built from."""
        if operation not in self.library_of_operation:
            votes: Counter[str] = Counter()
            for edge in self.flow.edges:
                if edge.operation == operation and edge.caller >= 0 and self.callers[edge.caller].layer:
                    votes[self.callers[edge.caller].layer] += edge.nbytes
            if not votes:
                stack = [operation] if operation in self.ops.spans else []
                while stack:
                    span = self.ops.spans[stack.pop()]
                    stack += span.children
                    layer = layer_of_native("", "", f"_{span.site.library}") or layer_of_native(
                        "", "", span.site.library
                    )
                    if layer:
                        votes[layer] += 1
            self.library_of_operation[operation] = votes.most_common(1)[0][0] if votes else ""
        return self.library_of_operation[operation]

    # --- steps

    def _steps(
        self,
        edges: Iterable[Edge],
        group_of: Mapping[int, _Group],
        payload: int,
        peak_of: Mapping[str, int],
    ) -> list[Step]:
        merged: dict[tuple[Any, ...], list[Edge]] = {}
        named: dict[tuple[Any, ...], Name] = {}
        for edge in edges:
            name = self._name_edge(edge)
            source = group_of[edge.source].id if edge.source is not None else None
            destination = group_of[edge.destination].id if edge.destination is not None else None
            key = (
                edge.kind,
                source,
                destination,
                name.layer,
                name.frame.function,
                name.primitive if edge.mover else "",
            )
            merged.setdefault(key, []).append(edge)
            named.setdefault(key, name)
        steps = []
        for key, same in merged.items():
            kind, source, destination, layer, _, _ = key
            name = named[key]
            total = sum(edge.nbytes for edge in same)
            if total < self.trace.min_bytes:
                continue
            pieces = {edge.source for edge in same if edge.source is not None}
            if kind == "copy" and len({edge.destination for edge in same}) * 2 <= len(pieces) and not same[0].mover:
                kind = "join"
            steps.append(
                Step(
                    kind=kind,
                    source=source,
                    destination=destination,
                    layer=layer,
                    project=project_of(layer),
                    site=reference(name.frame, self.versions),
                    primitive=name.primitive,
                    called_from=tuple(reference(frame, self.versions) for frame in name.callers),
                    count=sum(edge.count for edge in same),
                    bytes=total,
                    ratio=_ratio(total, payload),
                    at_peak_bytes=peak_of.get(destination, 0)
                    if destination and self._is_extra(destination, group_of)
                    else 0,
                    held_ms=self._held(same),
                    evidence=_weakest(edge.evidence for edge in same),
                )
            )
        return steps

    @staticmethod
    def _is_extra(identity: str, group_of: Mapping[int, _Group]) -> bool:
        return any(group.id == identity and group.role == "extra" for group in group_of.values())

    def _name_edge(self, edge: Edge) -> Name:
        into = self.located.regions[edge.destination] if edge.destination is not None else None
        out = self.located.regions[edge.source] if edge.source is not None else None
        memory = out if edge.kind == "flush" else into
        if edge.mover:
            return self._name_mover(edge, into)
        caller = self.callers[edge.caller] if edge.caller >= 0 else None
        if caller is not None and caller.layer:
            if crate_of(caller.function) == "" or is_rust(caller):
                frame = caller
            else:
                stack = self.trace.allocations.stacks[memory.stack] if memory and memory.rows else ()
                frame = next((f for f in stack if is_rust(f)), caller)
            return Name(caller.layer, frame, "", self._span_callers(edge.span, edge.operation))
        primitive = caller.function if caller else "realloc"
        span = self.ops.spans.get(edge.span)
        fresh = into is not None and into.rows and edge.kind != "flush" and self._fresh(into, edge)
        if fresh and into is not None:
            name = self._name_region(into, edge.operation)
            if name is not None:
                return name._replace(primitive=name.primitive or primitive)
        if span is not None:
            return self._name_span(span, primitive)
        name = self._name_region(memory, edge.operation) if memory else None
        if name is not None:
            return name
        stack = self.trace.allocations.stacks[memory.stack] if memory and memory.rows else ()
        ordered = next((frame for frame in stack if not frame.native), caller)
        return Name("", ordered or Frame(_UNKNOWN, "", 0), primitive, ())

    def _fresh(self, region: Region, edge: Edge) -> bool:
        """Whether the block was allocated for this very move: by the span that made it, or since the last mark."""
        return region.span == edge.span or edge.kind == "fetch" or (not edge.span and not region.span)

    def _name_mover(self, edge: Edge, into: Region | None) -> Name:
        span = self.ops.spans[edge.span]
        name = self._name_span(span, span.site.primitive)
        if into is None or not into.rows or edge.kind == "scatter":
            return name
        stack = self.trace.allocations.stacks[into.stack]
        if span.attributes.get("caller"):
            return name._replace(callers=_callers_of(name.frame, stack) or name.callers)
        function = span.site.name.rsplit(".", 1)[-1]
        for depth, frame in enumerate(stack):
            if not frame.native and frame.function.rsplit(".", 1)[-1] == function:
                by_frame = by_stack(stack[depth:])
                if by_frame is not None:
                    return by_frame._replace(
                        frame=frame, primitive=name.primitive or (stack[0].function if depth else "")
                    )
        if edge.kind in ("encode", "decode"):
            chain = callers(stack)
            return name._replace(callers=chain or name.callers)
        return name

    def _name_span(self, span: SpanView, primitive: str) -> Name:
        frame = _site_frame(span)
        chain = callers(
            (
                *(_caller_frame(caller) for caller in span.attributes.get("called_from", ())),
                *self._span_callers(span.parent, span.operation),
            )
        )
        if span.by_hand and chain:
            frame, *beneath = chain
            return Name(frame.layer, frame, primitive, tuple(beneath))
        layer = frame.layer
        if span.attributes.get("caller"):
            return Name(layer, frame, span.site.primitive or span.site.name, chain)
        if frame.function in CARRIERS and chain:
            layer = chain[0].layer
        return Name(layer, frame, primitive, chain)

    def _span_callers(self, number: int, operation: int) -> tuple[Frame, ...]:
        frames = []
        span = self.ops.spans.get(number)
        while span is not None:
            frames.append(_site_frame(span))
            frames += [_caller_frame(caller) for caller in span.attributes.get("called_from", ())]
            if span.id == operation:
                break
            span = self.ops.spans.get(span.parent)
        return callers(frames)

    def _held(self, edges: Sequence[Edge]) -> float | None:
        """Milliseconds for which the longest-lived destination was kept, None when it outlived the session or is not
        known.
        """
        blocks = self.trace.allocations
        longest = None
        for edge in edges:
            if edge.destination is None or not self.located.regions[edge.destination].rows:
                return None
            rows = self.located.regions[edge.destination].rows
            if int(blocks.died[rows[-1]]) >= blocks.records or not len(self.clock_sequence):
                return None
            ends = np.interp(
                [int(blocks.enter[rows[0]]), int(blocks.leave[rows[-1]])], self.clock_sequence, self.clock_time
            )
            held = float(ends[1] - ends[0]) / 1e6
            longest = held if longest is None else max(longest, held)
        return None if longest is None else round(longest, 3)

    # --- judgement

    def _judge(self, steps: list[Step], op: Operation) -> tuple[list[Step], int]:
        """Mark what is required and what is avoidable; the copies that the path cannot do without."""
        transforms = [step for step in steps if step.kind in ("encode", "decode")]
        converts = [step for step in steps if step.kind == "convert"]
        compressed = bool(transforms) or any(codec.split("(", 1)[0] not in _RAW_CODECS for codec in op.codecs)
        best = 1 if compressed or converts else 0
        needed = transforms[:1] or converts[:1]
        owned = [s for s in steps if s.kind in COPY_KINDS and op.direction == "write" and op.store in _OWNING_STORES]
        required = owned[-1:]
        judged = []
        for step in steps:
            if step.kind not in COPY_KINDS:
                judged.append(step)
                continue
            keep = any(step is other for other in needed)
            must = any(step is other for other in required)
            judged.append(replace(step, avoidable_bytes=0 if keep or must else step.bytes, required=must))
        return judged, best

    # --- coverage

    def coverage(self, paths: Sequence[Path]) -> Coverage:
        trace = self.trace
        off = [edge for edge in self.flow.edges if id(edge) not in self.used and edge.kind == "copy"]
        small = sum(nbytes for _, _, nbytes in trace.transfers.small)
        moved = [
            (p.explained, sum(s.bytes for s in p.steps if s.kind in COPY_KINDS))
            for p in paths
            if p.explained is not None
        ]
        weight = sum(w for _, w in moved)
        notes = list(trace.notes)
        if not trace.transfers.recorded:
            notes.append(
                f"moves were not recorded ({trace.transfers.reason or 'switched off'}): copies are inferred from probes and allocations"
            )
        if not trace.allocations.recorded:
            notes.append(
                f"allocations were not recorded ({trace.allocations.reason}): nothing is known of memory held at peak"
            )
        if trace.transfers.lost:
            notes.append(f"{trace.transfers.lost} moves were lost because the recorder's segments were full")
        return Coverage(
            memray=trace.allocations.recorded,
            native=trace.native and trace.allocations.recorded,
            transfers=trace.transfers.recorded,
            lost_transfers=trace.transfers.lost,
            probes=trace.probes,
            unattributed_bytes=sum(path.unattributed_bytes for path in paths),
            off_path_bytes=sum(edge.nbytes for edge in off) + small,
            off_path_moves=len(off) + sum(count for _, count, _ in trace.transfers.small),
            explained=(sum(e * w for e, w in moved if e is not None) / weight if weight else 1.0)
            if trace.transfers.recorded
            else None,
            notes=tuple(notes),
        )


def _site_frame(span: SpanView) -> Frame:
    """A span's site as a frame: what was called, or for a primitive the line that called it."""
    if span.attributes.get("caller"):
        return _caller_frame([span.attributes[name] for name in ("caller", "file", "line", "layer")])
    return Frame(span.site.name, "", 0, layer=layer_of_module(span.site.name))


def _callers_of(frame: Frame, stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """Who called the function of ``frame``, by the stack of what was allocated in it."""
    function = frame.function.rsplit(".", 1)[-1]
    for depth, below in enumerate(stack):
        if not below.native and below.function.rsplit(".", 1)[-1] == function:
            return callers(stack[depth + 1 :])
    return ()


def _caller_frame(caller: Sequence[Any]) -> Frame:
    function, file, line, layer = caller
    return Frame(str(function), str(file), int(line), layer=str(layer))


def _clock(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sequence = np.concatenate([trace.spans["enter"], trace.spans["exit"]]).astype(np.float64)
    moment = np.concatenate([trace.spans["started"], trace.spans["ended"]]).astype(np.float64)
    order = np.argsort(sequence)
    return sequence[order], moment[order]


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


_STRENGTH = {name: rank for rank, name in enumerate(("transfer", "pointer", "stack", "call", "native", "inferred"))}


def _weakest(evidences: Iterable[str]) -> str:
    return max(evidences, key=_STRENGTH.__getitem__)


def _layer_totals(paths: Sequence[Path]) -> tuple[LayerTotal, ...]:
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        for step in path.steps:
            if step.kind in IO_KINDS:
                continue
            entry = totals.setdefault(
                (step.layer or _UNKNOWN, step.project), {"copies": Counter(), "bytes": 0, "count": 0}
            )
            entry["copies"][path.label] += step.ratio or 0.0
            entry["bytes"] += step.bytes
            entry["count"] += step.count
    ordered = sorted(totals.items(), key=lambda item: -item[1]["bytes"])
    return tuple(
        LayerTotal(layer, project, dict(t["copies"]), t["bytes"], t["count"]) for (layer, project), t in ordered
    )
