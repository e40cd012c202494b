"""The report as Markdown, for an issue on GitHub: within its limit, and safe whatever the names in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from copytrace.reports import issue, processes, wording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from copytrace.model import Path, ReportData, SiteRef, Step

LIMIT = 65_536
"""Characters that GitHub takes in an issue; here also an upper limit of the bytes in UTF-8."""
LONGEST_NAME = 240


class Room(NamedTuple):
    """How much is shown: rows of a table, paths, and whether environment and stacks are."""

    rows: int
    paths: int
    details: bool


_ROOMS = (
    Room(1000, 1000, True),
    Room(100, 50, True),
    Room(40, 30, True),
    Room(40, 30, False),
    Room(10, 10, False),
    Room(3, 3, False),
)


def render(report: ReportData, by: str) -> str:
    """The report as Markdown, grouped by ``path``, ``layer``, ``site`` or ``process``; raises ValueError for another
    ``by``.

    What does not fit in :data:`LIMIT` characters is left out, the largest rows last, and its number said.
    """
    sections: dict[str, Callable[[ReportData, Room], list[str]]] = {
        "path": _by_path,
        "layer": _by_layer,
        "site": _by_site,
        "process": _by_process,
    }
    if by not in sections:
        raise ValueError(f"by={by!r}: choose path, layer, site or process")
    for room in _ROOMS:
        lines = [f"**{wording.headline(report, code)}**", "", *sections[by](report, room), *_unseen(report, room)]
        if room.details:
            lines += [*_environment(report), *_reproducer(report.environment), *_stacks(report, room)]
        if length(lines) <= LIMIT:
            break
    while length(lines) > LIMIT:
        del lines[-max(len(lines) // 10, 1) :]
    return "\n".join(lines).rstrip() + "\n"


def _by_process(report: ReportData, room: Room) -> list[str]:
    lines = []
    for found in processes.tables(report):
        sides = {name: "left" if name in found.left else "right" for name in found.columns}
        rows = [
            [code(cell) if name in found.left else cell for name, cell in zip(sides, row, strict=True)]
            for row in found.rows
        ]
        lines += [f"### {prose(found.title)}", "", *(table(sides, rows[: room.rows]) if rows else []), ""]
    return lines or ["One process.", ""]


def length(lines: Sequence[str]) -> int:
    """Bytes that ``lines`` take as UTF-8, never less than their characters."""
    return len("\n".join(lines).encode("utf-8", "replace")) + 1


def code(text: str) -> str:
    """``text`` as code, in a table too, with nothing in it taken for markup."""
    text = wording.plain(text)
    if len(text) > LONGEST_NAME:
        text = f"{text[: LONGEST_NAME // 2]} ... {text[-LONGEST_NAME // 2 :]}"
    text = text.strip()
    if not text:
        return ""
    if not re.search(r"[`|\\]", text):
        return f"`{text}`"
    return f"<code>{re.sub(r'[!-/:-@\[-`{-~]', lambda found: f'&#{ord(found[0])};', text)}</code>"


def prose(text: str) -> str:
    """``text`` as a sentence, with nothing in it taken for markup, a mention or a reference to an issue."""
    text = re.sub(r"[\\`*_{}\[\]<>()#+!|~&$]", r"\\\g<0>", wording.plain(text)[: 4 * LONGEST_NAME])
    return re.sub(r"@|\\#", "\\g<0>\u200b", text)


def linked(site: SiteRef, brief: bool = False) -> str:
    """The function of a site as code, a link to its source where that is known; ``brief`` for a column of a table."""
    name = code(wording.short(site.function, 28) if brief else site.function)
    if not name or not re.match(r"https?://[^\s]", site.url):
        return name
    url = re.sub(
        r"[^\w:/?#@!$&'*+,;=.~%-]",
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "replace")),
        site.url,
    )
    return f"[{name}]({url})"


def table(columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; ``columns`` maps each heading to ``left`` or ``right``."""
    rules = ["---:" if side == "right" else "---" for side in columns.values()]
    return ["| " + " | ".join(row) + " |" for row in (list(columns), rules, *rows)]


