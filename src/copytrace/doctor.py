"""What copytrace can see on this machine: every probe and site, memray and the native hook."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from copytrace.probes import targets_of
from copytrace.reports import wording
from copytrace.reports.text import Page
from copytrace.successors import successor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from copytrace.model import ProbeStatus, ReportData

STYLES = {"attached": "green", "not-installed": "dim", "not-imported": "dim"}


def examine() -> ReportData:
    """The report of an empty session in which every library that has a probe and can be imported is imported."""
    from copytrace._session import session

    with session(label="doctor", memray=False, transfers=False) as first:
        pass
    for probe in first.report.coverage.probes:
        _import(probe.library.replace("-", "_"))
        for module in _modules(probe.name):
            _import(module)
    with session(label="doctor") as second:
        pass
    return second.report


def _import(module: str) -> None:
    """Import a module; that it cannot be imported is for its probe to say."""
    with suppress(Exception):
        import_module(module)


def _modules(probe: str) -> list[str]:
    """The modules that a probe's sites lie in."""
    return sorted({target.partition(":")[0] for targets in targets_of(probe).values() for target in targets})


def vanished(report: ReportData) -> list[str]:
    """A line for each site that the installed version of its library should have and has not, with what may have taken
    its place where that can be told, and for each that is there and cannot be probed.
    """
    told = []
    for probe in report.coverage.probes:
        known = targets_of(probe.name)
        for site in probe.sites:
            name, reason = str(site["name"]), str(site.get("reason", ""))
            if site.get("status") == "missing":
                found = next(filter(None, map(successor, known.get(name, ()))), "")
                told.append(
                    f"{reason}; {f'{found} may have taken its place' if found else 'what replaced it is unknown'}"
                )
            elif site.get("status") == "failed":
                told.append(f"{name} cannot be probed: {reason}")
        if probe.status == "failed" and not probe.sites:
            told.append(f"the probe {probe.name} cannot be used: {probe.reason}")
    return told


def to_text(report: ReportData, width: int = 80, color: bool = False) -> str:
    """What :func:`examine` found, for a terminal of ``width`` columns."""
    page = Page(width)
    coverage, environment = report.coverage, report.environment
    packages = environment.get("packages", {})
    page.flow(f"Python {environment.get('python', '?')} on {environment.get('platform', '?')}", style="bold")
    memray = f"allocations: {'memray' if coverage.memray else 'not recorded, no memray'} {packages.get('memray', '')}"
    page.flow(memray.rstrip(), indent=2, style="green" if coverage.memray else "yellow")
    hook = "the native hook records them" if coverage.transfers else "no native hook, they are inferred"
    page.flow(f"transfers: {hook}", indent=2, style="green" if coverage.transfers else "yellow")
    for note in (*coverage.notes, *report.notes):
        page.flow(wording.plain(note), indent=2, style="yellow")
    for probe in coverage.probes:
        page.blank()
        _probe(page, probe)
    attached = sum(probe.status == "attached" for probe in coverage.probes)
    page.blank()
    page.flow(f"{attached} of {wording.plural(len(coverage.probes), 'probe')} attached.", style="bold")
    page.flow("Next: copytrace run SCRIPT", style="bold")
    return page.to_str(color)


def _probe(page: Page, probe: ProbeStatus) -> None:
    title = " ".join(
        part for part in (probe.name, probe.library if probe.library != probe.name else "", probe.version) if part
    )
    reason = f": {probe.reason}" if probe.reason else ""
    style = STYLES.get(probe.status, "yellow")
    page.flow(wording.plain(f"{title}  {probe.status}{reason}"), style=style)
    attached = [site["name"] for site in probe.sites if site.get("status") == "attached"]
    if attached:
        page.flow(
            wording.plain(f"{wording.plural(len(attached), 'site')}: {_grouped(attached)}"), indent=2, style="dim"
        )
    for site in probe.sites:
        if site.get("status") != "attached":
            why = f": {site['reason']}" if site.get("reason") else ""
            page.flow(wording.plain(f"{site['name']} {site.get('status', '?')}{why}"), indent=2, style=style)


def _grouped(names: Sequence[str]) -> str:
    """Names of one owner together: ``Array.__getitem__, .__setitem__``."""
    told, owner = [], None
    for name in names:
        head, _, last = name.rpartition(".")
        told.append(f".{last}" if head and head == owner else name)
        owner = head
    return ", ".join(told)
