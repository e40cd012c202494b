"""Two matrices compared, run by run: what :mod:`copytrace.reports.diff` compares are reports, so they are made one."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from copytrace.errors import CopytraceError
from copytrace.layers import project_of
from copytrace.matrix.results import holds_results, load
from copytrace.model import Coverage, Path, ReportData, SiteRef, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from copytrace.matrix.results import Copied, Figures


def load_pair(old: str, new: str) -> tuple[ReportData, ReportData] | None:
    """The results of two matrices as reports, None when neither file holds any.

    Raises CopytraceError when only one does, or when it is damaged.
    """
    files = pathlib.Path(old), pathlib.Path(new)
    held = [holds_results(file) for file in files]
    if not any(held):
        return None
    if not all(held):
        other = files[held.index(False)]
        raise CopytraceError(f"{other}: holds no results of a matrix, and the other file does: compare two of a kind")
    return as_reports(*(load(file)[1].values() for file in files))


def as_reports(old: Iterable[Figures], new: Iterable[Figures]) -> tuple[ReportData, ReportData]:
    """Two reports with a path for each run that ended well, of what their comparison needs; failures are notes."""
    sides = list(old), list(new)
    uniform = frozenset.intersection(*map(_uniform, sides))
    before, after = (_report(runs, uniform) for runs in sides)
    return before, after


def _report(runs: Sequence[Figures], uniform: frozenset[str]) -> ReportData:
    return ReportData(
        environment={"packages": _versions(runs, uniform)},
        coverage=Coverage(True, True, True, 0, (), 0, 0, 0, None, ()),
        paths=tuple(_path(run) for run in runs if not run.error),
        layers=(),
        notes=tuple(f"{run.key} failed: {run.error}" for run in runs if run.error),
    )


def _uniform(runs: Iterable[Figures]) -> frozenset[str]:
    """Packages of which all runs have the same version, or none."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.versions.items():
            found.setdefault(name, set()).add(version)
    return frozenset(name for name, versions in found.items() if len(versions) == 1)


def _versions(runs: Iterable[Figures], uniform: frozenset[str]) -> dict[str, str]:
    """Package -> version of the uniform ones, package and row -> version of the others."""
    return {
        name if name in uniform else f"{name} of {run.row}": version
        for run in runs
        for name, version in run.versions.items()
    }


def _path(run: Figures) -> Path:
    steps = tuple(_step(copied, run.payload_bytes) for copied in run.copied)
    avoidable = sum(copied.avoidable_bytes for copied in run.copied)
    return Path(
        label=run.key,
        direction=run.stage,
        api=run.row,
        store="",
        codecs=(),
        operations=1,
        chunks=1,
        errors=0,
        payload_bytes=run.payload_bytes,
        copied_bytes=sum(step.bytes for step in steps),
        copies=run.copies,
        extra_at_peak_bytes=round(run.extra_at_peak * run.payload_bytes),
        extra_at_peak=run.extra_at_peak,
        best_achievable=run.best,
        avoidable=avoidable / run.payload_bytes,
        fetched_bytes=0,
        flushed_bytes=0,
        read_amplification=None,
        decode_amplification=None,
        unattributed_bytes=0,
        explained=None,
        buffers=(),
        steps=steps,
    )


def _step(copied: Copied, payload: int) -> Step:
    return Step(
        kind=copied.kind,
        source=None,
        destination=None,
        layer=copied.layer,
        project=project_of(copied.layer),
        site=SiteRef(copied.function, url=copied.url),
        primitive="",
        called_from=tuple(map(SiteRef, copied.called_from)),
        count=copied.count,
        bytes=copied.bytes,
        ratio=copied.bytes / payload,
        at_peak_bytes=copied.at_peak_bytes,
        held_ms=None,
        evidence=copied.evidence,
        avoidable_bytes=copied.avoidable_bytes,
        remedy=copied.remedy,
        remedy_url=copied.remedy_url,
    )
