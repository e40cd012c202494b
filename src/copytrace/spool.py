"""What the recorder left in a spool directory, read a part at a time."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.model import MUTED, SEEN_DTYPE, SPAN_DTYPE, SiteInfo
from copytrace.pending import Spooled
from copytrace.recorder import ATTRIBUTES, FILES, SEEN, SITES, SPANS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_ROWS = 1 << 14
_LINES = 1 << 8
_BYTES = 1 << 20


class Spool:
    """A spool, also one that was cut off in the middle of a row: it is read up to there.

    Raises FileNotFoundError when there is none.
    """

    def __init__(self, spool: Path) -> None:
        lines = (spool / SITES).read_bytes().split(b"\n")[:-1]
        self.sites = tuple(map(_site, lines))
        self.attributes = Lines(Spooled(spool, ATTRIBUTES, FILES[ATTRIBUTES]))
        self._spans = Table(Spooled(spool, SPANS, FILES[SPANS]), SPAN_DTYPE, "enter")
        self._seen = Table(Spooled(spool, SEEN, FILES[SEEN]), SEEN_DTYPE, "span")

    def spans(self) -> Iterator[NDArray[Any]]:
        """All spans, in blocks, in the order in which they closed."""
        return map(self._whole, self._spans.blocks())

    def between(self, first: int, until: int) -> NDArray[Any]:
        """The spans that entered at the sequence ``first`` or later and before ``until``, in the order of their ids."""
        spans = self._whole(self._spans.between(first, until))
        return spans[np.argsort(spans["id"], kind="stable")]

    def seen(self, spans: NDArray[Any]) -> NDArray[Any]:
        """The buffers that were seen in spans, given in the order of their ids."""
        if not len(spans):
            return np.zeros(0, SEEN_DTYPE)
        seen = self._seen.between(int(spans["id"][0]), int(spans["id"][-1]) + 1)
        return seen[np.isin(seen["span"], spans["id"])]

    def _whole(self, spans: NDArray[Any]) -> NDArray[Any]:
        """Those of which site and attributes are there."""
        known = (spans["site"] < len(self.sites)) & (spans["attributes"] < self.attributes.count)
        return spans[known & (spans["parent"] < spans["id"]) & (spans["id"] < MUTED)]


@lru_cache(maxsize=1024)
def _site(line: bytes) -> SiteInfo:
    """The site that a line describes; those of a process are the same in each session."""
    return SiteInfo(**json.loads(line))


class Table:
    """Rows of a file, found by a ``column`` that rises more or less along it; never are all of them in memory."""

    def __init__(self, file: Spooled, dtype: np.dtype[Any], column: str) -> None:
        self._file = file
        self._dtype = dtype
        self._column = column
        self._starts = range(0, file.size // dtype.itemsize, _ROWS)
        ends = [(block[column].min(), block[column].max()) for block in self.blocks()]
        self._lowest, self._highest = np.array(ends, np.uint64).reshape(-1, 2).T

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All rows, in blocks."""
        return map(self._block, self._starts)

    def between(self, first: int, until: int) -> NDArray[Any]:
        """The rows of which the column is ``first`` or more and less than ``until``."""
        near = np.flatnonzero((self._lowest < until) & (self._highest >= first))
        found = [np.zeros(0, self._dtype)]
        for number in near.tolist():
            block = self._block(self._starts[number])
            column = block[self._column]
            found.append(block[(column >= first) & (column < until)])
        return np.concatenate(found)

    def _block(self, start: int) -> NDArray[Any]:
        size = self._dtype.itemsize
        data = self._file.read(start * size, _ROWS * size)
        return np.frombuffer(data, self._dtype, len(data) // size)


class Lines:
    """The JSON objects of a file that has one a line, by their numbers."""

    def __init__(self, file: Spooled) -> None:
        self._file = file
        self._starts = [0]
        self.count = 0
        at = 0
        while data := file.read(at, _BYTES):
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
            self._starts += (at + 1 + ends[-(self.count + 1) % _LINES :: _LINES]).tolist()
            self.count += len(ends)
            at += len(data)

    def chosen(self, numbers: Iterable[int]) -> list[Mapping[str, Any]]:
        """The objects with ``numbers``, which rise. Raises ValueError when one is none."""
        found: list[Mapping[str, Any]] = []
        for block, some in groupby(numbers, lambda number: number // _LINES):
            start = self._starts[block]
            end = self._starts[block + 1] if block + 1 < len(self._starts) else self._file.size
            lines = self._file.read(start, end - start).split(b"\n")
            told = [lines[number % _LINES] for number in some]
            objects = json.loads(b"[" + b",".join(told) + b"]")
            if len(objects) != len(told):
                raise ValueError("a line holds more than one object")
            found += map(dict, objects)
        return found
