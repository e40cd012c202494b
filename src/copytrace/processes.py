"""The reports of several processes -> one. Pure: no I/O.

Paths with the same label are one path: operations and bytes are added, what is held at peak is the most that one
process holds, because their moments are not known to be the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from copytrace import attribution
from copytrace.attribution import layer_totals
from copytrace.model import Buffer, Coverage, Path, Process, ReportData, Share, Step
from copytrace.paths import ratio, weakest
from copytrace.tasks import numbered, projected

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from copytrace.model import ProbeStatus, Trace

_STANDING = ("attached", "partial", "failed", "unsupported", "not-imported", "not-installed")


def attribute(trace: Trace) -> ReportData:
    """The report of a trace and of its parts."""
    processes, reports = [], []
    for stretches in own_of_each(trace):
        first = next(stretches)
        processes.append(first.process)
        reports.append(attribution.attribute(first, stretches))
    found = reports[0] if len(reports) == 1 and not trace.untraced else merge(processes, reports, trace.untraced)
    return replace(found, tasks=projected(found.tasks, trace.environment.get("projected_bytes")))


def own_of_each(trace: Trace) -> Iterator[Iterator[Trace]]:
    """The stretches of each process of a trace, one after the other."""
    count = 0

    def process_of(part: Trace) -> int:
        nonlocal count
        count += not part.continued
        return count

    whole = replace(trace, parts=(), untraced=(), continued=False)
    return (stretches for _, stretches in groupby(chain((whole,), trace.parts), process_of))


def merge(processes: Sequence[Process], reports: Sequence[ReportData], untraced: Sequence[Process] = ()) -> ReportData:
    """One report of those of several processes, the main one first, each with a name of its own."""
    processes = distinct(processes)
    groups: dict[str, list[tuple[str, Path]]] = {}
    for process, report in zip(processes, reports, strict=True):
        for path in report.paths:
            groups.setdefault(path.label, []).append((process.name, path))
    paths = tuple(_path(group) for group in groups.values())
    return ReportData(
        environment=_environment(reports),
        coverage=_coverage(processes, reports, paths, untraced),
        paths=paths,
        layers=layer_totals(paths),
        label=reports[0].label,
        spans=sum(report.spans for report in reports),
        records=sum(report.records for report in reports),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        tasks=numbered(
            replace(task, process=process.name)
            for process, report in zip(processes, reports, strict=True)
            for task in report.tasks
        ),
    )


def distinct(processes: Iterable[Process]) -> list[Process]:
    """The same with a number after each name that another has, too."""
    seen: Counter[str] = Counter()
    named = []
    for process in processes:
        seen[process.name] += 1
        again = seen[process.name]
        named.append(replace(process, name=f"{process.name} ({again})") if again > 1 else process)
    return named


def _environment(reports: Sequence[ReportData]) -> dict[str, Any]:
    packages: dict[str, str] = {}
    for report in reports:
        packages = {**report.environment.get("packages", {}), **packages}
    return {**reports[0].environment, "packages": dict(sorted(packages.items()))}


def _path(group: Sequence[tuple[str, Path]]) -> Path:
    """The path that those of several processes, all with one label, make together."""
    paths = [path for _, path in group]
    first, payload = paths[0], sum(path.payload_bytes for path in paths)
    buffers, names = _buffers(paths)
    steps = _steps(paths, names, payload)
    copied = sum(path.copied_bytes for path in paths)
    fetched = sum(path.fetched_bytes for path in paths)
    decoded = sum(step.bytes for step in steps if step.kind == "decode")
    reads = first.direction == "read"
    timelines = [path.timeline for path in paths if path.timeline is not None]
    return replace(
        first,
        operations=sum(path.operations for path in paths),
        chunks=sum(path.chunks for path in paths),
        errors=sum(path.errors for path in paths),
        payload_bytes=payload,
        copied_bytes=copied,
        copies=ratio(copied, payload),
        extra_at_peak_bytes=max(path.extra_at_peak_bytes for path in paths),
        extra_at_peak=max((path.extra_at_peak for path in paths if path.extra_at_peak is not None), default=None),
        best_achievable=max(path.best_achievable for path in paths),
        avoidable=ratio(sum(step.avoidable_bytes for step in steps), payload),
        fetched_bytes=fetched,
        flushed_bytes=sum(path.flushed_bytes for path in paths),
        read_amplification=ratio(fetched, payload) if reads else None,
        decode_amplification=ratio(decoded, payload) if reads and decoded else None,
        unattributed_bytes=sum(path.unattributed_bytes for path in paths),
        explained=_explained(paths),
        buffers=buffers,
        steps=steps,
        notes=tuple(dict.fromkeys(note for path in paths for note in path.notes)),
        timeline=max(timelines, key=lambda timeline: timeline.payload_bytes, default=None),
        processes=tuple(_share(name, path) for name, path in group),
    )


def _share(process: str, path: Path) -> Share:
    held = path.extra_at_peak_bytes, path.extra_at_peak
    return Share(process, path.operations, path.payload_bytes, path.copied_bytes, *held)


def _explained(paths: Iterable[Path]) -> float | None:
    """The shares, weighted by the bytes that each path copies; None where one does not know its own."""
    moved = [(path.explained, path.copied_bytes) for path in paths]
    known = [(share, weight) for share, weight in moved if share is not None]
    if len(known) < len(moved):
        return None
    total = sum(weight for _, weight in known)
    return sum(share * weight for share, weight in known) / total if total else 1.0


def _buffers(paths: Sequence[Path]) -> tuple[tuple[Buffer, ...], list[dict[str | None, str | None]]]:
    """The buffers of all, those alike taken together, and what each path's ids have become."""
    merged: dict[tuple[str, str, str], Buffer] = {}
    names: list[dict[str | None, str | None]] = []
    for path in paths:
        renamed: dict[str | None, str | None] = {None: None}
        for buffer in path.buffers:
            key = buffer.role, buffer.label, buffer.site.function
            known = merged.get(key)
            if known is None:
                merged[key] = replace(buffer, id=f"b{len(merged) + 1}")
            else:
                merged[key] = replace(
                    known,
                    bytes=known.bytes + buffer.bytes,
                    peak_bytes=max(known.peak_bytes, buffer.peak_bytes),
                    pieces=known.pieces + buffer.pieces,
                    required=known.required or buffer.required,
                )
            renamed[buffer.id] = merged[key].id
        names.append(renamed)
    return tuple(merged.values()), names


