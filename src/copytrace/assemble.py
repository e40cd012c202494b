"""A spool directory -> a Trace: what the recorders left is read, put into one order and resolved to names."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace import allocations, recorder, transfers
from copytrace.allocations import Segment
from copytrace.errors import CopytraceError
from copytrace.frames import native_frame
from copytrace.layers import layer_of_module
from copytrace.model import ProbeStatus, SiteInfo, Trace, Transfers
from copytrace.places import relative

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEADER = "session.json"
_CUT_OFF = "the run did not end: this is what it had recorded until then"


def describe(spool: Path, **facts: Any) -> None:
    """Note in the spool what only the running process knows, so that a run that does not end can be read."""
    probes = [
        {each.name: getattr(probe, each.name) for each in fields(ProbeStatus)} for probe in facts.pop("probes", ())
    ]
    segments = [[segment.path.name, segment.first_mark, segment.native] for segment in facts.pop("segments", ())]
    temporary = spool / f"{HEADER}.new"
    temporary.write_text(json.dumps({**facts, "probes": probes, "segments": segments}, default=str))
    temporary.replace(spool / HEADER)


def assemble(
    spool: Path,
    segments: Sequence[Segment],
    *,
    environment: dict[str, Any],
    probes: tuple[ProbeStatus, ...],
    notes: Sequence[str],
    label: str,
    native: bool,
    min_bytes: int,
    reason: str = "",
    between: tuple[int, int] | None = None,
    complete: bool = True,
) -> Trace:
    """Read a spool. ``between`` are the sequences of the marks at which a session opened and closed; ``reason`` says
    why memray was absent.
    """
    moved, marks = transfers.read(spool)
    spans, seen, sites, attributes = recorder.read_spool(spool)
    spans = spans[np.argsort(spans["id"])]
    unread: list[str] = []
    if segments:
        (blocks,) = allocations.read(segments, marks, notes=unread)
    else:
        blocks = allocations.absent(reason)
    attributes = tuple(_with_layers(description) for description in attributes)
    moved = replace(moved, callers=tuple(native_frame(f.function, "", 0, f.file) for f in moved.callers))
    if between:
        first, last = between
        spans = spans[(spans["enter"] >= first) & (spans["enter"] <= last)]
        seen = seen[np.isin(seen["span"], spans["id"])]
        marks = marks[(marks["sequence"] >= first) & (marks["sequence"] <= last)]
        moved = _between(moved, first, last)
    used = set(np.unique(spans["site"]).tolist())
    return Trace(
        spans=spans,
        seen=seen,
        marks=marks,
        sites=tuple(_placed(site) if number in used else site for number, site in enumerate(sites)),
        attributes=attributes,
        allocations=blocks,
        transfers=moved,
        environment=environment,
        probes=probes,
        notes=(*notes, *unread),
        label=label,
        native=native,
        min_bytes=min_bytes,
        complete=complete,
    )


def _placed(site: SiteInfo) -> SiteInfo:
    """A site with the file and line of its definition, while its library is at hand."""
    parts = site.name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:size]))
        if found is None:
            continue
        for name in parts[size:]:
            found = inspect.getattr_static(found, name, None)
            found = getattr(found, "__func__", found)
        code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
        if code is not None:
            return replace(site, file=relative(code.co_filename)[0], line=code.co_firstlineno)
        break
    return site


def _with_layers(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Say of each caller that a probe noted which layer it is of, while its library is at hand."""
    found = dict(description)
    if "caller" in found:
        found["layer"] = layer_of_module(str(found["caller"]))
    if "called_from" in found:
        found["called_from"] = [[*caller[:3], layer_of_module(str(caller[0]))] for caller in found["called_from"]]
    return found


def _between(moved: Transfers, first: int, last: int) -> Transfers:
    inside = (moved.rows["sequence"] >= first) & (moved.rows["sequence"] <= last)
    return replace(moved, rows=moved.rows[inside])


def recover(spool: Path, *, ended: bool = False) -> Trace:
    """The trace of a run that did not end, or that ``ended`` without reading it, from its spool directory.

    Raises CopytraceError when the directory is not such a spool.
    """
    try:
        facts = json.loads((spool / HEADER).read_text())
        segments = [
            Segment(spool / Path(name).name, int(first), bool(native)) for name, first, native in facts["segments"]
        ]
        probes = tuple(ProbeStatus(**{**probe, "sites": tuple(probe["sites"])}) for probe in facts["probes"])
        if ended and not len(recorder.read_spool(spool)[0]):
            segments, facts["reason"] = [], "it moved no array"  # captures take long to read
        return assemble(
            spool,
            segments,
            environment=dict(facts["environment"]),
            probes=probes,
            notes=[*([] if ended else [_CUT_OFF]), *facts["notes"]],
            label=str(facts["label"]),
            native=bool(facts["native"]),
            min_bytes=int(facts["min_bytes"]),
            reason=str(facts["reason"]),
            complete=ended,
        )
    except FileNotFoundError as error:
        raise CopytraceError(f"{spool}: a directory, but not what a copytrace run leaves") from error
    except (ArithmeticError, AttributeError, LookupError, ValueError, TypeError) as error:
        raise CopytraceError(f"{spool}: damaged leftovers of a copytrace run ({type(error).__name__})") from error
