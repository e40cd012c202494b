"""What is known of each path so far, summed up stretch by stretch, and the path of the report that it makes.

Edges with the same ends, kind and name are one step, regions of one site are one buffer. Of what was summed up nothing
is kept but what lives on: a region that a later stretch meets again is counted once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from copytrace import operations
from copytrace.answerable import answered_for
from copytrace.layers import project_of
from copytrace.model import COPY_KINDS, Buffer, Path, SiteRef, Step, Timeline
from copytrace.naming import UNKNOWN, Name, reference

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from copytrace.flow import Edge
    from copytrace.lookup import Located
    from copytrace.memory import Memory
    from copytrace.model import Trace
    from copytrace.naming import Namer
    from copytrace.operations import Operation
    from copytrace.regions import Region

CHANGES = frozenset({"encode", "decode", "convert"})
LEAST_CHANGE = 0.02
"""An encode, decode or conversion of less of the payload is one of an index, unless a codec compresses.
It is not called avoidable: the format asks for it.
"""
ARENA = 1 << 20
"""Bytes of an arena of CPython's allocator for small objects."""


class Stretch(NamedTuple):
    """A stretch of a trace, and what was found out of it."""

    trace: Trace
    located: Located
    memory: Memory
    namer: Namer
    versions: Mapping[str, str]
    since: int
    """Blocks born before this place were in an earlier stretch."""
    described: dict[tuple[int, str, int], tuple[_Key, str, SiteRef]]
    """Of regions that were described: their stack (-1 for none), role, and operation."""


class _Key(NamedTuple):
    """What regions have in common that are one buffer."""

    role: str
    label: str
    function: str


@dataclass(slots=True)
class _Group:
    """Regions of one site on a path, as one buffer of the report; ``id`` is empty as long as it is in none."""

    id: str
    key: _Key
    layer: str
    site: SiteRef
    bytes: int = 0
    pieces: int = 0


@dataclass(slots=True)
class _Temporaries:
    """Temporaries of one site: of each size how many there were and the place of the first among all of the path. What
    one operation allocates and reallocates in its place is one.
    """

    group: _Group
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, nbytes: int, place: int, more: int = 1) -> None:
        count, first = self.sizes.get(nbytes, (0, place))
        self.sizes[nbytes] = count + more, first


@dataclass(slots=True)
class _Distinct:
    """How many regions there were, and which of them live on."""

    count: int = 0
    living: set[int] = field(default_factory=set)

    def add(self, regions: set[int]) -> None:
        self.count += len(regions - self.living)
        self.living |= regions


@dataclass(slots=True)
class _Sums:
    """Edges that are one step."""

    kind: str
    source: _Group | None
    destination: _Group | None
    name: Name
    mover: bool
    evidence: str
    count: int = 0
    bytes: int = 0
    sources: _Distinct = field(default_factory=_Distinct)
    destinations: _Distinct = field(default_factory=_Distinct)
    longest: float | None = 0.0
    """Nanoseconds for which a destination lived at most, None when one is not known."""
    living: dict[int, float] = field(default_factory=dict)
    """Destinations that live on, and since when."""

    def lived(self, lives: tuple[float, dict[int, float]] | None) -> None:
        if lives is None or self.longest is None:
            self.longest, self.living = None, {}
            return
        longest, living = lives
        self.longest = max(self.longest, longest)
        self.living = living | self.living


@dataclass(slots=True)
class _Peak:
    """When most was held: ``total`` bytes, ``extra`` of them in extra buffers and temporaries, by operations of
    ``payload`` bytes.
    """

    total: int
    extra: int = 0
    payload: int = 0
    of: Counter[_Key] = field(default_factory=Counter)
    temporary: Counter[tuple[_Key, int]] = field(default_factory=Counter)
    """By site and size of the region."""
    together: Counter[str] = field(default_factory=Counter)
    """Temporaries by function."""
    set_up: dict[_Key, _Temporaries] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """A region that is on the way of a payload: its role in the operation that allocated it, where it is on the way
    in that, and the group that it is in for each of its roles.
    """

    role: str = "source"
    groups: dict[str, _Group] = field(default_factory=dict)


