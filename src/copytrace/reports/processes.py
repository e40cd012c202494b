"""Processes and tasks of a report as rows of text, for the renderings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from copytrace.reports import wording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from copytrace.model import Path, Process, ReportData, Task

MOST_TASKS = 30
"""Tasks that are shown, those that held most."""


class Table(NamedTuple):
    """``columns`` are headings; those of ``left`` hold words, the others figures."""

    title: str
    columns: tuple[str, ...]
    left: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(report: ReportData) -> list[Table]:
    """A table for each process that has part in a path, and one of the tasks."""
    found = []
    for process in report.coverage.processes:
        rows = [
            (
                wording.heading(path),
                f"{share.operations:,}",
                wording.size(share.payload_bytes),
                _copies(share.copied_bytes, share.payload_bytes),
                wording.size(share.extra_at_peak_bytes) if report.coverage.memray else "-",
            )
            for path in report.paths
            for share in path.processes
            if share.process == process.name
        ]
        columns = ("path", "operations", "payload", "copies", "held at peak")
        found.append(Table(title(process), columns, ("path",), rows))
    if report.tasks:
        found.append(_tasks(report))
    return found


def title(process: Process) -> str:
    """``worker.py (started): cut off: it was killed``."""
    status = "" if process.status == "complete" else f": {process.status}"
    reason = f", {process.reason}" if process.reason else ""
    return wording.plain(f"{process.name} ({process.kind}){status}{reason}")


def _tasks(report: ReportData) -> Table:
    ranked = sorted(report.tasks, key=lambda task: -(task.peak_bytes or 0))
    rest = len(ranked) - MOST_TASKS
    name = "tasks" + (f", the {MOST_TASKS} of {len(ranked):,} that held most" if rest > 0 else "")
    rows = [_task(task) for task in ranked[:MOST_TASKS]]
    columns = ("task", "process", "payload", "copies", "peak", "projected")
    return Table(name, columns, ("task", "process"), rows)


def _task(task: Task) -> tuple[str, ...]:
    again = f" (attempt {task.attempt})" if task.attempt > 1 else ""
    return (
        wording.plain(f"{task.key}{again}{', failed' if task.error else ''}"),
        wording.plain(task.process),
        wording.size(task.payload_bytes),
        _copies(task.copied_bytes, task.payload_bytes),
        "-" if task.peak_bytes is None else wording.size(task.peak_bytes),
        "-" if task.projected_bytes is None else wording.size(task.projected_bytes),
    )


def _copies(copied: int, payload: int) -> str:
    return wording.times(copied / payload if payload else None)


def told(report: ReportData) -> list[str]:
    """The processes of a report in sentences: how many there were, and what is missing of which."""
    processes = report.coverage.processes
    if not processes:
        return []
    whole = [process.name for process in processes if process.status == "complete"]
    lines = [f"{wording.plural(len(processes), 'process', 'processes')}, complete: {wording.some(whole, 6) or 'none'}"]
    missing: dict[tuple[str, str], list[str]] = {}
    for process in processes:
        if process.status != "complete":
            missing.setdefault((process.status, process.reason), []).append(process.name)
    lines += [f"{status}: {wording.some(names, 6)} ({reason})" for (status, reason), names in missing.items()]
    over = [task for task in report.tasks if None not in (task.peak_bytes, task.projected_bytes) and _is_over(task)]
    if over:
        names = wording.some([task.key for task in over], 3)
        lines.append(f"{wording.plural(len(over), 'task')} held more than was projected: {names}")
    return [wording.plain(line) for line in lines]


def _is_over(task: Task) -> bool:
    return (task.peak_bytes or 0) > (task.projected_bytes or 0)


def cautions(path: Path) -> list[str]:
    """What a reader of this path must know beside its steps; first what each of several processes held at its peak."""
    if len(path.processes) < 2:
        return wording.cautions(path)
    ranked = sorted(path.processes, key=lambda share: -share.extra_at_peak_bytes)
    held = [f"{share.process} {wording.size(share.extra_at_peak_bytes)}" for share in ranked]
    several = wording.plain(f"{len(ranked):,} processes, each with a peak of its own: {wording.some(held, 4)}")
    return [several, *wording.cautions(path)]
