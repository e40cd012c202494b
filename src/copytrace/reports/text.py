"""The report for a terminal: plain text of a given width, coloured on request."""

from __future__ import annotations

from io import StringIO
from textwrap import wrap
from typing import TYPE_CHECKING

from copytrace.reports import processes, wording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from copytrace.model import Path, ReportData, SiteRef, Step

type Span = tuple[str, str]
"""A text and its rich style, empty for none."""

NARROWEST = 60
SCREEN = 24
"""Lines that a terminal shows at once; a longer report says its verdicts again at the end."""
WORST = 6
"""Paths that are named where only the worst are."""
TIED = "\0"
"""A space at which no line is broken."""


class Page:
    """Lines of styled text of at most ``width`` columns."""

    def __init__(self, width: int) -> None:
        self.width = max(width, NARROWEST)
        self.lines: list[list[Span]] = []

    def line(self, *spans: Span) -> None:
        """Add a line; what does not fit is cut off."""
        room, kept = self.width, []
        for text, style in spans:
            fitted = fit(text, room, keep_end=False)
            room -= columns(fitted)
            kept.append((fitted, style))
        self.lines.append(kept)

    def flow(self, text: str, indent: int = 0, style: str = "", hang: int = 2) -> None:
        """Add ``text`` on as many lines as it takes, those after the first indented by ``hang`` more."""
        before, after = " " * indent, " " * (indent + hang)
        width = self.width - (columns(text.replace(TIED, " ")) - len(text))
        for row in wrap(text, width, initial_indent=before, subsequent_indent=after, break_on_hyphens=False):
            self.line((row.replace(TIED, " "), style))

    def items(self, parts: Sequence[str], separator: str, indent: int, style: str = "") -> None:
        """Add the non-empty of ``parts``, broken between lines where one ends if each fits on a line."""
        told = [part for part in parts if part]
        if all(columns(part) <= self.width - indent - 4 for part in told):
            told = [part.replace(" ", TIED) for part in told]
        self.flow(separator.join(told), indent, style)

    def blank(self) -> None:
        self.lines.append([])

    def to_str(self, color: bool) -> str:
        """The lines, each ended by a newline; with ``color`` as ANSI sequences."""
        if not color:
            return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in self.lines)
        from rich.console import Console
        from rich.text import Text

        out = StringIO()
        console = Console(file=out, force_terminal=True, color_system="standard", width=self.width)
        for line in self.lines:
            console.print(Text.assemble(*line), soft_wrap=True, highlight=False)
        return out.getvalue()


