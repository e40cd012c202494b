"""What a trace tells other tools: cubed's memory model, and viewers of Chrome traces."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.errors import CopytraceError
from copytrace.processes import own_of_each
from copytrace.reports import wording

if TYPE_CHECKING:
    from copytrace.model import Path, ReportData, Trace

SLACK = 0.05
"""Extra memory of so many times the payload is noise, not another copy."""


def cubed(report: ReportData) -> str:
    """Python source that gives ``BufferCopies(read=, write=)`` of cubed's memory model for each store.

    A buffer copy is a whole chunk held beside the array, so the figures are the extra memory at peak over the payload,
    rounded up; of several paths on a store the highest. Raises CopytraceError when no path reads or writes an array,
    or allocations were not recorded.
    """
    if not report.coverage.memray:
        raise CopytraceError("allocations were not recorded, so memory held is not known; run without --no-memray")
    found: defaultdict[str, dict[str, list[Path]]] = defaultdict(lambda: {"read": [], "write": []})
    for path in report.paths:
        if path.direction in ("read", "write") and path.extra_at_peak is not None:
            found[path.store or path.api][path.direction].append(path)
    if not found:
        raise CopytraceError("no read or write of an array was recorded")
    lines = ["from cubed.primitive.memory import BufferCopies", "", "buffer_copies = {"]
    for store, paths in found.items():
        copies = {direction: max(map(_copies, some), default=None) for direction, some in paths.items()}
        for direction, some in paths.items():
            lines += [f"    # {_reason(path)}" for path in some]
            if not some:
                lines.append(f"    # no {direction} was recorded: 1 is what cubed assumes for a local store")
        read, write = (1 if copies[name] is None else copies[name] for name in ("read", "write"))
        lines.append(f"    {store!a}: BufferCopies(read={read}, write={write}),")
    return "\n".join([*lines, "}", ""])


def _copies(path: Path) -> int:
    return max(math.ceil((path.extra_at_peak or 0) - SLACK), 0)


def _reason(path: Path) -> str:
    several = path.chunks > path.operations
    caution = "; its operations span several chunks, cubed's tasks one: measure that" if several else ""
    return f"{wording.plain(path.label)}: {path.extra_at_peak:.2f} x the payload held at peak{caution}"


def chrome_trace(trace: Trace) -> str:
    """The spans of a trace as Chrome trace JSON (times in microseconds), for Perfetto, Speedscope or
    ``chrome://tracing``.

    Spans of one thread that overlap without lying in each other, as those of coroutines do, are put on lanes of their
    own.
    """
    threads: dict[int, int] = {}
    lanes: defaultdict[int, list[list[int]]] = defaultdict(list)
    numbers: dict[tuple[int, int], int] = {}
    events: list[dict[str, Any]] = []
    start: int | None = None
    for stretch in next(own_of_each(trace)):
        spans = stretch.spans
        for row in np.lexsort((-spans["ended"].astype(np.int64), spans["started"])).tolist():
            span = spans[row]
            thread = threads.setdefault(int(span["thread"]), len(threads) + 1)
            began, ended = int(span["started"]), int(span["ended"])
            start = began if start is None else start
            lane = _lane(lanes[thread], began, ended)
            number = numbers.setdefault((thread, lane), len(numbers) + 1)
            site = stretch.sites[int(span["site"])]
            details = {key: value for key, value in stretch.attributes[int(span["attributes"])].items() if value}
            if span["payload"]:
                details["payload_bytes"] = int(span["payload"])
            if span["error"]:
                details["error"] = True
            events.append(
                {
                    "name": site.name,
                    "cat": f"{site.library},{site.kind}",
                    "ph": "X",
                    "ts": (began - start) / 1e3,
                    "dur": (ended - began) / 1e3,
                    "pid": 1,
                    "tid": number,
                    "args": details,
                }
            )
    for (thread, lane), number in numbers.items():
        name = f"thread {thread}" + (f", lane {lane + 1}" if lane else "")
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, default=str)


def _lane(lanes: list[list[int]], began: int, ended: int) -> int:
    """The first lane on which the span lies within what is open there; each lane holds the ends of its open spans."""
    for number, open_ends in enumerate(lanes):
        while open_ends and open_ends[-1] <= began:
            open_ends.pop()
        if not open_ends or ended <= open_ends[-1]:
            open_ends.append(ended)
            return number
    lanes.append([ended])
    return len(lanes) - 1