def _largest[T](items: Sequence[T], limit: int, weight: Callable[[T], Any]) -> list[T]:
    """The ``limit`` heaviest of ``items`` in their own order."""
    kept = sorted(range(len(items)), key=lambda index: weight(items[index]), reverse=True)[:limit]
    return [items[index] for index in sorted(kept)]


def _heaviest_paths(report: ReportData, room: Room) -> list[Path]:
    return _largest(
        report.paths, room.paths, lambda path: ((path.avoidable or 0) * path.payload_bytes, path.copied_bytes)
    )


def cut(lines: Sequence[str], limit: int, noun: str) -> list[str]:
    """The first ``limit`` lines, and how many more there were."""
    return [*lines[:limit], *_more(len(lines), limit, noun)]


def _more(total: int, shown: int, noun: str) -> list[str]:
    return ["", f"and {wording.plural(total - shown, noun)} more"] if total > shown else []


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:,.2f}"


# --- by path ---------------------------------------------------------------------------------------------------------


_STEPS = {
    "layer": "left",
    "function": "left",
    "what": "left",
    "bytes": "right",
    "x payload": "right",
    "held at peak": "right",
    "evidence": "left",
}


def _by_path(report: ReportData, room: Room) -> list[str]:
    paths = _heaviest_paths(report, room)
    lines = [line for path in paths for line in _path(path, report, room)]
    return [*lines, *_more(len(report.paths), len(paths), "path"), ""]


def _path(path: Path, report: ReportData, room: Room) -> list[str]:
    operations = f"{wording.plural(path.operations, 'operation')}, {wording.plural(path.chunks, 'chunk')}"
    lines = [
        f"### {code(' '.join(wording.heading(path).split()))}",
        "",
        f"{wording.verdict(path, report.coverage)}. Payload {path.payload_bytes:,} bytes, {operations}.",
        "",
    ]
    shown = _largest(path.steps, room.rows, lambda step: (step.avoidable_bytes, step.bytes))
    if shown:
        lines += table(_STEPS, [*(_step(step, report) for step in shown), _total(path, report)])
        lines += _more(len(path.steps), len(shown), "row")
        lines.append("")
    held = [
        f"- also held at peak: {buffer.peak_bytes:,} bytes ({buffer.role}), "
        f"{code(buffer.layer)} {code(buffer.site.function)}"
        for buffer in wording.idle(path)[: room.rows]
    ]
    remedies = [f"- {_remedy(known)}" for known in wording.advice(shown)]
    cautions = [f"- {prose(caution)}" for caution in processes.cautions(path)[: room.rows]]
    beneath = [*remedies, *held, *cautions]
    return [*lines, *beneath, *([""] if beneath else [])]


def _remedy(known: wording.Advice) -> str:
    """Which functions, where that was reported or mended (a link), and what to do."""
    functions = dict.fromkeys(code(f"{step.layer} {wording.short(step.site.function, 28)}") for step in known.steps)
    state = f"[{prose(known.state)}]({known.url})" if known.url else prose(known.state)
    return f"{wording.some(list(functions), 4)}: {state}{prose(known.text.removeprefix(known.state))}"


def _step(step: Step, report: ReportData) -> list[str]:
    return [
        code(step.layer) or "?",
        linked(step.site, brief=True) or "?",
        _what(step),
        f"{step.bytes:,}",
        _ratio(step.ratio),
        f"{step.at_peak_bytes:,}" if report.coverage.memray else "-",
        step.evidence,
    ]


def _what(step: Step) -> str:
    amount = wording.pieces(step.count, step.bytes) if step.count > 1 else ""
    guilt = wording.blame(step)
    return ", ".join(part for part in (step.kind, amount, f"**{guilt}**" if step.avoidable_bytes else guilt) if part)