def columns(text: str) -> int:
    """How many terminal columns ``text`` takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fit(text: str, room: int, keep_end: bool = True) -> str:
    """``text`` in at most ``room`` columns: the end that says more is kept, the other one becomes ``...``."""
    if columns(text) <= room:
        return text
    dots = "..."[: max(room, 0)]
    while text and columns(text) + len(dots) > room:
        text = text[1:] if keep_end else text[:-1]
    return dots + text if keep_end else text + dots


def pad(text: str, room: int) -> str:
    """``text`` cut or filled up to exactly ``room`` columns."""
    text = fit(text, room)
    return text + " " * (room - columns(text))


def render(report: ReportData, by: str, width: int, color: bool, file: str) -> str:
    """The report as text, grouped by ``path``, ``layer``, ``site`` or ``process``; raises ValueError for another
    ``by``.
    """
    sections: dict[str, Callable[[Page, ReportData], None]] = {
        "path": _by_path,
        "layer": _by_layer,
        "site": _by_site,
        "process": _by_process,
    }
    if by not in sections:
        raise ValueError(f"by={by!r}: choose path, layer, site or process")
    page = Page(width)
    page.flow(wording.headline(report), style="bold")
    if report.paths:
        sections[by](page, report)
    page.blank()
    page.line(("What could be seen", "bold"))
    for sentence in (*processes.told(report), *wording.sight(report)):
        page.flow(sentence, indent=2)
    if len(page.lines) >= SCREEN:
        page.blank()
        _verdicts(page, report)
    command = f"Next: {wording.next_command(report, by, wording.plain(file))}"
    page.flow(command if columns(command) <= page.width else command.partition("    (")[0], style="bold", hang=6)
    return page.to_str(color)


def _verdicts(page: Page, report: ReportData) -> None:
    """The headline and, of several paths, a line for each of the worst."""
    page.flow(wording.headline(report), style="bold")
    if len(report.paths) > 1:
        worst = sorted(report.paths, key=lambda path: -(path.avoidable or 0) * path.payload_bytes)[:WORST]
        for path in sorted(worst, key=report.paths.index):
            page.flow(f"{wording.heading(path)}: {wording.verdict(path, report.coverage)}", indent=2)
        if len(report.paths) > WORST:
            page.flow(f"and {wording.plural(len(report.paths) - WORST, 'path')} more", indent=2)


def summary(report: ReportData, width: int, color: bool, file: str) -> str:
    """What to say when a run has ended: the verdict, a line for each of the worst paths, the next command."""
    page = Page(width)
    _verdicts(page, report)
    command = f"report {wording.plain(file)}" if report.paths else "doctor"
    page.flow(f"Next: copytrace {command}", style="bold", hang=6)
    return page.to_str(color)


# --- by path ---------------------------------------------------------------------------------------------------------


def _by_path(page: Page, report: ReportData) -> None:
    for path in report.paths:
        page.blank()
        _heading(page, path)
        _chain(page, path)
        wasteful = (path.avoidable or 0) >= 0.005
        page.flow(wording.verdict(path, report.coverage), indent=2, style="bold red" if wasteful else "bold green")
        for buffer in wording.idle(path):
            what = "temporary" if buffer.role == "temporary" else "filled by no move seen"
            owner = wording.plain(f"{buffer.layer}  {wording.short(buffer.site.function)}")
            page.flow(f"also held at peak: {wording.size(buffer.peak_bytes)} by {owner} ({what})", indent=2)
        for caution in processes.cautions(path):
            page.flow(caution, indent=2, style="yellow")


def _heading(page: Page, path: Path) -> None:
    name, amount = wording.heading(path), wording.scale(path)
    gap = page.width - columns(name) - columns(amount)
    if gap >= 2:
        page.line((name, "bold"), (" " * gap + amount, ""))
    else:
        page.flow(name, style="bold", hang=6)
        page.line((amount.rjust(page.width), ""))


def _chain(page: Page, path: Path) -> None:
    sources = _sources(path)
    numbered = any(source.startswith("#") for source in sources)
    number = len(str(len(path.steps))) + 1 if numbered else 0
    left = max((len(source) for source in sources), default=0)
    sizes = [wording.size(step.bytes) for step in path.steps]
    ratios = [wording.times(step.ratio) for step in path.steps]
    size, ratio = (max(map(len, cells), default=0) for cells in (sizes, ratios))
    prefix = 2 + number + left + 4
    room = page.width - prefix - (2 + 7 + 2 + size + 2 + ratio)
    told: set[str] = set()
    for index, (step, source) in enumerate(zip(path.steps, sources, strict=True)):
        ordinal = f"{index + 1}".rjust(number - 1) + " " if numbered else ""
        layer = wording.plain(step.layer or "?")
        left_over = room - columns(layer) - 2
        function = pad(wording.plain(wording.short(step.site.function, left_over)), left_over)
        page.line(
            (f"  {ordinal}{source.ljust(left)} -> ", ""),
            (layer, "cyan"),
            (f"  {function}", ""),
            (f"  {step.kind:<7}  {sizes[index]:>{size}}  {ratios[index]:>{ratio}}", ""),
        )
        _remarks(page, step, prefix + 2, told)


def _sources(path: Path) -> list[str]:
    """What to write before each step's arrow: where its bytes come from, nothing when the last step put them there."""
    roles = {buffer.id: buffer.role for buffer in path.buffers}
    origin = {"write": "array", "read": "store"}.get(path.direction, "input")
    filled: dict[str, int] = {}
    sources, previous = [], None
    for number, step in enumerate(path.steps, 1):
        if step.source is None:
            name = "file" if step.kind == "fetch" else "?"
        elif step.source == previous:
            name = ""
        elif step.source in filled:
            name = f"#{filled[step.source]}"
        else:
            name = {"source": origin, "result": "result", "io": "file"}.get(roles.get(step.source, ""), "?")
        sources.append(name)
        previous = step.destination
        if previous is not None:
            filled[previous] = number
    return sources


def _remarks(page: Page, step: Step, indent: int, told: set[str]) -> None:
    """What sets this step apart, beneath it: guilt first. A remedy that was ``told`` is not told in full again."""
    parts = [wording.blame(step), wording.held(step)]
    if step.count > 1:
        parts.append(wording.pieces(step.count, step.bytes))
    if step.evidence not in wording.FIRM_EVIDENCE:
        parts.append(f"evidence {step.evidence}")
    page.items(parts, ", ", indent, style="red" if step.avoidable_bytes else "yellow" if step.at_peak_bytes else "")
    callers = wording.callers(step)
    if callers and not step.site.function.endswith(callers[0].function):
        where = wording.place(callers[0])
        called_from = f"called from {wording.plain(wording.short(callers[0].function))}"
        page.flow(called_from + (f"  {where}" if where else ""), indent, style="dim")
    if step.remedy:
        again = f"{wording.state_of(step.remedy)}, as above"
        page.flow(wording.plain(again if step.remedy in told else step.remedy), indent, style="green")
        told.add(step.remedy)


