"""Spans x allocations x transfers -> the flow graph of each path and who is answerable for each of its edges. Pure: no
I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace import flow, inference, lookup, operations, tasks, transforms
from copytrace.answerable import answered_for
from copytrace.collecting import no_collection
from copytrace.environment import released
from copytrace.layers import project_of
from copytrace.memory import Memory
from copytrace.model import (
    COPY_KINDS,
    DESTINATION,
    IO_KINDS,
    OUTPUT,
    Buffer,
    Coverage,
    LayerTotal,
    Path,
    ReportData,
    SiteRef,
    Step,
)
from copytrace.naming import UNKNOWN, Name, Namer, reference
from copytrace.remedies import remedy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from copytrace.flow import Edge
    from copytrace.lookup import Region
    from copytrace.model import Trace
    from copytrace.operations import Operation, SpanView

CHANGES = frozenset({"encode", "decode", "convert"})
LEAST_CHANGE = 0.02
"""An encode, decode or conversion of less of the payload is one of an index, unless a codec compresses.
It is not called avoidable: the format asks for it.
"""

_ARENA = 1 << 20
"""Bytes of an arena of CPython's allocator for small objects."""


def attribute(trace: Trace) -> ReportData:
    """The report of a trace."""
    with no_collection():
        return _attribute(trace)


def _attribute(trace: Trace) -> ReportData:
    ops = operations.group(trace)
    located = lookup.locate(trace)
    moved = flow.build(trace, ops, located)
    if not trace.transfers.recorded:
        inference.complete(trace, ops, located, moved)
    transforms.complete(ops, located, moved, trace.transfers.callers)
    work = _Attribution(trace, ops, located, moved)
    paths = [_with_remedies(path, trace.environment.get("packages", {})) for path in work.paths()]
    return ReportData(
        environment=trace.environment,
        coverage=work.coverage(paths),
        paths=tuple(paths),
        layers=layer_totals(paths),
        label=trace.label,
        spans=len(trace.spans),
        records=trace.allocations.records,
        tasks=tasks.numbered(tasks.tell(trace, ops, work.copied)),
    )


def _with_remedies(path: Path, packages: Mapping[str, str]) -> Path:
    known = ((step, remedy(step, path, packages)) for step in path.steps)
    steps = tuple(replace(step, remedy=of.text, remedy_url=of.url) if of else step for step, of in known)
    return replace(path, steps=steps)


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


def _first_change(steps: Sequence[Step]) -> list[Step]:
    """The first of ``steps`` that changes the payload, and those in which its function does the same to other parts of
    it; the checksum of a shard's index does not come first.
    """
    large = [step for step in steps if step.ratio is None or step.ratio >= LEAST_CHANGE]
    first = large[0] if large else max(steps, key=lambda step: step.bytes, default=None)
    if first is None:
        return []
    made = first.kind, first.layer, first.site.function
    return [step for step in steps if (step.kind, step.layer, step.site.function) == made]


