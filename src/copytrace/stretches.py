"""Where a long trace is cut: at moments at which no span is open. What lies between two cuts is a stretch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

LEAST = 30_000
"""Spans that a stretch has at least, apart from that of a shorter trace."""
FOREVER = 1 << 63
"""Later than every sequence."""

_BUSY_DTYPE = np.dtype([("enter", "<u8"), ("exit", "<u8"), ("spans", "<u8")])
"""From one moment at which no span is open to another; how many spans there are between."""
_FINER = 8


def begins(spans: Iterable[NDArray[Any]], least: int) -> list[int]:
    """The sequences of the marks at which stretches begin, apart from the first.

    ``spans`` are blocks of rows of ``SPAN_DTYPE``, more or less in the order in which they closed: of each no more is
    kept than some quiet moments. No span that entered before such a sequence exits after it.
    """
    busy = [_merged(_as_busy(block), -(-least // _FINER)) for block in spans if len(block)]
    found = _merged(np.concatenate(busy), least) if busy else np.zeros(0, _BUSY_DTYPE)
    if len(found) > 1 and found["spans"][-1] < least:
        found = found[:-1]
    beginning: list[int] = found["enter"][1:].tolist()
    return beginning


def _as_busy(spans: NDArray[Any]) -> NDArray[Any]:
    busy = np.ones(len(spans), _BUSY_DTYPE)
    busy["enter"], busy["exit"] = spans["enter"], spans["exit"]
    return busy


def _merged(busy: NDArray[Any], least: int) -> NDArray[Any]:
    """The same with those that overlap as one, and neighbours as one until there are ``least`` spans in each."""
    busy = busy[np.argsort(busy["enter"], kind="stable")]
    reach = np.maximum.accumulate(busy["exit"])
    told = np.cumsum(busy["spans"])
    last = np.append(np.flatnonzero(busy["enter"][1:] > reach[:-1]), len(busy) - 1)
    kept = []
    at = -1
    while at < len(last) - 1:
        before = int(told[last[at]]) if at >= 0 else 0
        at = min(int(np.searchsorted(told[last], before + least)), len(last) - 1)
        kept.append(int(last[at]))
    merged = np.zeros(len(kept), _BUSY_DTYPE)
    merged["enter"] = busy["enter"][[0, *(number + 1 for number in kept[:-1])]]
    merged["exit"] = reach[kept]
    merged["spans"] = np.diff(told[kept], prepend=np.uint64(0))
    return merged