def _total(path: Path, report: ReportData) -> list[str]:
    peak = f"**{path.extra_at_peak_bytes:,}**" if report.coverage.memray else "-"
    return ["", "", "**copied**", f"**{path.copied_bytes:,}**", f"**{_ratio(path.copies)}**", peak, ""]


# --- by layer and by site --------------------------------------------------------------------------------------------


def _by_layer(report: ReportData, room: Room) -> list[str]:
    paths = _heaviest_paths(report, Room(room.rows, min(room.paths, 12), room.details))
    layers = wording.by_bytes(report.layers)
    lines = [f"{number}. {code(' '.join(wording.heading(path).split()))}" for number, path in enumerate(paths, 1)]
    lines += [*_more(len(report.paths), len(paths), "path"), ""]
    columns = {"layer": "left", "project": "left", "bytes copied": "right", "count": "right"}
    columns |= {f"path {number}": "right" for number in range(1, len(paths) + 1)}
    rows = [
        [
            code(total.layer),
            code(total.project),
            f"{total.bytes:,}",
            f"{total.count:,}",
            *(_ratio(total.copies.get(path.label)) for path in paths),
        ]
        for total in layers[: room.rows]
    ]
    rows.append(["**copies**", "", "", "", *(_ratio(path.copies) for path in paths)])
    rows.append(["avoidable", "", "", "", *(_ratio(path.avoidable) for path in paths)])
    rows.append(
        [
            "extra at peak",
            "",
            "",
            "",
            *(_ratio(path.extra_at_peak if report.coverage.memray else None) for path in paths),
        ]
    )
    return [*lines, *table(columns, rows), *_more(len(layers), room.rows, "layer"), ""]


_SITES = {
    "layer": "left",
    "function": "left",
    "where": "left",
    "what": "left",
    "bytes": "right",
    "x payload": "right",
    "held at peak": "right",
    "evidence": "left",
    "avoidable": "right",
    "called from": "left",
    "path": "left",
}


def _by_site(report: ReportData, room: Room) -> list[str]:
    ranked = wording.by_guilt(report)
    if not ranked:
        return ["No copies.", ""]
    rows = []
    for step, path in ranked[: room.rows]:
        caller = next(iter(wording.callers(step)), None)
        layer, function, _, nbytes, ratio, peak, evidence = _step(step, report)
        amount = f"{step.kind}, {wording.pieces(step.count, step.bytes)}" if step.count > 1 else step.kind
        avoidable = "required" if step.required else f"{step.avoidable_bytes:,}"
        called_from = f"{code(caller.function)} {code(wording.place(caller))}" if caller else ""
        where = code(wording.place(step.site))
        rows.append(
            [layer, function, where, amount, nbytes, ratio, peak, evidence, avoidable, called_from, code(path.label)]
        )
    return [*table(_SITES, rows), *_more(len(ranked), room.rows, "row"), ""]


# --- what is the same for all ----------------------------------------------------------------------------------------


def _unseen(report: ReportData, room: Room) -> list[str]:
    return [
        "#### What could be seen",
        "",
        *(f"- {prose(sentence)}" for sentence in [*processes.told(report), *wording.sight(report)][: room.rows]),
        "",
    ]


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _environment(report: ReportData) -> list[str]:
    rows = ([code(key), code(value)] for key, value in wording.versions(report))
    return _folded("Environment", table({"what": "left", "version": "left"}, rows))


def _reproducer(environment: Mapping[str, Any]) -> list[str]:
    program = issue.reproducer(environment)
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", program)), 0)
    return _folded("Reproducer", [f"{fence}python", program, fence]) if program else []


def _stacks(report: ReportData, room: Room) -> list[str]:
    lines, ranked = [], wording.by_guilt(report)
    for step, path in ranked[: room.rows]:
        lines.append(f"- {code(step.layer)} {linked(step.site)} {code(wording.place(step.site))} on {code(path.label)}")
        lines += [
            f"  - {linked(caller)} {code(wording.place(caller))}" for caller in step.called_from[:30] if caller.function
        ]
    return _folded("Stacks", [*lines, *_more(len(ranked), room.rows, "stack")]) if lines else []
