"""The pages of the documentation that are made from saved results: the tables, and a list of findings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from copytrace.errors import CopytraceError
from copytrace.matrix import tables
from copytrace.matrix.compare import as_reports
from copytrace.matrix.configurations import TABLES, select
from copytrace.matrix.results import load, setting_of
from copytrace.reports import diff
from copytrace.reports.markdown import code
from copytrace.reports.wording import plural, short

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from copytrace.matrix.results import Copied, Figures

    type Tables = Mapping[str, Mapping[str, Figures]]

_PERIODS = ("-period", "-today")
_LEAST = 0.02
"""Share of the array's bytes that a function must copy in some run to be a finding."""


def load_tables(directory: Path) -> Tables:
    """Table -> its runs by key, of all results in ``directory``, in the order of :data:`TABLES`."""
    files = [(table, directory / f"{table}.json") for table in TABLES]
    return {table: load(file)[1] for table, file in files if file.exists()}


def results(found: Tables) -> str:
    """``results.md``: every table, and what changed between the two periods of the legacy one."""
    size = {run.payload_bytes for runs in found.values() for run in runs.values() if not run.error}
    lines = [
        "# Results",
        "",
        f"What `copytrace matrix` found for {' and '.join(f'{n / 1e6:,.0f} MB' for n in sorted(size))} of random "
        "float32 in one chunk, one process a write and one a read. Compressed is zstd level 0 (Zarr format 3) or "
        "blosc with lz4, level 5 and shuffle (format 2). The published figures are those of "
        "[memray-array](https://github.com/tomwhite/memray-array).",
        "",
        f"This page and [the findings](findings.md) are generated from the results ({_links(found)}) by "
        "`copytrace matrix -o docs/results --docs docs -f`.",
        "",
        _made_with(found),
        "",
    ]
    for table, runs in found.items():
        rows = [row for row in select(table) if any(run.row == row.name for run in runs.values())]
        lines += [tables.render(rows, runs, table, level=2), *_since(runs)]
    return "\n".join(lines).rstrip() + "\n"


def _links(found: Tables) -> str:
    return ", ".join(f"[{table}](results/{table}.json)" for table in found)


def _made_with(found: Tables) -> str:
    told = []
    for name in ("python", "memray", "numpy"):
        versions = sorted({run.versions[name] for runs in found.values() for run in runs.values() if run.versions})
        told.append(f"{name.replace('python', 'Python')} {', '.join(versions)}")
    return f"Made with {'; '.join(told)}."


def _since(runs: Mapping[str, Figures]) -> Iterator[str]:
    """What the rows that end in ``-today`` do that those that end in ``-period`` did not."""
    sides = [
        [replace(run, row=run.row.removesuffix(end)) for run in runs.values() if run.row.endswith(end)]
        for end in _PERIODS
    ]
    if all(sides):
        yield "### From the period's dependencies to today's"
        yield ""
        yield diff.to_markdown(diff.compare(*as_reports(*sides)))


@dataclass(slots=True)
class _Finding:
    """One copy: a function of a layer in a direction, in all runs that make it."""

    layer: str
    function: str
    direction: str
    seen: list[tuple[str, Figures, Copied]] = field(default_factory=list)

    @property
    def copies(self) -> list[Copied]:
        return [copied for *_, copied in self.seen]


def write(source: Path, target: Path) -> tuple[Path, Path]:
    """Write ``results.md`` and ``findings.md`` to ``target`` from the results in ``source``; both paths.

    Raises CopytraceError when there are none.
    """
    found = load_tables(source)
    if not found:
        raise CopytraceError(f"{source}: holds no results; run copytrace matrix -o {source} first")
    pages = target / "results.md", target / "findings.md"
    for page, render in zip(pages, (results, findings), strict=True):
        page.write_text(render(found), "utf-8")
    return pages


def findings(found: Tables) -> str:
    """``findings.md``: each copy that need not be made, then those that must be, with the runs that make them."""
    wanted, needed = _gather(found, avoidable=True), _gather(found, avoidable=False)
    lines = [
        "# Findings",
        "",
        "Each copy that `copytrace matrix` found and that need not be made: where it is made, how much it copies over "
        f"the array's bytes, and what is known of it. Generated from the results ({_links(found)}); "
        "[the tables](results.md) have the figures by stack.",
        "",
    ]
    for layer in dict.fromkeys(finding.layer for finding in wanted):
        of_layer = [finding for finding in wanted if finding.layer == layer]
        lines += [f"## {layer or 'no layer'}", ""]
        for finding in of_layer:
            lines += [*_finding(finding), ""]
    lines += ["## Copies that must be made", "", *_needed(needed)]
    return "\n".join(lines).rstrip() + "\n"