class _Attribution:
    def __init__(self, trace: Trace, ops: operations.Operations, located: lookup.Located, moved: flow.Flow) -> None:
        self.trace = trace
        self.ops = ops
        self.located = located
        self.flow = moved
        self.versions = released(trace.environment)
        self.namer = Namer(trace, ops, located, moved.edges)
        self.memory = Memory(trace, ops, located, moved)
        self.used: set[int] = set()
        self.copied: dict[int, int] = {}
        """Bytes that each operation copied, by its span."""

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
            self.copied[op.root.id] = sum(edge.nbytes for edge in kept if edge.kind in COPY_KINDS)
            edges += kept
            roles |= of_op
        edges.sort(key=lambda edge: edge.sequence)
        self.used.update(map(id, edges))
        rows = self.memory.rows_of(group)
        alive, set_up, owners = self.memory.high_water(rows, roles, group)
        alive += self._known_for(set_up, first.root.id)
        groups = self._buffers(edges, roles, group, np.union1d(rows, np.array(alive, np.int64)), alive)
        group_of = {region: g for g in groups for region in g.regions}
        peak_of: Counter[str | None] = Counter()
        extra_peak = 0
        for row in alive:
            region = self.memory.region_of(row)
            size = int(self.trace.allocations.size[row])
            role = roles.get(region, "temporary")
            if region in group_of:
                peak_of[group_of[region].id] += size
            if role in ("extra", "temporary"):
                extra_peak += size
        steps = answered_for(self._steps(edges, group_of, payload, peak_of))
        filled = {step.destination: step for step in reversed(steps) if step.destination and step.layer}
        for g in groups:
            if g.role == "extra" and not g.layer and g.id in filled:
                g.layer, g.site = filled[g.id].layer, g.site if g.site.function else filled[g.id].site
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
            copies=ratio(copied, payload),
            extra_at_peak_bytes=extra_peak,
            extra_at_peak=ratio(extra_peak, held),
            best_achievable=best,
            avoidable=ratio(avoidable, payload),
            fetched_bytes=fetched,
            flushed_bytes=flushed,
            read_amplification=ratio(fetched, payload) if first.direction == "read" else None,
            decode_amplification=ratio(decoded, payload) if first.direction == "read" and decoded else None,
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
            timeline=self.memory.timeline(group, roles, self._layer_of),
        )

    def _known_for(self, rows: Sequence[int], operation: int) -> list[int]:
        """Those of ``rows`` that functions which can be named hold more of than an arena: the interpreter takes arenas
        for whoever comes along.
        """
        held: Counter[str] = Counter()
        named: dict[int, str] = {}
        for row in rows:
            region = self.memory.region_of(row)
            name = self.namer.region(self.located.regions[region], operation) if region >= 0 else None
            if name is not None:
                named[row] = name.frame.function
                held[named[row]] += int(self.trace.allocations.size[row])
        return [row for row, function in named.items() if held[function] > _ARENA]

    def _layer_of(self, region: int, operation: int) -> str:
        name = self.namer.region(self.located.regions[region], operation) if region >= 0 else None
        return name.layer if name else UNKNOWN

    def _on_path(self, op: Operation, edges: list[Edge]) -> tuple[list[Edge], dict[int, str]]:
        """The edges of an operation that lie on the way of its payload, and the role of each region on it."""
        edges = [edge for edge in edges if not self._by_import(edge.destination)]
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
            told = edge.mover and self._tells(self.ops.spans[edge.span], op)
            if told or edge.held or id(edge) in taken or any(find(region) in reached for region in ends):
                kept.append(edge)
                touched.update(ends)
        roles = {}
        for region in touched:
            inside = any(self.memory.owners[row] == op.root.id for row in self.located.regions[region].rows)
            if region in results:
                roles[region] = "result"
            elif inside:
                roles[region] = "extra"
            else:
                roles[region] = "source"
        return kept, roles

    def _ordered_by_hand(self, op: Operation, edges: Iterable[Edge]) -> list[Edge]:
        """What an operation named by hand moved in code that no probe knows (``target[:] = source``), of which nothing
        else tells that it is payload: all but what is less than a hundredth of the payload, taken together.
        """
        families: dict[tuple[str, int, int], list[Edge]] = defaultdict(list)
        for edge in edges:
            span = self.ops.spans.get(edge.span)
            if span is not None and span.by_hand and not edge.mover:
                into = self.located.regions[edge.destination] if edge.destination is not None else None
                stack = into.stack if into is not None and into.rows else 0
                families[edge.kind, edge.caller, stack].append(edge)
        return [
            edge
            for family in families.values()
            if sum(edge.nbytes for edge in family) * 100 >= op.payload
            for edge in family
        ]

    def _by_import(self, region: int | None) -> bool:
        """Whether a region was allocated by an import: what is in it is never payload."""
        return region is not None and self.memory.is_imported(self.located.regions[region])

    @staticmethod
    def _tells(span: SpanView, op: Operation) -> bool:
        """Whether what a span handles is payload for certain: a primitive may be at work on anything."""
        return span.site.library != "python" or op.root.by_hand

    def _anchors(self, op: Operation) -> tuple[set[int], set[int]]:
        """Regions that hold payload because a probe saw it there, and those of them that are the result."""
        anchors: set[int] = set()
        results: set[int] = set()
        stack = [op.root.id]
        while stack:
            number = stack.pop()
            span = self.ops.spans[number]
            stack += span.children
            if span.is_metadata or not self._tells(span, op):
                continue
            for sighting in self.located.sightings.get(number, ()):
                if sighting.region is None or self._by_import(sighting.region):
                    continue
                anchors.add(sighting.region)
                if span is not op.root and span.site.kind != "operation":
                    continue
                if sighting.role in (OUTPUT, DESTINATION) and op.direction != "write":
                    results.add(sighting.region)
        return anchors, results

    # --- buffers and steps

    def _buffers(
        self,
        edges: Sequence[Edge],
        roles: Mapping[int, str],
        group: Sequence[Operation],
        rows: NDArray[np.int64],
        alive: Sequence[int],
    ) -> list[_Group]:
        """The buffers of a path in the order in which bytes first reached or left them, temporaries last: those that
        are large, or of which one function holds as much together at the peak.
        """
        groups: dict[tuple[str, str, str], _Group] = {}
        added: set[int] = set()

        def add(region: Region, role: str) -> None:
            if region.id in added:
                return
            added.add(region.id)
            name = self.namer.region(region, group[0].root.id)
            frame = name.frame if name else None
            label = self._label(region, role, name)
            key = (role, label, frame.function if frame else "")
            found = groups.get(key)
            if found is None:
                site = reference(frame, self.versions) if frame else SiteRef("")
                found = groups[key] = _Group(f"b{len(groups) + 1}", role, label, name.layer if name else "", site)
            found.regions.add(region.id)
            found.bytes += region.nbytes
            found.pieces += 1

        for edge in edges:
            for end in (edge.source, edge.destination):
                if end is not None:
                    add(self.located.regions[end], roles[end])
        large = max(1 << 12, sum(op.payload for op in group) // 100)
        together: Counter[str] = Counter()
        temporary: dict[int, str] = {}
        for row in rows.tolist():
            region = self.memory.region_of(row)
            if region >= 0 and region not in roles and region not in temporary:
                name = self.namer.region(self.located.regions[region], group[0].root.id)
                temporary[region] = name.frame.function if name else ""
        for row in alive:
            together[temporary.get(self.memory.region_of(row), "")] += int(self.trace.allocations.size[row])
        for number, function in temporary.items():
            if self.located.regions[number].nbytes >= large or (function and together[function] >= large):
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

    # --- steps

    def _steps(
        self,
        edges: Iterable[Edge],
        group_of: Mapping[int, _Group],
        payload: int,
        peak_of: Counter[str | None],
    ) -> list[Step]:
        merged: dict[tuple[str, str | None, str | None, int], list[Edge]] = {}
        named: dict[tuple[str, str | None, str | None, int], Name] = {}
        known: dict[tuple[str, str, str], int] = {}
        for edge in edges:
            name = self.namer.edge(edge)
            called = known.setdefault(
                (name.layer, name.frame.function, name.primitive if edge.mover else ""), len(known)
            )
            source = group_of[edge.source].id if edge.source is not None else None
            destination = group_of[edge.destination].id if edge.destination is not None else None
            key = (edge.kind, source, destination, called)
            merged.setdefault(key, []).append(edge)
            named.setdefault(key, name)
        extra = {group.id for group in group_of.values() if group.role == "extra"}
        steps = []
        for key, same in merged.items():
            kind, source, destination, _ = key
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
                    layer=name.layer,
                    project=project_of(name.layer),
                    site=reference(name.frame, self.versions),
                    primitive=name.primitive,
                    called_from=tuple(reference(frame, self.versions) for frame in name.callers),
                    count=sum(edge.count for edge in same),
                    bytes=total,
                    ratio=ratio(total, payload),
                    at_peak_bytes=peak_of[destination] if destination in extra else 0,
                    held_ms=self.memory.held_ms([edge.destination for edge in same if edge.destination is not None]),
                    evidence=weakest(edge.evidence for edge in same),
                )
            )
        return steps

    # --- judgement

    def _judge(self, steps: list[Step], op: Operation) -> tuple[list[Step], int]:
        """Mark what is required and what is avoidable; the copies that the path cannot do without."""
        compresses = operations.compresses(op.codecs)
        changes = [step for step in steps if step.kind in CHANGES]
        if not compresses:
            changes = [step for step in changes if step.ratio is None or step.ratio >= LEAST_CHANGE]
        transforms = [step for step in changes if step.kind != "convert"]
        best = 1 if compresses or changes else 0
        needed = _first_change(transforms) or _first_change(changes)
        last = [step for step in steps if step.kind in COPY_KINDS and op.direction == "write"][-1:]
        required = [step for step in last if _is_owned(step, op.store)]
        judged = []
        for step in steps:
            if step.kind not in COPY_KINDS:
                judged.append(step)
                continue
            small = step.kind in CHANGES and step.ratio is not None and step.ratio < LEAST_CHANGE
            keep = small or any(step is other for other in needed)
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
            reason = trace.transfers.reason or "switched off"
            notes.append(f"moves were not recorded ({reason}): copies are inferred from probes and allocations")
        if not trace.allocations.recorded:
            notes.append(
                f"allocations were not recorded ({trace.allocations.reason}): nothing is known of memory held at peak"
            )
        notes += self._about_pools()
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

    def _about_pools(self) -> list[str]:
        taken: Counter[str] = Counter()
        for row in self.memory.pools:
            region = self.memory.region_of(row)
            name = self.namer.region(self.located.regions[region], 0) if region >= 0 else None
            taken[name.layer if name else UNKNOWN] += int(self.trace.allocations.size[row])
        return [
            f"{layer} took {nbytes / 1e6:,.1f} MB by mmap as a pool: what it holds there at peak is not known"
            for layer, nbytes in taken.items()
            if nbytes >= _ARENA
        ]


