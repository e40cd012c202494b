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
_RECIPE = 2
"""Changes when what a run does or how it is measured changes."""
_PACKAGES = (
    *("zarr", "numcodecs", "obstore", "icechunk", "zarrista", "zarrs", "fsspec", "s3fs", "aiobotocore", "aiohttp"),
    *("botocore", "numpy", "memray"),
)


@dataclass(frozen=True, slots=True)
class Held:
    """An extra buffer or temporary at peak, in bytes."""

    layer: str
    function: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A step that copied. ``ratio`` is bytes over the payload."""

    kind: str
    layer: str
    function: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One write or read: ratios over the payload of ``payload_bytes``.

    ``extra_at_peak`` is what the path held, ``process_at_peak`` what the process did (clients and their models too),
    without the array itself: the latter is the figure of memray-array. ``named`` is the share of the extra bytes at
    peak whose layer and function are known, None where less than a hundredth of the payload is held.
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
    error: str = ""

    @property
    def key(self) -> str:
        """Names the run among those of a matrix."""
        return key_of(self.row, self.stage, self.compressed)


def key_of(row: str, stage: str, compressed: bool) -> str:
    """``zarr-local write compressed``."""
    return f"{row} {stage} {'compressed' if compressed else 'uncompressed'}"


def fingerprint(row: Configuration, shape: tuple[int, ...], stamp: str) -> str:
    """Tells whether a result that was kept is one of the same run."""
    facts = json.dumps([_RECIPE, asdict(row), DRIVERS[row.driver], list(shape), stamp], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def failed(row: str, stage: str, compressed: bool, mark: str, error: str) -> Figures:
    """A run that did not end well, and why."""
    return Figures(row, stage, compressed, mark, 0, 0.0, 0.0, 0.0, 0, None, (), (), {}, error)


def figures(row: str, stage: str, compressed: bool, mark: str, report: Mapping[str, Any], peak_bytes: int) -> Figures:
    """Read the figures off a report in the form of :meth:`copytrace.Report.to_dict` and the process' peak."""
    paths = [path for path in report["paths"] if path["direction"] == stage and path["payload_bytes"]]
    if not paths:
        return failed(row, stage, compressed, mark, "the report has no path in this direction")
    path = max(paths, key=lambda path: path["payload_bytes"])
    kept = [b for b in path["buffers"] if b["role"] in ("extra", "temporary") and b["peak_bytes"]]
    held = tuple(Held(b["layer"], b["site"]["function"], b["peak_bytes"]) for b in kept)
    copied = tuple(
        Copied(step["kind"], step["layer"], step["site"]["function"], step["ratio"])
        for step in path["steps"]
        if step["kind"] not in ("fetch", "flush") and step["ratio"]
    )
    whole = path["extra_at_peak_bytes"]
    packages = report["environment"]["packages"]
    return Figures(
        row=row,
        stage=stage,
        compressed=compressed,
        fingerprint=mark,
        payload_bytes=path["payload_bytes"],
        copies=path["copies"],
        extra_at_peak=path["extra_at_peak"],
        process_at_peak=(peak_bytes - (path["payload_bytes"] if stage == "read" else 0)) / path["payload_bytes"],
        best=path["best_achievable"],
        named=sum(h.bytes for h in held if h.layer and h.function) / whole
        if whole * 100 >= path["payload_bytes"]
        else None,
        held=tuple(sorted(held, key=lambda h: -h.bytes)),
        copied=copied,
        versions={name: packages[name] for name in _PACKAGES if name in packages},
    )


class Results:
    """The figures found so far, written to ``matrix.json`` in a directory after each run."""

    def __init__(self, directory: Path, table: str) -> None:
        self.path = directory / "matrix.json"
        self.table = table
        self.found: dict[str, Figures] = {}
        if self.path.exists():
            self._load()

    def _load(self) -> None:
        try:
            kept = json.loads(self.path.read_text())
            if kept["schema"] != SCHEMA:
                raise CopytraceError(f"{self.path}: is not of {SCHEMA}; choose another directory")
            if kept["table"] != self.table:
                raise CopytraceError(f"{self.path}: holds table {kept['table']!r}; choose another directory")
            for entry in kept["figures"]:
                held = tuple(Held(**one) for one in entry.pop("held"))
                copied = tuple(Copied(**one) for one in entry.pop("copied"))
                one = Figures(**entry, held=held, copied=copied)
                self.found[one.key] = one
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CopytraceError(f"{self.path}: damaged ({type(error).__name__}); remove it to begin anew") from error

    def has(self, key: str, mark: str) -> bool:
        """Whether a run ended well before, with the same row and size."""
        found = self.found.get(key)
        return found is not None and found.fingerprint == mark and not found.error

    def add(self, one: Figures) -> None:
        """Keep the figures of a run."""
        self.found[one.key] = one
        temporary = self.path.with_suffix(".new")
        entries = [asdict(figure) for figure in self.found.values()]
        temporary.write_text(json.dumps({"schema": SCHEMA, "table": self.table, "figures": entries}, indent=1))
        temporary.replace(self.path)