def _gather(found: Tables, *, avoidable: bool) -> list[_Finding]:
    by_place: dict[tuple[str, str, str], _Finding] = {}
    for table, runs in found.items():
        for run in runs.values():
            for copied in run.copied:
                if bool(copied.avoidable_bytes) == avoidable and copied.bytes >= _LEAST * run.payload_bytes:
                    key = (copied.layer, copied.function, run.stage)
                    by_place.setdefault(key, _Finding(*key)).seen.append((table, run, copied))
    return sorted(by_place.values(), key=lambda f: (f.layer, f.direction != "write", f.function))


def _finding(finding: _Finding) -> Iterator[str]:
    yield f"### {code(short(finding.function))} ({finding.direction}s)"
    yield ""
    kinds = "+".join(dict.fromkeys(copied.kind for copied in finding.copies))
    first = max(finding.copies, key=lambda copied: len(copied.called_from))
    path = [finding.function, *(name for name in first.called_from if name != finding.function)]
    yield f"- Code path: {' called from '.join(code(name) for name in path)}"
    if places := sorted({(copied.place, copied.url) for copied in finding.copies if copied.place}):
        yield f"- Source: {', '.join(f'[{place}]({url})' if url else code(place) for place, url in places)}"
    yield f"- Desired: no {kinds}. Actual: {_range(finding)}"
    peak = max(copied.at_peak_bytes / run.payload_bytes for _, run, copied in finding.seen)
    yield f"- Held at the path's peak: {f'up to {peak:.2f}' if peak >= 0.005 else 'nothing'}"
    yield f"- Remedy: {_remedies(finding)}"
    yield f"- Evidence: {', '.join(sorted({copied.evidence for copied in finding.copies}))}"
    yield f"- In {_where(finding.seen)}"


def _range(finding: _Finding) -> str:
    """Least and most of what it copies in one run, several steps of it taken together."""
    of_run: dict[tuple[str, str], float] = {}
    for table, run, copied in finding.seen:
        of_run[table, run.key] = of_run.get((table, run.key), 0.0) + copied.bytes / run.payload_bytes
    least, most = min(of_run.values()), max(of_run.values())
    return f"{most:.2f} x" if most - least < 0.01 else f"{least:.2f} to {most:.2f} x"


def _remedies(finding: _Finding) -> str:
    known = dict.fromkeys((copied.remedy, copied.remedy_url) for copied in finding.copies if copied.remedy)
    told = [f"[{text}]({url})" if url else text for text, url in known]
    if known and any(not copied.remedy for copied in finding.copies):
        told.append("nothing is known for the rest")
    return "; ".join(told) or "none is known"


def _where(seen: Iterable[tuple[str, Figures, Copied]]) -> str:
    """``current: zarr-local, zarr-obstore (compressed)``; rows with both settings are given without."""
    rows: dict[str, dict[str, set[bool]]] = {}
    for table, run, _ in seen:
        rows.setdefault(table, {}).setdefault(run.row, set()).add(run.compressed)
    return "; ".join(
        f"{table}: {', '.join(_row(row, settings) for row, settings in of_table.items())}"
        for table, of_table in rows.items()
    )


def _row(row: str, settings: set[bool]) -> str:
    return row if len(settings) == 2 else f"{row} ({setting_of(*settings)})"


def _needed(needed: Sequence[_Finding]) -> Iterator[str]:
    yield "| Layer | Function | | Kind | Over the array's bytes | Runs |"
    yield "|---|---|---|---|---|---|"
    for finding in needed:
        kinds = "+".join(dict.fromkeys(copied.kind for copied in finding.copies))
        runs = plural(len({(table, run.key) for table, run, _ in finding.seen}), "run")
        name = code(short(finding.function))
        yield f"| {finding.layer} | {name} | {finding.direction} | {kinds} | {_range(finding)} | {runs} |"
