"""The trace file: a zip of a JSON header and plain numpy arrays, versioned, without pickles.

It is resolved: names of functions and libraries are in it, so it can be read on a machine that has none of them. A
directory ``FILE.partial``, what a run that did not end has left, is read as well.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from abc import ABC, abstractmethod
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.errors import CopytraceError
from copytrace.model import (
    MARK_DTYPE,
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
    from copytrace.report import Report

SCHEMA = "copytrace.trace/1"
_HEADER = "trace.json"
_PART = "processes/{}/"
"""Where in the archive the traces of other processes are, each in the form of the whole."""
_ALWAYS_READ = 1 << 28
"""Bytes that a trace may always unpack to."""
_MOST_TIMES = 400
"""How many times its own size a larger one may: 13 to 45 is what real traces of 0.2 to 5 MB unpack to."""
_COLUMNS: dict[str, str] = {
    "address": "<u8", "size": "<u8", "born": "<u8", "died": "<u8", "enter": "<u8", "leave": "<u8", "span": "<u8",
    "thread": "<u4", "stack": "<u4", "previous": "<i8", "moved": "|b1",
}  # fmt: skip
_TABLES = {"spans": SPAN_DTYPE, "seen": SEEN_DTYPE, "marks": MARK_DTYPE, "transfers": TRANSFER_DTYPE}


class LoadedTrace:
    """A trace that was read from a file. ``trace`` is the data, ``report`` what it says."""

    def __init__(self, trace: Trace, source: str = "") -> None:
        self.trace = trace
        self._source = source

    @cached_property
    def report(self) -> Report:
        """Raises CopytraceError when the file holds what no recorder writes."""
        from copytrace.processes import attribute
        from copytrace.report import Report
        from copytrace.reports.json import from_dict, to_dict

        if not self._source:
            return Report.from_data(attribute(self.trace))
        try:
            found = Report.from_data(attribute(self.trace))
            return from_dict(Report, to_dict(found), self._source)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise CopytraceError(f"{self._source}: damaged copytrace trace ({type(error).__name__})") from error


class Traced(ABC):
    """What has a :attr:`trace` once it is over: its report, and its file."""

    _loaded: LoadedTrace | None = None

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """What was recorded."""

    @property
    def report(self) -> Report:
        """What the trace says. Raises as :attr:`trace`."""
        trace = self.trace
        if self._loaded is None or self._loaded.trace is not trace:
            self._loaded = LoadedTrace(trace)
        return self._loaded.report

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the trace to ``path``. Raises CopytraceError when the file exists and ``overwrite`` is not set, and as
        :attr:`trace`.
        """
        save(self.trace, path, overwrite=overwrite)


def save(trace: Trace, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write ``trace`` to ``path`` at once or not at all.

    Raises CopytraceError when the file exists and ``overwrite`` is not set, or when it cannot be written.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise CopytraceError(f"{target}: the file exists; choose another name or overwrite it (-f)")
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise CopytraceError(f"{target}: cannot write there: {error.strerror}") from error
    try:
        with (
            os.fdopen(handle, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=4) as archive,
        ):
            _write(trace, archive)
            for number, part in enumerate(trace.parts):
                _write(part, archive, _PART.format(number))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        if overwrite:
            os.replace(temporary, target)
        else:
            os.link(temporary, target)
    except FileExistsError as error:
        raise CopytraceError(f"{target}: the file exists; choose another name or overwrite it (-f)") from error
    except OSError as error:
        raise CopytraceError(f"{target}: could not be written: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> LoadedTrace:
    """Read a trace file, or the ``.partial`` directory of a run that did not end.

    Raises CopytraceError, one line, when there is no such file or it is damaged, cut short, newer or no trace at all.
    """
    source = Path(path)
    if source.is_dir():
        from copytrace.assemble import recover
        from copytrace.follow import DIRECTORY, collect

        parts, untraced = collect(source / DIRECTORY)
        return LoadedTrace(replace(recover(source), parts=parts, untraced=untraced), str(source))
    try:
        with zipfile.ZipFile(source) as archive:
            _check_size(archive, source.stat().st_size)
            trace, count = _read(archive, source)
            parts = tuple(_read(archive, source, _PART.format(number))[0] for number in range(count))
            return LoadedTrace(replace(trace, parts=parts), str(source))
    except FileNotFoundError as error:
        partial = Path(f"{source}.partial")
        hint = f"; a run that did not end left {partial}" if partial.is_dir() else ""
        raise CopytraceError(f"{source}: no such file{hint}") from error
    except zipfile.BadZipFile as error:
        raise CopytraceError(f"{source}: not a copytrace trace, or cut short") from error
    except OSError as error:
        raise CopytraceError(f"{source}: cannot be read: {error.strerror}") from error
    except CopytraceError:
        raise
    except Exception as error:
        raise CopytraceError(f"{source}: damaged copytrace trace ({type(error).__name__})") from error


def _write(trace: Trace, archive: zipfile.ZipFile, place: str = "") -> None:
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


def _check_size(archive: zipfile.ZipFile, packed: int) -> None:
    """Refuse what would unpack to far more than a trace of this size does."""
    members = archive.infolist()
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise ValueError("packed in another way")
    if sum(member.file_size for member in members) > max(_ALWAYS_READ, _MOST_TIMES * packed):
        raise ValueError("it would unpack to too much")


def _read(archive: zipfile.ZipFile, source: Path, place: str = "") -> tuple[Trace, int]:
    """The trace of one process, and how many parts its header announces."""
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
    if len(spans) and not (np.all(spans["id"][1:] > spans["id"][:-1]) and np.all(spans["parent"] < spans["id"])):
        raise ValueError("spans are out of order")


def _within(column: Any, limit: int) -> None:
    if len(column) and (int(column.max()) >= max(limit, 1) or int(column.min()) < 0):
        raise ValueError("an index points outside its table")
