"""What one run of the matrix found, kept in a directory so that an interrupted matrix goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from copytrace.errors import CopytraceError
from copytrace.matrix.drivers import DRIVERS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from copytrace.matrix.configurations import Configuration

SCHEMA = "copytrace.matrix/1"
_RECIPE = 3
"""Changes when what a run does or how it is measured changes."""
_SMALLEST = 0.01
"""Share of the payload from which a copy or a buffer is kept."""
_CALLERS = 4
"""Callers of a copy that are kept."""
_PACKAGES = (
    *("zarr", "numcodecs", "obstore", "icechunk", "zarrista", "zarrs", "fsspec", "s3fs", "aiobotocore", "aiohttp"),
    *("botocore", "numpy", "memray"),
)


@dataclass(frozen=True, slots=True)
class Held:
    """An extra buffer or temporary at peak, in bytes. ``role`` is ``extra`` or ``temporary``."""

    role: str
    layer: str
    function: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A step that copied, as in :class:`copytrace.model.Step`. ``place`` is file and line, ``called_from`` functions,
    innermost first.
    """

    kind: str
    layer: str
    function: str
    place: str
    url: str
    called_from: tuple[str, ...]
    count: int
    bytes: int
    avoidable_bytes: int
    at_peak_bytes: int
    evidence: str
    remedy: str
    remedy_url: str


@dataclass(frozen=True, slots=True)
class Figures:
    """One write or read: ratios over the payload of ``payload_bytes``.

    ``extra_at_peak`` is what the path held: the figure of memray-array. ``process_at_peak`` is what all of the process
    did without the array itself, as a check. ``named`` is the share of the extra bytes at peak whose layer and function
    are known, None where less than a hundredth of the payload is held. ``recorded`` is False where there was no native
    hook, so that the copies are inferred. ``versions`` has Python's too.
    """

    row: str
    stage: str
    compressed: bool
    fingerprint: str
    payload_bytes: int
    copies: float
    extra_at_peak: float
    process_at_peak: float
    best: int
    named: float | None
    held: tuple[Held, ...]
    copied: tuple[Copied, ...]
    versions: Mapping[str, str]
    recorded: bool = True
    error: str = ""

    @property
    def key(self) -> str:
        """Names the run among those of a matrix."""
        return key_of(self.row, self.stage, self.compressed)


def key_of(row: str, stage: str, compressed: bool) -> str:
    """``zarr-local write compressed``."""
    return f"{row} {stage} {setting_of(compressed)}"


def setting_of(compressed: bool) -> str:
    """``compressed`` or ``uncompressed``."""
    return "compressed" if compressed else "uncompressed"


