"""Limits on the copies of a report: which paths are over, and by whose doing."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from typing import TYPE_CHECKING

from copytrace.errors import CopytraceError
from copytrace.layers import CARRIERS, CRATE_LAYERS, LIBRARY_LAYERS, MODULE_LAYERS, project_of
from copytrace.reports import wording

if TYPE_CHECKING:
    from collections.abc import Iterable

    from copytrace.model import Path, ReportData, Step


@dataclass(frozen=True, slots=True)
class Limits:
    """At most ``max_copies`` and ``max_extra_at_peak`` times the payload, on paths whose label fits the glob ``path``.

    With ``layer`` (a layer or a project) only what that layer copies and holds counts. None is no limit.
    """

    max_copies: float | None = None
    max_extra_at_peak: float | None = None
    path: str = "*"
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Excess:
    """A limit that a path exceeds. ``culprits`` says who, one line each, the guiltiest first."""

    path: str
    what: str
    actual: float
    limit: float
    culprits: tuple[str, ...]

    def __str__(self) -> str:
        return f"{wording.plain(self.path)}: {self.actual:,.2f} {self.what}, limit {self.limit:g}"


def measured(report: ReportData, limits: Limits) -> list[Path]:
    """The paths that ``limits`` is for and that have a payload to compare with.

    Raises :class:`CopytraceError` when there are none, the layer is unknown, or what is limited was not recorded.
    """
    if not report.paths:
        raise CopytraceError("no operation was recorded, so there is nothing to check; see copytrace doctor")
    fitting = [path for path in report.paths if fnmatchcase(path.label, limits.path)]
    if not fitting:
        labels = wording.some([f"'{path.label}'" for path in report.paths], 5)
        raise CopytraceError(wording.plain(f"--path {limits.path}: no path has such a label; there are {labels}"))
    with_payload = [path for path in fitting if path.copies is not None]
    if not with_payload:
        raise CopytraceError(wording.plain(f"--path {limits.path}: the paths that fit moved no payload"))
    if limits.layer and limits.layer not in (known := _layers(report)) and not _is_known(limits.layer):
        raise CopytraceError(wording.plain(f"--layer {limits.layer}: not in this report; there are {', '.join(known)}"))
    if limits.max_extra_at_peak is not None and not report.coverage.memray:
        raise CopytraceError("--max-extra-at-peak: allocations were not recorded; run without --no-memray")
    return with_payload


def exceeded(report: ReportData, limits: Limits) -> list[Excess]:
    """The limits that are exceeded, to the two decimals that reports show. Raises as :func:`measured`."""
    found = []
    for path in measured(report, limits):
        steps = [step for step in wording.copies_of(path) if _counts(limits, step.layer, step.project)]
        copies, extra = path.copies or 0.0, path.extra_at_peak or 0.0
        if limits.layer:
            copies = sum(step.bytes for step in steps) / path.payload_bytes
            held = sum(nbytes for _, nbytes in _held(path, limits))
            extra = extra * held / path.extra_at_peak_bytes if path.extra_at_peak_bytes else 0.0
        by = f" by {wording.plain(limits.layer)}" if limits.layer else ""
        if limits.max_copies is not None and round(copies, 2) > limits.max_copies:
            found.append(Excess(path.label, f"copies{by}", copies, limits.max_copies, _copiers(steps)))
        if limits.max_extra_at_peak is not None and round(extra, 2) > limits.max_extra_at_peak:
            holders = tuple(f"{owner}: {wording.size(nbytes)} held at peak" for owner, nbytes in _held(path, limits))
            found.append(Excess(path.label, f"x extra at peak{by}", extra, limits.max_extra_at_peak, holders))
    return found


def _counts(limits: Limits, *names: str) -> bool:
    return not limits.layer or limits.layer in names


def _layers(report: ReportData) -> list[str]:
    names = {name for total in report.layers for name in (total.layer, total.project)}
    for path in report.paths:
        names |= {name for step in path.steps for name in (step.layer, step.project)}
        names |= {buffer.layer for buffer in path.buffers}
    names |= {probe.library for probe in report.coverage.probes if probe.status in ("attached", "partial")}
    return sorted(names - {""})


def _is_known(layer: str) -> bool:
    """Whether it is a layer or project of copytrace's tables or an installed distribution, which may have no copies."""
    named = {"user", *MODULE_LAYERS.values(), *CRATE_LAYERS.values(), *LIBRARY_LAYERS.values()}
    if layer in named or layer in map(project_of, named):
        return True
    try:
        return bool(metadata.version(layer))
    except (metadata.PackageNotFoundError, ValueError):
        return False


def _copiers(steps: Iterable[Step]) -> tuple[str, ...]:
    ranked = sorted(steps, key=lambda step: (-step.avoidable_bytes, -step.bytes))
    return tuple(_copier(step) for step in ranked)


def _copier(step: Step) -> str:
    amount = f"{wording.pieces(step.count, step.bytes)} = " if step.count > 1 else ""
    where = wording.place(step.site)
    if step.site.function in CARRIERS and (caller := next(iter(wording.callers(step)), None)):
        where = f"called from {wording.plain(caller.function)}, {wording.place(caller)}"
    parts = [f"{step.kind} {amount}{wording.size(step.bytes)}, {wording.times(step.ratio)}", wording.blame(step), where]
    return f"{wording.plain(f'{step.layer} {step.site.function}')}: {', '.join(part for part in parts if part)}"


def _held(path: Path, limits: Limits) -> list[tuple[str, int]]:
    """Who holds extra memory at the path's peak, and how many bytes, the most first."""
    projects = {step.layer: step.project for step in path.steps}
    held = [
        (wording.plain(f"{buffer.layer} {buffer.site.function}"), buffer.peak_bytes)
        for buffer in path.buffers
        if buffer.role in ("extra", "temporary")
        and buffer.peak_bytes
        and _counts(limits, buffer.layer, projects.get(buffer.layer, buffer.layer.partition(".")[0]))
    ]
    return sorted(held, key=lambda item: -item[1])
