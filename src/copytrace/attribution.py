"""Spans x allocations x transfers -> the flow graph of each path and who is answerable for each of its edges. Pure: no
I/O.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace import flow, inference, lookup, operations, tasks, transforms
from copytrace.carried import Carried
from copytrace.collecting import no_collection
from copytrace.environment import released
from copytrace.memory import Memory
from copytrace.model import COPY_KINDS, DESTINATION, IO_KINDS, OUTPUT, Coverage, LayerTotal, ReportData
from copytrace.naming import UNKNOWN, Namer
from copytrace.paths import ARENA, PathSums, Stretch
from copytrace.remedies import remedy
from copytrace.tree import is_by_hand

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from copytrace.flow import Edge
    from copytrace.model import Path, SiteInfo, Task, Trace
    from copytrace.operations import Operation
    from copytrace.tree import SpanView


def attribute(trace: Trace, continued: Iterable[Trace] = ()) -> ReportData:
    """The report of a trace and the stretches that continue it, in order; of these there is one at a time."""
    work = _Attribution(trace)
    for stretch in chain((trace,), continued):
        with no_collection():
            work.take(stretch)
    return work.report()


def _is_certain(site: SiteInfo) -> bool:
    """Whether what a site handles is payload for certain: a primitive may be at work on anything."""
    return site.library != "python"


def _with_remedies(path: Path, packages: Mapping[str, str]) -> Path:
    known = ((step, remedy(step, path, packages)) for step in path.steps)
    steps = tuple(replace(step, remedy=of.text, remedy_url=of.url) if of else step for step, of in known)
    return replace(path, steps=steps)


class _Attribution:
    """What is known of a trace so far, and of the stretch that is at hand."""

    trace: Trace
    ops: operations.Operations
    by_hand: set[int]
    located: lookup.Located
    flow: flow.Flow
    memory: Memory

    def __init__(self, first: Trace) -> None:
        self.first = first
        self.versions = released(first.environment)
        self.carried = Carried()
        self.paths: dict[str, PathSums] = {}
        self.tasks: list[Task] = []
        self.notes: dict[str, None] = {}
        self.spans = self.records = self.lost = self.off_bytes = self.off_moves = 0
        self.pools: Counter[str] = Counter()
        self.unrecorded: dict[str, str] = {}
        """Why moves or allocations of some stretch were not recorded."""

    def take(self, trace: Trace) -> None:
        """Add the next stretch."""
        self.trace = trace = self.carried.restored(trace)
        self.ops = operations.group(trace)
        self.by_hand = set(self.ops.spans.ids[self.ops.spans.placed(is_by_hand)].tolist())
        self.located = lookup.locate(trace, self.carried)
        self.flow = flow.build(trace, self.ops, self.located)
        if not trace.transfers.recorded:
            inference.complete(trace, self.ops, self.located, self.flow)
        transforms.complete(self.ops, self.located, self.flow, trace.transfers.callers)
        self.memory = Memory(trace, self.ops, self.located, self.flow, self.carried)
        namer = Namer(trace, self.ops, self.located, self.flow.edges)
        stretch = Stretch(trace, self.located, self.memory, namer, self.versions, self.carried.since, {})
        copied, used = self._add_to_paths(stretch)
        self.tasks += tasks.tell(trace, self.ops, copied)
        self._add_to_coverage(stretch, used)
        self.carried.since = max(self.carried.since, trace.allocations.records)
        del self.trace, self.ops, self.by_hand, self.located, self.flow, self.memory

    def _add_to_paths(self, stretch: Stretch) -> tuple[dict[int, int], set[int]]:
        """The bytes that each operation copied, by its span, and the identities of the edges on paths."""
        members: dict[str, list[Operation]] = defaultdict(list)
        for op in self.ops.by_root.values():
            members[op.label].append(op)
        edges_of: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.flow.edges:
            if edge.operation:
                edges_of[edge.operation].append(edge)
        anchors, results = self._anchors()
        holders = set(self.memory.owners)
        for sums in self.paths.values():
            sums.begin(stretch, holders)
        copied: dict[int, int] = {}
        used: set[int] = set()
        for label, group in members.items():
            sums = self.paths.setdefault(label, PathSums(group[0]))
            roles: dict[int, dict[int, str]] = {}
            edges: list[Edge] = []
            for op in group:
                number = op.root.id
                of_op = edges_of[number], anchors.get(number, set()), results.get(number, set())
                kept, roles[number] = self._on_path(op, *of_op)
                copied[number] = sum(edge.nbytes for edge in kept if edge.kind in COPY_KINDS)
                edges += kept
            edges.sort(key=attrgetter("sequence"))
            used.update(map(id, edges))
            sums.add(stretch, group, edges, roles)
        return copied, used

    def report(self) -> ReportData:
        """The report of what was taken."""
        first = self.first
        moves = "moves" not in self.unrecorded
        found = (sums.path(first.min_bytes, self.versions, transfers=moves) for sums in self.paths.values())
        paths = tuple(_with_remedies(path, first.environment.get("packages", {})) for path in found)
        return ReportData(
            environment=first.environment,
            coverage=self._coverage(paths),
            paths=paths,
            layers=layer_totals(paths),
            label=first.label,
            spans=self.spans,
            records=self.records,
            tasks=tasks.numbered(self.tasks),
        )

    # --- what is on a path

    def _on_path(
        self, op: Operation, edges: list[Edge], anchors: set[int], results: set[int]
    ) -> tuple[list[Edge], dict[int, str]]:
        """The edges of an operation that lie on the way of its payload, and the role of each region on it. ``anchors``
        hold payload for certain; ``results`` are those of them that it gave out or filled.
        """
        imported = self.memory.imported  # what is in those is never payload
        edges = [edge for edge in edges if edge.destination not in imported]
        ordered = self._ordered_by_hand(op, edges)
        ends = (end for edge in ordered for end in (edge.source, edge.destination) if end is not None)
        anchors = anchors.union(ends)
        taken = set(map(id, ordered))
        reached = _reached(anchors, edges)
        kept, touched = [], set(anchors)
        for edge in edges:
            told = edge.held or edge.source in reached or edge.destination in reached or id(edge) in taken
            if told or (edge.mover and self._tells(self.ops.spans[edge.span], op)):
                kept.append(edge)
                touched.update(end for end in (edge.source, edge.destination) if end is not None)
        roles = dict.fromkeys(touched, "source")
        roles |= dict.fromkeys(self.memory.allocated_in(op.root.id, touched), "extra")
        if op.direction != "write":
            roles |= dict.fromkeys(results, "result")
        return kept, roles

    def _ordered_by_hand(self, op: Operation, edges: Iterable[Edge]) -> list[Edge]:
        """What an operation named by hand moved in code that no probe knows (``target[:] = source``), of which nothing
        else tells that it is payload: all but what is less than a hundredth of the payload, taken together.
        """
        families: dict[tuple[str, int, int], list[Edge]] = defaultdict(list)
        for edge in edges:
            if edge.span in self.by_hand and not edge.mover:
                into = self.located.regions[edge.destination] if edge.destination is not None else None
                stack = into.stack if into is not None and into.rows else 0
                families[edge.kind, edge.caller, stack].append(edge)
        return [
            edge
            for family in families.values()
            if sum(edge.nbytes for edge in family) * 100 >= op.payload
            for edge in family
        ]

    @staticmethod
    def _tells(span: SpanView, op: Operation) -> bool:
        """Whether what a span of an operation handles is payload for certain."""
        return _is_certain(span.site) or is_by_hand(op.root.site)

    def _anchors(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """By operation: regions that hold payload because a probe saw it there, and those of them that it gave out or
        filled.
        """
        spans, seen = self.ops.spans, self.located.sightings
        by_hand = spans.placed(is_by_hand)[spans.rows_of(spans.operation)]
        tells = (spans.placed(_is_certain) | by_hand) & ~spans.is_metadata
        tells &= spans.operation > 0
        gives = tells & ((spans.operation == spans.ids) | spans.of_kind({"operation"}))
        row = spans.rows_of(seen.span)
        known = np.flatnonzero((row >= 0) & (seen.region >= 0))
        told = known[tells[row[known]]]
        told = told[~np.isin(seen.region[told], list(self.memory.imported))]
        given = told[gives[row[told]] & np.isin(seen.role[told], (OUTPUT, DESTINATION))]
        return (
            _by_operation(spans.operation[row[told]], seen.region[told]),
            _by_operation(spans.operation[row[given]], seen.region[given]),
        )

    # --- coverage

    def _add_to_coverage(self, stretch: Stretch, used: set[int]) -> None:
        trace = stretch.trace
        off = [edge for edge in self.flow.edges if id(edge) not in used and edge.kind == "copy"]
        small = trace.transfers.small
        self.off_bytes += sum(edge.nbytes for edge in off) + sum(nbytes for _, _, nbytes in small)
        self.off_moves += len(off) + sum(count for _, count, _ in small)
        self.notes |= dict.fromkeys(trace.notes)
        self.spans += len(trace.spans)
        self.records = max(self.records, trace.allocations.records)
        self.lost = max(self.lost, trace.transfers.lost)
        for what, table in (("moves", trace.transfers), ("allocations", trace.allocations)):
            if not table.recorded:
                self.unrecorded.setdefault(what, table.reason)
        for row in self.memory.pools:
            name = stretch.namer.region(self.located.regions[self.memory.regions_of[row]], 0)
            self.pools[name.layer if name else UNKNOWN] += int(trace.allocations.size[row])

    def _coverage(self, paths: Sequence[Path]) -> Coverage:
        first, why = self.first, self.unrecorded
        moved = [
            (path.explained, sum(step.bytes for step in path.steps if step.kind in COPY_KINDS))
            for path in paths
            if path.explained is not None
        ]
        weight = sum(w for _, w in moved)
        notes = list(self.notes)
        if "moves" in why:
            reason = why["moves"] or "switched off"
            notes.append(f"moves were not recorded ({reason}): copies are inferred from probes and allocations")
        if "allocations" in why:
            reason = why["allocations"]
            notes.append(f"allocations were not recorded ({reason}): nothing is known of memory held at peak")
        notes += [
            f"{layer} took {nbytes / 1e6:,.1f} MB by mmap as a pool: what it holds there at peak is not known"
            for layer, nbytes in self.pools.items()
            if nbytes >= ARENA
        ]
        if self.lost:
            notes.append(f"{self.lost} moves were lost: the files that they are kept in could not grow")
        return Coverage(
            memray="allocations" not in why,
            native=first.native and "allocations" not in why,
            transfers="moves" not in why,
            lost_transfers=self.lost,
            probes=first.probes,
            unattributed_bytes=sum(path.unattributed_bytes for path in paths),
            off_path_bytes=self.off_bytes,
            off_path_moves=self.off_moves,
            explained=(sum(e * w for e, w in moved if e is not None) / weight if weight else 1.0)
            if "moves" not in why
            else None,
            notes=tuple(notes),
        )


def _reached(anchors: set[int], edges: Iterable[Edge]) -> set[int]:
    """The regions that copies lead to from ``anchors``, or from which they lead there."""
    near: dict[int, list[int]] = defaultdict(list)
    for edge in edges:
        source, destination = edge.source, edge.destination
        if edge.kind not in COPY_KINDS or source is None or destination is None:
            continue
        if source not in anchors or destination not in anchors:
            near[source].append(destination)
            near[destination].append(source)
    reached = set(anchors)
    waiting = [region for region in near if region in anchors]
    while waiting:
        fresh = [region for region in near[waiting.pop()] if region not in reached]
        reached.update(fresh)
        waiting += fresh
    return reached


def _by_operation(operation: NDArray[np.int64], region: NDArray[np.int64]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    order = np.argsort(operation, kind="stable")
    operations, first = np.unique(operation[order], return_index=True)
    for number, regions in zip(operations.tolist(), np.split(region[order], first[1:]), strict=False):
        found[number] = set(regions.tolist())
    return found


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
