"""memray's own flame graph of the capture that a trace was made from, of all of it or of one path at its peak."""

from __future__ import annotations

import re
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace import operations
from copytrace.carried import outlives
from copytrace.errors import CopytraceError
from copytrace.processes import own_of_each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from copytrace.model import Trace


def directory(trace_file: str | Path) -> Path:
    """Where ``copytrace run --keep-capture`` puts the captures of a trace."""
    return Path(f"{trace_file}.memray")


def captures(trace_file: str | Path) -> list[Path]:
    """The captures of a trace, in order. Raises CopytraceError when there are none."""
    kept = sorted(directory(trace_file).glob("memray-*.bin"), key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
    if not kept:
        raise CopytraceError(f"{directory(trace_file)}: no capture; run the program with copytrace run --keep-capture")
    return kept


def render(trace: Trace, kept: Sequence[Path], path: str | None = None) -> str:
    """The flame graph as HTML: what was alive at the high-water mark of the capture, or, with the glob ``path``, what
    was allocated while operations of the paths that fit were open and alive when that held most.

    Raises CopytraceError when no path fits or the captures are not those of the trace.
    """
    from io import StringIO

    from memray import FileReader
    from memray.reporters.flamegraph import FlameGraphReporter

    with ExitStack() as stack:
        try:
            readers = [stack.enter_context(FileReader(one)) for one in kept]
            main = max(readers, key=lambda reader: reader.metadata.peak_memory)
            if path is None:
                records = list(main.get_high_watermark_allocation_records(merge_threads=True))
            else:
                records = _pick(readers, *_at_peak(trace, path))
            reporter = FlameGraphReporter.from_snapshot(
                records,
                memory_records=tuple(main.get_memory_snapshots()),
                native_traces=main.metadata.has_native_traces,
            )
        except (OSError, RuntimeError) as error:
            raise CopytraceError(f"{kept[0].parent}: a capture cannot be read ({error})") from None
        out = StringIO()
        reporter.render(out, main.metadata, show_memory_leaks=False, merge_threads=True, inverted=False, no_web=True)
    return out.getvalue()


def _at_peak(trace: Trace, glob: str) -> tuple[NDArray[np.int64], int]:
    """Positions in the captures, in order, of the allocations that make up the peak of the paths that fit, and how many
    records the captures hold.
    """
    fits, most, records = False, -1, 0
    living, at_peak = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for stretch in next(own_of_each(trace)):
        blocks = stretch.allocations
        inside = np.isin(blocks.born, living)
        for op in operations.group(stretch).by_root.values():
            if fnmatchcase(op.label, glob):
                fits = True
                inside |= (blocks.enter >= op.root.enter) & (blocks.enter < op.root.exit)
        rows = np.flatnonzero(inside)
        living = blocks.born[inside & outlives(blocks)]
        records = blocks.records
        if not len(rows):
            continue
        size = blocks.size[rows].astype(np.int64)
        position = np.concatenate([blocks.born[rows], blocks.died[rows]])
        change = np.concatenate([size, -size])
        order = np.lexsort((change, position))
        held = np.cumsum(change[order])
        if held.max() > most:
            most, moment = int(held.max()), position[order[int(np.argmax(held))]]
            alive = rows[(blocks.born[rows] <= moment) & (blocks.died[rows] > moment)]
            at_peak = np.sort(blocks.born[alive].astype(np.int64))
    if not fits:
        raise CopytraceError(f"--path {glob}: no path has such a label")
    if most < 0:
        raise CopytraceError(f"--path {glob}: nothing was allocated there")
    return at_peak, records


def _pick(readers: Sequence[Any], positions: NDArray[np.int64], total: int) -> list[Any]:
    wanted, picked, seen = set(positions.tolist()), [], 0
    for reader in readers:
        for record in reader.get_allocation_records():
            if seen in wanted:
                picked.append(record)
            seen += 1
    if seen != total:
        raise CopytraceError(f"the captures hold {seen:,} records, the trace was made from {total:,}: not the same run")
    return picked