# --- by layer --------------------------------------------------------------------------------------------------------


def _by_layer(page: Page, report: ReportData) -> None:
    page.blank()
    for number, path in enumerate(report.paths, 1):
        page.line((f"{number:>3}  ", "cyan"), (f"{wording.heading(path)}  {wording.scale(path)}", ""))
    name = min(max([len("extra at peak"), *(columns(wording.plain(total.layer)) for total in report.layers)]), 24)
    cell = max(9, *(2 + len(wording.times(path.copies)) for path in report.paths))
    across = max((page.width - name - 21) // cell, 1)
    for start in range(0, len(report.paths), across):
        _layer_table(page, report, range(start, min(start + across, len(report.paths))), name, cell)


def _layer_table(page: Page, report: ReportData, numbers: range, name: int, cell: int) -> None:
    """Layers down, the paths of ``numbers`` across: copies of each path's payload."""
    paths = [report.paths[number] for number in numbers]
    page.blank()
    head = "".join(f"{f'path {number + 1}':>{cell}}" for number in numbers)
    page.line((f"{'layer'.ljust(name)}  {'copied':>10}  {'count':>7}{head}", "bold"))

    def row(label: str, nbytes: str, count: str, ratios: Sequence[float | None], style: str) -> None:
        figures = "".join(f"{wording.times(ratio):>{cell}}" for ratio in ratios)
        page.line((pad(label, name), style), (f"  {nbytes:>10}  {count:>7}{figures}", ""))

    for total in wording.by_bytes(report.layers):
        ratios = [total.copies.get(path.label) for path in paths]
        if len(paths) == len(report.paths) or any(ratio is not None for ratio in ratios):
            row(wording.plain(total.layer), wording.size(total.bytes), f"{total.count:,}", ratios, "cyan")
    copied = sum(path.copied_bytes for path in report.paths)
    row("all", wording.size(copied), "", [path.copies for path in paths], "bold")
    row("avoidable", "", "", [path.avoidable for path in paths], "bold")
    if report.coverage.memray:
        row("extra at peak", "", "", [path.extra_at_peak for path in paths], "bold")


# --- by site ---------------------------------------------------------------------------------------------------------


def _by_site(page: Page, report: ReportData) -> None:
    sites: dict[tuple[str, SiteRef, str, tuple[SiteRef, ...]], list[tuple[Step, Path]]] = {}
    for step, path in wording.by_guilt(report):
        sites.setdefault((step.layer, step.site, step.kind, step.called_from), []).append((step, path))
    for (layer, site, kind, _), moves in sites.items():
        page.blank()
        owner = wording.plain(layer or "?")
        page.line((owner, "cyan"), ("  " + fit(wording.plain(site.function), page.width - columns(owner) - 2), ""))
        if place := wording.place(site):
            page.line(("  " + fit(place, page.width - 2), ""))
        for step, path in moves:
            amount = f"{wording.pieces(step.count, step.bytes)} = " if step.count > 1 else ""
            figures = [
                f"{kind} {amount}{wording.size(step.bytes)}, {wording.times(step.ratio)}",
                wording.blame(step),
                wording.held(step),
                f"evidence {step.evidence}",
                f"on {wording.heading(path)}",
            ]
            page.items(figures, "; ", 2, style="red" if step.avoidable_bytes else "")
        if moves[0][0].remedy:
            page.flow(wording.plain(moves[0][0].remedy), 2, style="green")
        for caller in wording.callers(moves[0][0]):
            page.items([f"called from {wording.plain(caller.function)}", wording.place(caller)], "  ", 4, style="dim")
    if not sites:
        page.blank()
        page.line(("No copies.", ""))


# --- by process ------------------------------------------------------------------------------------------------------


def _by_process(page: Page, report: ReportData) -> None:
    found = processes.tables(report)
    for table in found:
        page.blank()
        page.flow(table.title, style="cyan")
        if table.rows:
            _table(page, table)
    if not found:
        page.blank()
        page.line(("One process.", ""))


def _table(page: Page, table: processes.Table) -> None:
    """Rows beneath their headings; the first column has what room the others leave."""
    widths = [max(columns(cell) for cell in cells) for cells in zip(table.columns, *table.rows, strict=True)]
    widths[0] = max(min(widths[0], page.width - 2 - sum(width + 2 for width in widths[1:])), 10)
    for row in (table.columns, *table.rows):
        cells = [
            pad(cell, width) if name in table.left else cell.rjust(width)
            for name, cell, width in zip(table.columns, row, widths, strict=True)
        ]
        page.line(("  " + "  ".join(cells), "bold" if row is table.columns else ""))