type Roles = Mapping[int, Mapping[int, str]]
"""The role of each region on the way of an operation's payload, by operation."""


type _Step = tuple[str, _Key | None, _Key | None, tuple[str, str, str]]
"""What edges have in common that are one step: kind, ends, and layer, function and primitive."""


class PathSums:
    """The sums of one path; ``first`` is its first operation."""

    def __init__(self, first: Operation) -> None:
        self.first = first
        self.operations = self.chunks = self.errors = self.payload = self.observed = 0
        self.groups: dict[_Key, _Group] = {}
        self.temporaries: dict[_Key, _Temporaries] = {}
        self.placed = 0
        """How many temporaries there are."""
        self.steps: dict[_Step, _Sums] = {}
        self.known: dict[int, _Known] = {}
        """Regions that live on, by their keys."""
        self.holders: dict[int, int] = {}
        """Payload of the operations whose memory lives on."""
        self.sites = {first.store}
        self.peak: _Peak | None = None
        self.timeline: Timeline | None = None

    # --- summing up

    def begin(self, stretch: Stretch, holders: set[int]) -> None:
        """Forget what has ended before a stretch. ``holders`` are the operations that hold memory in it."""
        here = stretch.located.earlier
        self.known = {key: known for key, known in self.known.items() if key in here}
        self.holders = {op: payload for op, payload in self.holders.items() if op in holders}
        for sums in self.steps.values():
            sums.sources.living &= here.keys()
            sums.destinations.living &= here.keys()
            for key, end in stretch.memory.ends(sums.living).items():
                since = sums.living.pop(key)
                sums.longest = None if sums.longest is None else max(sums.longest, end - since)

    def add(self, stretch: Stretch, group: Sequence[Operation], edges: Sequence[Edge], roles: Roles) -> None:
        """Add the operations of a stretch and their edges in order."""
        self.operations += len(group)
        self.chunks += sum(op.chunks for op in group)
        self.errors += sum(op.errors for op in group)
        self.payload += sum(op.payload for op in group)
        self.observed += sum(edge.observed for edge in edges)
        self.holders |= {op.root.id: op.payload for op in group}
        operation = group[0].root.id
        self._add_steps(stretch, edges, self._place(stretch, edges, roles, operation))
        rows = stretch.memory.rows_of(self.holders)
        self._add_temporaries(stretch, rows[stretch.trace.allocations.born[rows] >= stretch.since], operation)
        if len(rows):
            self._rise(stretch, rows, group)
        largest = max(group, key=lambda op: op.payload)
        if self.timeline is None or largest.payload > self.timeline.payload_bytes:
            self.timeline = stretch.memory.timeline(
                largest, roles[largest.root.id], lambda region, op: _layer_of(stretch, region, op)
            )

    def _place(
        self, stretch: Stretch, edges: Iterable[Edge], roles: Roles, operation: int
    ) -> list[tuple[_Group | None, _Group | None]]:
        """Put each region that is an end of an edge into a group, in the order in which bytes first reached or left
        it. Returns the groups of each edge's source and destination.
        """
        regions, known_of = stretch.located.regions, self.known
        places: dict[tuple[int, str], _Group] = {}

        def placed(end: int, role: str) -> _Group:
            region = regions[end]
            known = known_of.get(region.key)
            if known is None:
                known = known_of[region.key] = _Known()
            if role not in known.groups:
                key, layer, site = _described(stretch, region, role, operation)
                group = self.groups.get(key)
                if group is None:
                    group = self.groups[key] = _Group(f"b{len(self.groups) + 1}", key, layer, site)
                group.bytes += region.nbytes
                group.pieces += 1
                known.groups[role] = group
            return places.setdefault((end, role), known.groups[role])

        found: list[tuple[_Group | None, _Group | None]] = []
        for edge in edges:
            of_op = roles[edge.operation]
            groups = [
                None if end is None else places.get((end, of_op[end])) or placed(end, of_op[end])
                for end in (edge.source, edge.destination)
            ]
            found.append((groups[0], groups[1]))
        for op, of_op in roles.items():
            inside = stretch.memory.allocated_in(op, set(of_op))
            for number, role in of_op.items():
                known = known_of.get(regions[number].key)
                if known is None:
                    known = known_of[regions[number].key] = _Known()
                if number in inside:
                    known.role = role
        return found

    def _add_steps(
        self, stretch: Stretch, edges: Iterable[Edge], groups: Iterable[tuple[_Group | None, _Group | None]]
    ) -> None:
        """``groups`` are those of the ends of each edge."""
        regions = stretch.located.regions
        merged: dict[_Step, list[Edge]] = {}
        for edge, (source, destination) in zip(edges, groups, strict=True):
            name = stretch.namer.edge(edge)
            called = name.layer, name.frame.function, name.primitive if edge.mover else ""
            key = edge.kind, source.key if source else None, destination.key if destination else None, called
            same = merged.get(key)
            if same is None:
                same = merged[key] = []
                if key not in self.steps:
                    self.steps[key] = _Sums(edge.kind, source, destination, name, edge.mover, edge.evidence)
            same.append(edge)
        for key, same in merged.items():
            sums = self.steps[key]
            sums.count += sum(edge.count for edge in same)
            sums.bytes += sum(edge.nbytes for edge in same)
            sums.evidence = weakest({sums.evidence, *(edge.evidence for edge in same)})
            sources = {edge.source for edge in same if edge.source is not None}
            destinations = {edge.destination for edge in same if edge.destination is not None}
            sums.sources.add({regions[number].key for number in sources})
            sums.destinations.add({regions[number].key for number in destinations})
            sums.lived(stretch.memory.lives(destinations))

    def _temporary(self, stretch: Stretch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Region, operation and bytes of what of ``rows`` is on the way of no payload, in the order of the first row of
        each; shape (n, 3).
        """
        regions, memory = stretch.located.regions, stretch.memory
        rows = rows[~np.isin(regions.key[regions.of_row[rows]], np.array(list(self.known), np.int64))]
        number, operation = regions.of_row[rows], memory.operation_of_row[rows]
        order = np.lexsort((operation, number))
        told = np.stack([number, operation, stretch.trace.allocations.size[rows].astype(np.int64)], axis=1)[order]
        if not len(rows):
            return told
        first = np.flatnonzero(np.append(True, (np.diff(told[:, :2], axis=0) != 0).any(axis=1)))
        distinct = told[first]
        distinct[:, 2] = np.maximum.reduceat(told[:, 2], first)
        return distinct[np.argsort(np.minimum.reduceat(order, first))]

    def _add_temporaries(self, stretch: Stretch, rows: NDArray[np.int64], operation: int) -> None:
        found = self._temporary(stretch, rows)
        regions = stretch.located.regions
        alike = np.stack([regions.stack[found[:, 0]].astype(np.int64), found[:, 2]], axis=1)
        _, first, counts = np.unique(alike, axis=0, return_index=True, return_counts=True)
        for at, count in sorted(zip(first.tolist(), counts.tolist(), strict=True)):
            number, _, nbytes = found[at].tolist()
            temporaries = self._as_temporary(stretch, regions[number], operation, self.temporaries)
            temporaries.add(nbytes, self.placed + 1 + at, count)
        self.placed += len(found)

    def _as_temporary(
        self, stretch: Stretch, region: Region, operation: int, among: dict[_Key, _Temporaries]
    ) -> _Temporaries:
        key, layer, site = _described(stretch, region, "temporary", operation)
        return among.setdefault(key, _Temporaries(_Group("", key, layer, site)))

    def _rise(self, stretch: Stretch, rows: NDArray[np.int64], group: Sequence[Operation]) -> None:
        """Note what is held in this stretch when that is more than in those before."""
        memory, located, operation = stretch.memory, stretch.located, group[0].root.id

        def known(row: int) -> _Known | None:
            return self.known.get(located.regions[memory.regions_of[row]].key)

        self.sites |= memory.sites_of(group)
        high = memory.high_water(rows, group, self.sites)
        if self.peak is not None and high.total <= self.peak.total:
            return
        extra = [row for row in high.alive if (on_path := known(row)) and on_path.role == "extra"]
        owners = high.open.union(memory.owners[row] for row in extra)
        peak = self.peak = _Peak(high.total, payload=sum(self.holders[op] for op in owners))
        set_up = _known_for(stretch, high.set_up, operation)
        for number, _, nbytes in self._temporary(stretch, np.array(set_up, np.int64)).tolist():
            self._as_temporary(stretch, located.regions[number], operation, peak.set_up).add(nbytes, 0)
        there = [*high.alive, *set_up]
        numbers = {memory.regions_of[row] for row in there}
        rows_there = [row for number in numbers for row in located.regions[number].rows]
        temporary = self._temporary(stretch, np.array(rows_there, np.int64)).tolist()
        held = {(number, operation): nbytes for number, operation, nbytes in temporary}
        for row in there:
            size, on_path = int(stretch.trace.allocations.size[row]), known(row)
            if on_path is None or on_path.role == "extra":
                peak.extra += size
            if on_path is not None:
                for group_of in on_path.groups.values():
                    peak.of[group_of.key] += size
            else:
                number = memory.regions_of[row]
                key = _described(stretch, located.regions[number], "temporary", operation)[0]
                peak.temporary[key, held[number, memory.owners[row]]] += size
                peak.together[key.function] += size

    # --- the path of the report

    def path(self, min_bytes: int, versions: Mapping[str, str], *, transfers: bool) -> Path:
        """The path: without steps of less than ``min_bytes``, with ``versions`` of the packages. ``transfers`` says
        whether they were recorded.
        """
        first, payload, peak = self.first, self.payload, self.peak or _Peak(0)
        groups = [*self.groups.values(), *self._large(peak)]
        steps = [self._step(sums, peak, versions) for sums in self.steps.values() if sums.bytes >= min_bytes]
        steps = answered_for(steps)
        filled = {step.destination: step for step in reversed(steps) if step.destination and step.layer}
        for group in groups:
            if group.key.role == "extra" and not group.layer and group.id in filled:
                by = filled[group.id]
                group.layer, group.site = by.layer, group.site if group.site.function else by.site
        steps, best = _judge(steps, first)
        copied = sum(step.bytes for step in steps if step.kind in COPY_KINDS)
        fetched = sum(step.bytes for step in steps if step.kind == "fetch")
        decoded = sum(step.bytes for step in steps if step.kind == "decode")
        unnamed = sum(step.bytes for step in steps if step.kind in COPY_KINDS and not step.layer)
        reads = first.direction == "read"
        explained = 1 - min(unnamed, self.observed) / self.observed if self.observed else 1.0
        return Path(
            label=first.label,
            direction=first.direction,
            api=first.api,
            store=first.store,
            codecs=first.codecs,
            operations=self.operations,
            chunks=self.chunks,
            errors=self.errors,
            payload_bytes=payload,
            copied_bytes=copied,
            copies=ratio(copied, payload),
            extra_at_peak_bytes=peak.extra,
            extra_at_peak=ratio(peak.extra, peak.payload or payload),
            best_achievable=best,
            avoidable=ratio(sum(step.avoidable_bytes for step in steps), payload),
            fetched_bytes=fetched,
            flushed_bytes=sum(step.bytes for step in steps if step.kind == "flush"),
            read_amplification=ratio(fetched, payload) if reads else None,
            decode_amplification=ratio(decoded, payload) if reads and decoded else None,
            unattributed_bytes=unnamed,
            explained=explained if transfers else None,
            buffers=tuple(
                Buffer(g.id, g.key.role, g.key.label, g.layer, g.site, g.bytes, peak.of[g.key], g.pieces)
                for g in groups
            ),
            steps=tuple(steps),
            timeline=self.timeline,
        )

    def _large(self, peak: _Peak) -> list[_Group]:
        """The temporaries that are told: those that are large, or of which one function holds as much together at the
        peak.
        """
        large = max(1 << 12, self.payload // 100)
        found: list[tuple[int, _Group]] = []
        for key in self.temporaries | peak.set_up:
            told = [some[key] for some in (self.temporaries, peak.set_up) if key in some]
            together = bool(key.function) and peak.together[key.function] >= large
            chosen = [(size, *rest) for some in told for size, rest in some.sizes.items() if together or size >= large]
            if chosen:
                group = told[0].group
                group.bytes = sum(size * count for size, count, _ in chosen)
                group.pieces = sum(count for _, count, _ in chosen)
                peak.of[key] = sum(peak.temporary[key, size] for size in {size for size, _, _ in chosen})
                found.append((min(place for _, _, place in chosen), group))
        found.sort(key=lambda each: each[0])
        for number, (_, group) in enumerate(found, len(self.groups) + 1):
            group.id = f"b{number}"
        return [group for _, group in found]

    def _step(self, sums: _Sums, peak: _Peak, versions: Mapping[str, str]) -> Step:
        name, into = sums.name, sums.destination
        joins = sums.kind == "copy" and 0 < sums.destinations.count * 2 <= sums.sources.count and not sums.mover
        return Step(
            kind="join" if joins else sums.kind,
            source=sums.source.id if sums.source else None,
            destination=into.id if into else None,
            layer=name.layer,
            project=project_of(name.layer),
            site=reference(name.frame, versions),
            primitive=name.primitive,
            called_from=tuple(reference(frame, versions) for frame in name.callers),
            count=sums.count,
            bytes=sums.bytes,
            ratio=ratio(sums.bytes, self.payload),
            at_peak_bytes=peak.of[into.key] if into is not None and into.key.role == "extra" else 0,
            held_ms=None if into is None or sums.longest is None or sums.living else round(sums.longest / 1e6, 3),
            evidence=sums.evidence,
        )


def _described(stretch: Stretch, region: Region, role: str, operation: int) -> tuple[_Key, str, SiteRef]:
    """What a region has in common with others of its buffer, the layer that allocated it, and where."""
    alike = region.stack if region.rows else -1, role, operation
    if alike not in stretch.described:
        name = stretch.namer.region(region, operation)
        frame = name.frame if name else None
        key = _Key(role, _label(stretch, region, role, name), frame.function if frame else "")
        site = reference(frame, stretch.versions) if frame else SiteRef("")
        stretch.described[alike] = key, name.layer if name else "", site
    return stretch.described[alike]


def _label(stretch: Stretch, region: Region, role: str, name: Name | None) -> str:
    if role in ("source", "result") and not region.rows:
        return role
    stack = stretch.trace.allocations.stacks[region.stack] if region.rows else ()
    if name is None:
        return stack[0].function if stack else role
    inner = name.frame.function
    beneath = next((frame for frame in name.callers if frame.function != inner), None)
    text = f"{name.primitive} < {inner}" if name.primitive and name.primitive != inner else inner
    return f"{text} < {beneath.function}" if beneath and text == inner else text


def _layer_of(stretch: Stretch, region: int, operation: int) -> str:
    name = stretch.namer.region(stretch.located.regions[region], operation)
    return name.layer if name else UNKNOWN


def _known_for(stretch: Stretch, rows: Sequence[int], operation: int) -> list[int]:
    """Those of ``rows`` that functions which can be named hold more of than an arena: the interpreter takes arenas for
    whoever comes along.
    """
    held: Counter[str] = Counter()
    named: dict[int, str] = {}
    for row in rows:
        name = stretch.namer.region(stretch.located.regions[stretch.memory.regions_of[row]], operation)
        if name is not None:
            named[row] = name.frame.function
            held[named[row]] += int(stretch.trace.allocations.size[row])
    return [row for row, function in named.items() if held[function] > ARENA]


# --- judgement


def _judge(steps: list[Step], op: Operation) -> tuple[list[Step], int]:
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
