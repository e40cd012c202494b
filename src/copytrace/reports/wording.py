"""How sizes, names and verdicts are put into words, the same in every rendering."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from copytrace.model import COPY_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from copytrace.model import Buffer, Coverage, LayerTotal, Path, ReportData, SiteRef, Step

type Naming = Callable[[str], str]
"""How a rendering puts a name into a sentence, so that it cannot be taken for markup."""

FIRM_EVIDENCE = frozenset({"transfer", "pointer"})
NOTABLE = 0.02
"""Shares of the payload below this are not worth a line of their own."""

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def plain(text: str) -> str:
    """``text`` with control, format and unassigned characters escaped, so that it cannot drive a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char for char in text
    )


def size(nbytes: float) -> str:
    """``nbytes`` for people: MB (10^6 bytes) with one decimal, small ones in kB or B."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 99_950 else f"{nbytes / 1e6:,.1f} MB"


def times(ratio: float | None) -> str:
    """A ratio to the payload; ``-`` where there is none."""
    return "-" if ratio is None else f"{ratio:,.2f} x"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """``1 chunk``, ``12 chunks``; ``nouns`` is a plural that takes more than an s."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def pieces(count: int, nbytes: int) -> str:
    """``7 x 5.2 MB``: how many pieces of which mean size."""
    return f"{count:,} x {size(nbytes / count if count else 0)}"


def share(part: float) -> str:
    """A share in per cent, never rounded up to 100."""
    return f"{min(part * 100, 99.9) if part < 1 else 100:.1f} %"


def short(function: str, room: int = 40) -> str:
    """A Python name from its class on, or with its module's last part; a native name's last parts, within ``room``."""
    if method := re.fullmatch(r"<(?:.*::)?(\w+)(?:<.*>)? as .+>::(\w+)", function):
        return f"{method[1]}::{method[2]}"
    if "::" in function or " " in function:
        parts = [] if "<" in function or " " in function else function.split("::")
        while len(parts) > 2 and len("::".join(parts)) > room:
            del parts[0]
        return "::".join(parts) or function
    parts = function.replace(".<locals>", "").split(".")
    for index, part in enumerate(parts[:-1]):
        if part.lstrip("_")[:1].isupper():
            return ".".join(parts[index:])
    return ".".join(parts[-2:])


def heading(path: Path) -> str:
    """``read  zarr.Array <- LocalStore  zstd``."""
    api = re.sub(r"\.__\w+__$", "", path.api) or path.label
    arrow = "->" if path.direction in ("write", "encode") else "<-"
    codecs = [codec for codec in path.codecs if codec != "bytes"] or list(path.codecs)
    stack = f"{api} {arrow} {path.store}" if path.store else api
    return plain("  ".join(part for part in (path.direction, stack, "+".join(codecs)) if part))


def scale(path: Path) -> str:
    """``16.8 MB, 1 chunk``: how much the path moved."""
    operations = [plural(path.operations, "operation")] if path.operations != 1 else []
    return ", ".join([size(path.payload_bytes), *operations, plural(path.chunks, "chunk")])


def verdict(path: Path, coverage: Coverage) -> str:
    """How many copies the path made, how many would do, and what it held; one line."""
    if path.copies is None:
        copied = f"no payload to compare with; {size(path.copied_bytes)} copied"
    elif not path.copied_bytes:
        copied = "no copies"
    elif path.avoidable is not None and path.avoidable >= 0.005:
        copied = f"{_copies(path.copies)}, {path.best_achievable} would do"
    else:
        copied = f"{_copies(path.copies)}, none avoidable"
    return f"{copied}; {peak(path, coverage)}"


def peak(path: Path, coverage: Coverage) -> str:
    """``1.9 x extra at peak``, in bytes where there is no payload."""
    if not coverage.memray:
        return "peak not recorded"
    extra = size(path.extra_at_peak_bytes) if path.extra_at_peak is None else f"{path.extra_at_peak:.1f} x"
    return f"{extra} extra at peak"


def _copies(ratio: float) -> str:
    figure = f"{ratio:,.1f}" if ratio >= 0.05 else f"{ratio:.2g}"
    return f"{figure} {'copy' if figure == '1.0' else 'copies'}"


@dataclass(frozen=True, slots=True)
class Guilt:
    """What one function of one layer copies on a path: ``bytes`` in all or avoidable ones, as asked."""

    layer: str
    function: str
    bytes: int

    def describe(self, name: Naming = plain) -> str:
        """``zarr.buffer NDBuffer.__setitem__ (16.8 MB)``, the names put by ``name``."""
        return f"{name(f'{self.layer} {short(self.function, 28)}')} ({size(self.bytes)})"