def _is_owned(last: Step, store: str) -> bool:
    """Whether a write's last copy made the bytes that its store keeps in memory."""
    by = (last.site, *last.called_from[:1])
    return operations.keeps_in_memory(store) or any(operations.keeps_in_memory("", site.function) for site in by)


def ratio(part: int, whole: int) -> float | None:
    """``part`` over ``whole`` to six decimals, None when there is no whole."""
    return round(part / whole, 6) if whole else None


_STRENGTH = {name: rank for rank, name in enumerate(("transfer", "pointer", "stack", "call", "native", "inferred"))}


def weakest(evidences: Iterable[str]) -> str:
    """The evidence that what rests on all of them has."""
    return max(evidences, key=_STRENGTH.__getitem__)


def layer_totals(paths: Sequence[Path]) -> tuple[LayerTotal, ...]:
    """What each layer copied on all paths, those that copied most first."""
    totals: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        for step in path.steps:
            if step.kind in IO_KINDS:
                continue
            entry = totals.setdefault(
                (step.layer or UNKNOWN, step.project), {"copies": Counter(), "bytes": 0, "count": 0}
            )
            entry["copies"][path.label] += step.ratio or 0.0
            entry["bytes"] += step.bytes
            entry["count"] += step.count
    ordered = sorted(totals.items(), key=lambda item: -item[1]["bytes"])
    return tuple(
        LayerTotal(layer, project, dict(t["copies"]), t["bytes"], t["count"]) for (layer, project), t in ordered
    )