def fingerprint(row: Configuration, shape: tuple[int, ...], stamp: str) -> str:
    """Tells whether a result that was kept is one of the same run."""
    facts = json.dumps([_RECIPE, asdict(row), DRIVERS[row.driver], list(shape), stamp], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def failed(row: str, stage: str, compressed: bool, mark: str, error: str) -> Figures:
    """A run that did not end well, and why."""
    return Figures(row, stage, compressed, mark, 0, 0.0, 0.0, 0.0, 0, None, (), (), {}, error=error)


def figures(row: str, stage: str, compressed: bool, mark: str, report: Mapping[str, Any], peak_bytes: int) -> Figures:
    """Read the figures off a report in the form of :meth:`copytrace.Report.to_dict` and the process' peak."""
    paths = [path for path in report["paths"] if path["direction"] == stage and path["payload_bytes"]]
    if not paths:
        return failed(row, stage, compressed, mark, "the report has no path in this direction")
    path = max(paths, key=lambda path: path["payload_bytes"])
    payload, extra = path["payload_bytes"], path["extra_at_peak_bytes"]
    held = _held(path)
    environment = report["environment"]
    packages = environment["packages"]
    return Figures(
        row=row,
        stage=stage,
        compressed=compressed,
        fingerprint=mark,
        payload_bytes=payload,
        copies=path["copies"],
        extra_at_peak=path["extra_at_peak"],
        process_at_peak=(peak_bytes - (payload if stage == "read" else 0)) / payload,
        best=path["best_achievable"],
        named=round(sum(h.bytes for h in held if h.layer and h.function) / extra, 6)
        if extra >= _SMALLEST * payload
        else None,
        held=tuple(h for h in held if h.bytes >= _SMALLEST * payload),
        copied=tuple(_copied(step) for step in path["steps"] if _is_copy(step) and step["ratio"] >= _SMALLEST),
        versions={"python": environment["python"]} | {name: packages[name] for name in _PACKAGES if name in packages},
        recorded=report["coverage"]["transfers"],
    )


def _held(path: Mapping[str, Any]) -> list[Held]:
    """What was held at peak, added up by role, layer and function, the most first."""
    together: dict[tuple[str, str, str], int] = {}
    for buffer in path["buffers"]:
        if buffer["role"] in ("extra", "temporary") and buffer["peak_bytes"]:
            key = (buffer["role"], buffer["layer"], buffer["site"]["function"])
            together[key] = together.get(key, 0) + buffer["peak_bytes"]
    return sorted((Held(*key, nbytes) for key, nbytes in together.items()), key=lambda h: (-h.bytes, h.function))


def _is_copy(step: Mapping[str, Any]) -> bool:
    return step["kind"] not in ("fetch", "flush") and bool(step["ratio"])


def _copied(step: Mapping[str, Any]) -> Copied:
    site = step["site"]
    return Copied(
        kind=step["kind"],
        layer=step["layer"],
        function=site["function"],
        place=f"{site['file']}:{site['line']}" if site["file"] and site["line"] else site["file"],
        url=site["url"],
        called_from=tuple(caller["function"] for caller in step["called_from"][:_CALLERS]),
        count=step["count"],
        bytes=step["bytes"],
        avoidable_bytes=step["avoidable_bytes"],
        at_peak_bytes=step["at_peak_bytes"],
        evidence=step["evidence"],
        remedy=step["remedy"],
        remedy_url=step["remedy_url"],
    )


class Results:
    """The figures found so far of one table, written to ``TABLE.json`` in a directory after each run, a run a line."""

    def __init__(self, directory: Path, table: str) -> None:
        self.path = directory / f"{table}.json"
        self.table = table
        self.found: dict[str, Figures] = {}
        if self.path.exists():
            self.table, self.found = load(self.path)
            if self.table != table:
                raise CopytraceError(f"{self.path}: holds table {self.table!r}; choose another directory")

    def has(self, key: str, mark: str) -> bool:
        """Whether a run ended well before, with the same row and size."""
        found = self.found.get(key)
        return found is not None and found.fingerprint == mark and not found.error

    def add(self, one: Figures) -> None:
        """Keep the figures of a run."""
        self.found[one.key] = one
        lines = ",\n".join(json.dumps(asdict(figure)) for figure in self.found.values())
        temporary = self.path.with_suffix(".new")
        temporary.write_text(f'{{"schema": "{SCHEMA}", "table": "{self.table}", "figures": [\n{lines}\n]}}\n')
        temporary.replace(self.path)


def load(path: Path) -> tuple[str, dict[str, Figures]]:
    """The table whose results ``path`` holds, and the figures of each run by their keys.

    Raises CopytraceError when it holds none.
    """
    try:
        kept = json.loads(path.read_text("utf-8"))
        if kept["schema"] != SCHEMA:
            raise CopytraceError(f"{path}: is not of {SCHEMA}; choose another directory")
        runs = [_figures(entry) for entry in kept["figures"]]
        return str(kept["table"]), {run.key: run for run in runs}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CopytraceError(f"{path}: damaged ({type(error).__name__}); remove it to begin anew") from error


def _figures(entry: dict[str, Any]) -> Figures:
    held = tuple(Held(**one) for one in entry.pop("held"))
    copied = tuple(Copied(**{**one, "called_from": tuple(one["called_from"])}) for one in entry.pop("copied"))
    return Figures(**entry, held=held, copied=copied)


def holds_results(path: Path) -> bool:
    """Whether ``path`` looks like results of a matrix."""
    try:
        with path.open("rb") as stream:
            return SCHEMA.encode() in stream.read(200)
    except OSError:
        return False
