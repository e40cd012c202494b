"""A spool directory -> a Trace: what the recorders left is read, put into one order and resolved to names."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace import allocations, stretches, transfers
from copytrace.allocations import Segment
from copytrace.errors import CopytraceError
from copytrace.frames import native_frame
from copytrace.layers import layer_of_module
from copytrace.model import MARK_DTYPE, ProbeStatus, SiteInfo, Trace
from copytrace.places import relative
from copytrace.spool import Spool
from copytrace.stretches import FOREVER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

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
) -> Iterator[Trace]:
    """Read a spool: the trace, of a long one the first stretch and then one after the other those that continue it.

    ``between`` are the sequences of the marks at which a session opened and closed; ``reason`` says why memray was
    absent.
    """
    moves, recorded = transfers.Recorded(spool), Spool(spool)
    opened, closed = between or (0, FOREVER - 1)
    inside = (block[(block["enter"] >= opened) & (block["enter"] <= closed)] for block in recorded.spans())
    cuts = stretches.begins(inside, stretches.LEAST)
    unread: list[str] = []
    blocks = allocations.read(segments, moves.marks(), cuts, unread) if segments else repeat(allocations.absent(reason))
    placed = cache(_placed)
    standing = _Standing()

    def stretch(number: int, first: int, until: int) -> Trace:
        own = next(blocks)
        if number == len(cuts) and segments:
            next(blocks, None)  # what could not be read is known at its end
        spans = recorded.between(first, until)
        seen = recorded.seen(spans)
        moved, marks = moves.between(first, until, small=not number)
        used, spans["site"] = _distinct(spans["site"])
        told, spans["attributes"] = _distinct(spans["attributes"])
        return Trace(
            spans=spans,
            seen=seen,
            marks=standing.before(marks),
            sites=tuple(placed(recorded.sites[site]) for site in used),
            attributes=tuple(map(_with_layers, recorded.attributes.chosen(told))),
            allocations=own,
            transfers=replace(moved, callers=tuple(native_frame(f.function, "", 0, f.file) for f in moved.callers)),
            environment=environment,
            probes=() if number else probes,
            notes=(*(() if number else notes), *(unread if number == len(cuts) else ())),
            label=label,
            native=native,
            min_bytes=min_bytes,
            complete=complete,
            continued=bool(number),
        )

    bounds = pairwise([opened, *cuts, closed + 1])
    yield from (stretch(number, first, until) for number, (first, until) in enumerate(bounds))


def _distinct(column: NDArray[Any]) -> tuple[list[int], NDArray[Any]]:
    """The distinct numbers in a column, rising, and the column with the place of each among them."""
    found, places = np.unique(column, return_inverse=True)
    return found.tolist(), places


class _Standing:
    """The last mark of each thread, where that is one of a span that no stretch has."""

    def __init__(self) -> None:
        self._last: NDArray[Any] = np.zeros(0, MARK_DTYPE)

    def before(self, marks: NDArray[Any]) -> NDArray[Any]:
        """The marks of the next stretch, and before them those that stand when it begins."""
        marks = np.concatenate([self._last, marks])
        _, newest = np.unique(marks["thread"][::-1], return_index=True)
        last = marks[np.sort(len(marks) - 1 - newest)]
        self._last = last[last["span"] != 0]
        return marks


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


def recover(spool: Path, *, ended: bool = False) -> Iterator[Trace]:
    """The trace of a run that did not end, or that ``ended`` without reading it, from its spool directory, as
    :func:`assemble` has it.

    Raises CopytraceError when the directory is not such a spool.
    """
    try:
        facts = json.loads((spool / HEADER).read_text())
        segments = [
            Segment(spool / Path(name).name, int(first), bool(native)) for name, first, native in facts["segments"]
        ]
        probes = tuple(ProbeStatus(**{**probe, "sites": tuple(probe["sites"])}) for probe in facts["probes"])
        if ended and not any(map(len, Spool(spool).spans())):
            segments, facts["reason"] = [], "it moved no array"  # captures take long to read
        yield from assemble(
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
