"""A trace in a zip archive: a JSON header and plain numpy arrays, under a place of its own for each part."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.errors import CopytraceError
from copytrace.model import (
    MARK_DTYPE,
    MUTED,
    SEEN_DTYPE,
    SPAN_DTYPE,
    TRANSFER_DTYPE,
    Allocations,
    Frame,
    ProbeStatus,
    Process,
    SiteInfo,
    Trace,
    Transfers,
)

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = "copytrace.trace/1"
_HEADER = "trace.json"
_ALWAYS_READ = 1 << 28
"""Bytes that a trace may always unpack to."""
_MOST_TIMES = 400
"""How many times its own size a larger one may: 13 to 45 is what real traces of 0.2 to 5 MB unpack to."""
_COLUMNS: dict[str, str] = {
    "address": "<u8", "size": "<u8", "born": "<u8", "died": "<u8", "enter": "<u8", "leave": "<u8", "span": "<u8",
    "thread": "<u4", "stack": "<u4", "previous": "<i8", "moved": "|b1",
}  # fmt: skip
_TABLES = {"spans": SPAN_DTYPE, "seen": SEEN_DTYPE, "marks": MARK_DTYPE, "transfers": TRANSFER_DTYPE}


def place_of(part: int) -> str:
    """Where in an archive the part with this number is."""
    return f"processes/{part}/"


def holds(archive: zipfile.ZipFile, count: int) -> bool:
    """Whether there are ``count`` parts."""
    names = set(archive.namelist())
    return count <= len(names) and all(f"{place_of(part)}{_HEADER}" in names for part in range(count))


def write(trace: Trace, archive: zipfile.ZipFile, place: str = "") -> None:
    """Write a trace, but not its parts."""
    frames: dict[Frame, int] = {}
    stacks = [[frames.setdefault(frame, len(frames)) for frame in stack] for stack in trace.allocations.stacks]
    callers = [frames.setdefault(frame, len(frames)) for frame in trace.transfers.callers]
    header = {
        "schema": SCHEMA,
        "label": trace.label,
        "native": trace.native,
        "min_bytes": trace.min_bytes,
        "complete": trace.complete,
        "process": asdict(trace.process),
        "continued": trace.continued,
        "parts": len(trace.parts),
        "untraced": [asdict(process) for process in trace.untraced],
        "environment": trace.environment,
        "notes": trace.notes,
        "sites": [asdict(site) for site in trace.sites],
        "attributes": trace.attributes,
        "probes": [asdict(probe) for probe in trace.probes],
        "frames": [[f.function, f.file, f.line, f.native, f.layer] for f in frames],
        "allocations": {
            "recorded": trace.allocations.recorded,
            "reason": trace.allocations.reason,
            "records": trace.allocations.records,
            "stacks": stacks,
        },
        "transfers": {
            "callers": callers,
            "small": trace.transfers.small,
            "lost": trace.transfers.lost,
            "recorded": trace.transfers.recorded,
            "reason": trace.transfers.reason,
        },
    }
    archive.writestr(f"{place}{_HEADER}", json.dumps(header, separators=(",", ":"), default=str))
    tables = {"spans": trace.spans, "seen": trace.seen, "marks": trace.marks, "transfers": trace.transfers.rows}
    for name, table in tables.items():
        for field in table.dtype.names or ():
            _write_array(archive, f"{place}{name}/{field}", table[field])
    for name in _COLUMNS:
        _write_array(archive, f"{place}allocations/{name}", getattr(trace.allocations, name))


def _write_array(archive: zipfile.ZipFile, name: str, column: Any) -> None:
    """Columns that count upwards are kept as differences, which compress well."""
    data = np.ascontiguousarray(column)
    if data.dtype.kind in "ui" and data.dtype.itemsize == 8 and data.size:
        data = np.concatenate([data[:1], np.diff(data)])
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, data, allow_pickle=False)
    archive.writestr(f"{name}.npy", buffer.getbuffer())


def _read_array(archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any]) -> Any:
    """A column, whose header must declare what it is and how much follows."""
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise ValueError(f"{name} is of another version")
        shape, _, found = np.lib.format.read_array_header_1_0(member)
        if found != dtype or len(shape) != 1:
            raise ValueError(f"{name} has another type")
        column: Any = np.frombuffer(bytearray(member.read()), dtype)
    if len(column) != shape[0]:
        raise ValueError(f"{name} is cut short")
    if dtype.kind in "ui" and dtype.itemsize == 8:
        column = np.cumsum(column, dtype=dtype)
    return column


def check_size(archive: zipfile.ZipFile, packed: int) -> None:
    """Refuse what would unpack to far more than a trace of this size does."""
    members = archive.infolist()
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise ValueError("packed in another way")
    if sum(member.file_size for member in members) > max(_ALWAYS_READ, _MOST_TIMES * packed):
        raise ValueError("it would unpack to too much")


def read(archive: zipfile.ZipFile, source: Path, place: str = "") -> tuple[Trace, int]:
    """A trace without its parts, and how many of these its header announces.

    Raises CopytraceError, KeyError, TypeError, ValueError and others when it is damaged.
    """
    header = json.loads(archive.read(f"{place}{_HEADER}"))
    schema = str(header["schema"])
    if schema != SCHEMA:
        if schema.startswith("copytrace.trace/"):
            raise CopytraceError(f"{source}: written by another version ({schema}); this one reads {SCHEMA}")
        raise CopytraceError(f"{source}: not a copytrace trace")
    tables = {}
    for name, dtype in _TABLES.items():
        columns = {field: _read_array(archive, f"{place}{name}/{field}", dtype[field]) for field in dtype.names or ()}
        table = np.zeros(len(next(iter(columns.values()))), dtype)
        for field, column in columns.items():
            if len(column) != len(table):
                raise ValueError(f"{name} is uneven")
            table[field] = column
        tables[name] = table
    columns = {
        name: _read_array(archive, f"{place}allocations/{name}", np.dtype(kind)) for name, kind in _COLUMNS.items()
    }
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError("allocations are uneven")
    frames = [Frame(str(f[0]), str(f[1]), int(f[2]), bool(f[3]), str(f[4])) for f in header["frames"]]
    allocated, moved = header["allocations"], header["transfers"]
    stacks = tuple(tuple(frames[i] for i in stack) for stack in allocated["stacks"])
    _within(columns["stack"], len(stacks))
    _within(columns["previous"] + 1, len(columns["previous"]) + 1)
    _in_order(tables["spans"])
    _within(tables["spans"]["site"], len(header["sites"]))
    _within(tables["spans"]["attributes"], len(header["attributes"]))
    _within(tables["transfers"]["caller"], len(moved["callers"]))
    trace = Trace(
        spans=tables["spans"],
        seen=tables["seen"],
        marks=tables["marks"],
        sites=tuple(SiteInfo(**site) for site in header["sites"]),
        attributes=tuple(header["attributes"]),
        allocations=Allocations(
            **columns,
            stacks=stacks,
            recorded=bool(allocated["recorded"]),
            reason=str(allocated["reason"]),
            records=int(allocated["records"]),
        ),
        transfers=Transfers(
            tables["transfers"],
            tuple(frames[i] for i in moved["callers"]),
            tuple((int(a), int(b), int(c)) for a, b, c in moved["small"]),
            int(moved["lost"]),
            bool(moved["recorded"]),
            str(moved["reason"]),
        ),
        environment=dict(header["environment"]),
        probes=tuple(_probe(probe) for probe in header["probes"]),
        notes=tuple(map(str, header["notes"])),
        label=str(header["label"]),
        native=bool(header["native"]),
        min_bytes=int(header["min_bytes"]),
        complete=bool(header["complete"]),
        process=_process(header.get("process", {"name": "main"})),
        continued=bool(header.get("continued", False)),
        untraced=tuple(map(_process, header.get("untraced", ()))),
    )
    return trace, int(header.get("parts", 0))


def _probe(data: dict[str, Any]) -> ProbeStatus:
    known = {field.name for field in fields(ProbeStatus)}
    return ProbeStatus(**{**{k: v for k, v in data.items() if k in known}, "sites": tuple(data.get("sites", ()))})


def _process(data: dict[str, Any]) -> Process:
    return Process(**{field.name: str(data[field.name]) for field in fields(Process) if field.name in data})


def _in_order(spans: Any) -> None:
    """Spans are sorted by their numbers, and what a span is in began before it."""
    rise = np.all(spans["id"][1:] > spans["id"][:-1]) and np.all(spans["parent"] < spans["id"])
    if len(spans) and not (rise and spans["id"][-1] < MUTED):
        raise ValueError("spans are out of order")


def _within(column: Any, limit: int) -> None:
    if len(column) and (int(column.max()) >= max(limit, 1) or int(column.min()) < 0):
        raise ValueError("an index points outside its table")