def copies_of(path: Path) -> list[Step]:
    """The steps of ``path`` that are copies, fetches and flushes left out."""
    return [step for step in path.steps if step.kind in COPY_KINDS]


def guilty(steps: Iterable[Step], avoidable: bool = True) -> list[Guilt]:
    """The functions behind ``steps``, those with most (avoidable) bytes first, those with none left out."""
    totals: defaultdict[tuple[str, str], int] = defaultdict(int)
    for step in steps:
        totals[step.layer, step.site.function] += step.avoidable_bytes if avoidable else step.bytes
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return [Guilt(*key, nbytes) for key, nbytes in ranked if nbytes]


def by_guilt(report: ReportData) -> list[tuple[Step, Path]]:
    """All copies of a report with their paths, those with most avoidable bytes first."""
    rows = [(step, path) for path in report.paths for step in copies_of(path)]
    return sorted(rows, key=lambda row: (-row[0].avoidable_bytes, -row[0].bytes))


def by_bytes(layers: Iterable[LayerTotal]) -> list[LayerTotal]:
    """The layers, those that copy most first."""
    return sorted(layers, key=lambda total: (-total.bytes, total.layer))


def some(items: Sequence[str], limit: int = 2) -> str:
    """``a, b and 3 more``."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest:,} more" if rest > 0 else "")


def headline(report: ReportData, name: Naming = plain) -> str:
    """The report in one sentence: what can be avoided, and who can avoid it. ``name`` puts the names in it."""
    if not report.paths:
        return "Nothing to report: no operation on an array or a store was seen."
    wasteful = [path for path in report.paths if (path.avoidable or 0) >= 0.005]
    if not wasteful:
        return f"No avoidable copies on {plural(len(report.paths), 'path')}."
    worst = max(wasteful, key=lambda path: (path.avoidable or 0) * path.payload_bytes)
    several = f"{len(wasteful):,} of {len(report.paths):,} paths copy more than they need; most: "
    where = several if len(report.paths) > 1 else ""
    culprits = [culprit.describe(name) for culprit in guilty(copies_of(worst))]
    blamed = f", in {some(culprits)}" if culprits else ""
    stack = name(" ".join(heading(worst).split()))
    return f"{where}{stack}: {worst.avoidable:,.1f} of {_copies(worst.copies or 0)} avoidable{blamed}."


def held(step: Step) -> str:
    """``held at peak`` with its bytes where these are not about the step's; empty when nothing was held."""
    if not step.at_peak_bytes:
        return ""
    whole = 0.95 * step.bytes <= step.at_peak_bytes <= 1.05 * step.bytes
    return "held at peak" if whole else f"{size(step.at_peak_bytes)} held at peak"


def blame(step: Step) -> str:
    """``avoidable`` with its bytes where that is not the whole step; ``required``; or empty."""
    if step.required:
        return "required"
    if not step.avoidable_bytes:
        return ""
    return "avoidable" if step.avoidable_bytes >= 0.95 * step.bytes else f"{size(step.avoidable_bytes)} avoidable"


def callers(step: Step) -> list[SiteRef]:
    """The callers of a step, innermost first, without those that only repeat the function or the caller below."""
    seen, kept = {step.site.function}, []
    for caller in step.called_from:
        if caller.function and caller.function not in seen:
            seen.add(caller.function)
            kept.append(caller)
    return kept


@dataclass(frozen=True, slots=True)
class Advice:
    """What is known of copies on a path, and ``steps``, the copies that it is about."""

    text: str
    url: str
    steps: tuple[Step, ...]

    @property
    def state(self) -> str:
        """The first part of the text: ``fixed in obstore 0.11.1 (obstore#771)``."""
        return state_of(self.text)


def state_of(remedy: str) -> str:
    """``fixed in obstore 0.11.1 (obstore#771)``: a remedy without the advice that follows its colon."""
    return remedy.partition(": ")[0]


def advice(steps: Iterable[Step]) -> list[Advice]:
    """The remedies of ``steps``, each once, in the order of the steps."""
    found: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        if step.remedy:
            found.setdefault((step.remedy, step.remedy_url), []).append(step)
    return [Advice(*known, tuple(about)) for known, about in found.items()]


def place(site: SiteRef) -> str:
    """``zarr/core/buffer/cpu.py:191``; empty when there is no file."""
    return plain(f"{site.file}:{site.line}" if site.file and site.line else site.file)