def _steps(paths: Sequence[Path], names: Sequence[dict[str | None, str | None]], payload: int) -> tuple[Step, ...]:
    """The steps of all, those alike taken together, in the order in which one process has them after the other."""
    merged: dict[tuple[Any, ...], list[Step]] = {}
    for path, renamed in zip(paths, names, strict=True):
        for step in path.steps:
            moved = replace(step, source=renamed[step.source], destination=renamed[step.destination])
            key = moved.kind, moved.source, moved.destination, moved.layer, moved.site.function, moved.primitive
            merged.setdefault(key, []).append(moved)
    return tuple(_step(same, payload) for same in merged.values())


def _step(same: Sequence[Step], payload: int) -> Step:
    total = sum(step.bytes for step in same)
    lived = [step.held_ms for step in same if step.held_ms is not None]
    return replace(
        same[0],
        count=sum(step.count for step in same),
        bytes=total,
        ratio=ratio(total, payload),
        at_peak_bytes=max(step.at_peak_bytes for step in same),
        held_ms=max(lived) if len(lived) == len(same) else None,
        evidence=weakest(step.evidence for step in same),
        avoidable_bytes=sum(step.avoidable_bytes for step in same),
        required=all(step.required for step in same),
    )


def _coverage(
    processes: Sequence[Process],
    reports: Sequence[ReportData],
    paths: Sequence[Path],
    untraced: Sequence[Process],
) -> Coverage:
    """What could be seen in all of the processes; a record counts as made when each that moved something made it."""
    all_of = [report.coverage for report in reports]
    busy = [report.coverage for report in reports if report.paths] or all_of
    notes = list(all_of[0].notes)
    for process, report in zip(processes[1:], reports[1:], strict=True):
        if report.paths:
            notes += [f"{process.name}: {note}" for note in report.coverage.notes]
    return Coverage(
        memray=all(coverage.memray for coverage in busy),
        native=all(coverage.native for coverage in busy),
        transfers=all(coverage.transfers for coverage in busy),
        lost_transfers=sum(coverage.lost_transfers for coverage in all_of),
        probes=_probes([probe for coverage in all_of for probe in coverage.probes]),
        unattributed_bytes=sum(coverage.unattributed_bytes for coverage in all_of),
        off_path_bytes=sum(coverage.off_path_bytes for coverage in all_of),
        off_path_moves=sum(coverage.off_path_moves for coverage in all_of),
        explained=_explained(paths) if all(coverage.transfers for coverage in busy) else None,
        notes=tuple(notes),
        processes=(*processes, *untraced),
    )


def _probes(probes: Iterable[ProbeStatus]) -> tuple[ProbeStatus, ...]:
    """Each probe where it fared best."""
    best: dict[str, ProbeStatus] = {}
    for probe in probes:
        known = best.get(probe.name)
        if known is None or _STANDING.index(probe.status) < _STANDING.index(known.status):
            best[probe.name] = probe
    return tuple(best.values())
