"""Spans of tasks -> what each task moved and held. Pure: no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.model import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from copytrace.model import Trace
    from copytrace.operations import Operations
    from copytrace.tree import SpanView


def tell(trace: Trace, ops: Operations, copied: Mapping[int, int]) -> tuple[Task, ...]:
    """The tasks of a trace in the order in which they began; ``copied`` maps the span of an operation to the bytes that
    it copied.
    """
    named = np.flatnonzero(ops.spans.described(lambda attributes: "task" in attributes))
    spans = sorted(ops.spans.at(named), key=lambda span: span.enter)
    if not spans:
        return ()
    inside = {span.id: set(ops.spans.beneath(span.id)) for span in spans}
    found = []
    for span in spans:
        roots = [op for op in ops.by_root.values() if op.root.id in inside[span.id]]
        alone = not any(other is not span and _overlap(span, other) for other in spans)
        found.append(
            Task(
                key=str(span.attributes["task"]),
                error=span.error,
                operations=len(roots),
                payload_bytes=sum(op.payload for op in roots),
                copied_bytes=sum(copied.get(op.root.id, 0) for op in roots),
                peak_bytes=_peak(trace, span, inside[span.id], alone) if trace.allocations.recorded else None,
                paths=tuple(dict.fromkeys(op.label for op in roots)),
            )
        )
    return tuple(found)


def numbered(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """The same with the attempts at each key counted in their order."""
    seen: Counter[str] = Counter()
    counted = []
    for task in tasks:
        seen[task.key] += 1
        counted.append(replace(task, attempt=seen[task.key]))
    return tuple(counted)


def projected(tasks: tuple[Task, ...], plan: Any) -> tuple[Task, ...]:
    """The same with the bytes that ``plan`` has for each: it maps the first word of a key to bytes."""
    if not isinstance(plan, dict):
        return tasks
    known = {name: nbytes for name, nbytes in plan.items() if isinstance(nbytes, int) and nbytes >= 0}
    return tuple(replace(task, projected_bytes=known.get(task.key.partition(" ")[0])) for task in tasks)


def _overlap(one: SpanView, other: SpanView) -> bool:
    return one.enter < other.exit and other.enter < one.exit


def _peak(trace: Trace, span: SpanView, inside: set[int], alone: bool) -> int:
    """The most bytes alive at once of what was allocated while the task ran: by calls that it made, and, where no other
    task ran, by threads that nobody called.
    """
    blocks = trace.allocations
    own = np.isin(blocks.span, np.fromiter(inside, np.uint64, len(inside)))
    if alone:
        own |= blocks.span == 0
    rows = np.flatnonzero(own & (blocks.enter >= span.enter) & (blocks.enter < span.exit))
    if not len(rows):
        return 0
    size = blocks.size[rows].astype(np.int64)
    position = np.concatenate([blocks.born[rows], blocks.died[rows]])
    change = np.concatenate([size, -size])
    order = np.lexsort((change, position))
    return int(np.cumsum(change[order]).max())