def idle(path: Path) -> list[Buffer]:
    """Buffers alive at the path's peak that no step fills: temporaries and buffers whose filling was not seen."""
    filled = {step.destination for step in path.steps}
    floor = NOTABLE * path.payload_bytes
    return [
        buffer
        for buffer in path.buffers
        if buffer.role in ("extra", "temporary") and buffer.id not in filled and buffer.peak_bytes > floor
    ]


def cautions(path: Path) -> list[str]:
    """What a reader of this path must know beside its steps: errors, amplification, what stayed unnamed, notes."""
    found = []
    if path.errors:
        found.append(f"{path.errors:,} of {plural(path.operations, 'operation')} ended with an error")
    amplified = [
        f"{times(ratio)} {what}"
        for ratio, what in ((path.read_amplification, "fetched"), (path.decode_amplification, "decoded"))
        if ratio is not None and ratio >= 1.05
    ]
    if amplified:
        found.append(f"read amplification: {' and '.join(amplified)} for each byte returned")
    if path.unattributed_bytes:
        found.append(f"{size(path.unattributed_bytes)} of extra memory or moves belong to no layer that could be named")
    if path.explained is not None and path.explained < 0.99:
        found.append(f"the steps explain {share(path.explained)} of the bytes seen moving")
    return found + [plain(note) for note in path.notes]


def sight(report: ReportData) -> list[str]:
    """What could be seen and what could not, one sentence an item."""
    coverage = report.coverage
    allocations = (
        f"by memray, {'with' if coverage.native else 'without'} native traces" if coverage.memray else "not recorded"
    )
    lines = [
        f"allocations: {allocations}",
        f"transfers: {'recorded' if coverage.transfers else 'not recorded, inferred from probes and allocations'}",
    ]
    if coverage.lost_transfers:
        lines.append(f"{plural(coverage.lost_transfers, 'transfer')} lost: figures are lower bounds")
    if coverage.explained is not None:
        lines.append(f"the steps explain {share(coverage.explained)} of the bytes moved between buffers of the payload")
    if coverage.unattributed_bytes:
        lines.append(f"{size(coverage.unattributed_bytes)} belong to no layer that could be named")
    if coverage.off_path_bytes:
        moved = f"{size(coverage.off_path_bytes)} in {plural(coverage.off_path_moves, 'move')}"
        lines.append(f"{moved} led near no payload and are on no path")
    lines += _probes(coverage)
    return lines + [plain(note) for note in (*coverage.notes, *report.notes)]


def _probes(coverage: Coverage) -> list[str]:
    attached = [probe.name for probe in coverage.probes if probe.status == "attached"]
    absent = [probe.name for probe in coverage.probes if probe.status in ("not-installed", "not-imported")]
    lines = [plain(f"probes attached: {', '.join(attached) or 'none'}")]
    if absent:
        lines.append(plain(f"not imported here: {some(absent, 4)}"))
    for probe in coverage.probes:
        if probe.status not in ("attached", "not-installed", "not-imported"):
            missing = [site["name"] for site in probe.sites if site.get("status") in ("missing", "failed")]
            reason = probe.reason or (f"no {some(missing, 3)}" if missing else "")
            lines.append(plain(f"{probe.name} {probe.version} {probe.status}" + (f": {reason}" if reason else "")))
    return lines


def versions(report: ReportData) -> list[tuple[str, str]]:
    """Python, platform and packages with their versions, and which packages did not come from a package index."""
    environment = report.environment
    packages = environment.get("packages")
    told = [(key, str(value)) for key, value in environment.items() if isinstance(value, str | int | float | bool)]
    own = environment.get("from_source") or ()
    for name, version in packages.items() if isinstance(packages, dict) else ():
        told.append((str(name), f"{version}, not from a package index" if name in own else str(version)))
    return told


def next_command(report: ReportData, by: str, file: str) -> str:
    """The command that serves a reader of this report best, with what it is for."""
    if not report.paths:
        return "copytrace doctor    (which probes attach, and why not)"
    if not file:
        return "copytrace run SCRIPT    (a program of your own)"
    wasteful = any((path.avoidable or 0) >= 0.005 for path in report.paths)
    if by == "path" and wasteful:
        return f"copytrace report {file} --by-site    (where to look)"
    if wasteful:
        return f"copytrace report {file} --format markdown    (for an issue)"
    most = max((path.copies or 0 for path in report.paths), default=0)
    return f"copytrace check {file} --max-copies {most:.2f}    (keep it so)"
