"""What was loaded where while moves were recorded: a return address -> function and library.

A return address follows its call, which may be the last instruction of a function: the byte before it is looked up.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from copytrace.errors import CopytraceError
from copytrace.model import Frame
from copytrace.native import readable, symbols_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

UNKNOWN = Frame("[unknown]", "", 0, native=True)


class Object(NamedTuple):
    """A loaded object: it was there from sequence ``since`` on, at ``base``, its segments from ``low`` to ``high``."""

    since: int
    base: int
    low: int
    high: int
    size: int
    modified: int
    path: str


class Objects:
    """The loaded objects of a recording, in the order in which they were noticed."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self.objects = sorted(objects)
        lows = sorted((o.low, o.high) for o in self.objects)
        shared = any(high > low for (_, high), (low, _) in pairwise(lows))
        self._changes = np.array(sorted({o.since for o in self.objects}) if shared else [], np.uint64)
        """Sequences at which an address may have begun to mean something else."""
        self._frames: dict[tuple[int, int | None], Frame] = {}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read ``objects.tsv``; a file that is not there lists nothing, a last line that is cut off is left out.

        Raises CopytraceError when it is damaged.
        """
        try:
            lines = path.read_text(errors="surrogateescape").split("\n")[:-1] if path.exists() else []
            fields = [line.split("\t", 6) for line in lines]
            return cls(Object._make([*map(int, numbers[:6]), numbers[6]]) for numbers in fields)
        except (OSError, ValueError, IndexError) as error:
            raise CopytraceError(f"{path}: damaged ({type(error).__name__})") from error

    def distinct(
        self, addresses: NDArray[np.uint64], sequences: NDArray[np.uint64]
    ) -> tuple[list[tuple[int, int]], NDArray[np.intp]]:
        """The distinct (address, sequence at which to look it up), and for each row which of them it is."""
        unique, index = np.unique(addresses, return_inverse=True)
        if not len(self._changes):
            last = self.objects[-1].since if self.objects else 0
            return [(int(address), last) for address in unique], index
        period = np.searchsorted(self._changes, sequences, side="right")
        periods = len(self._changes) + 1
        pairs, index = np.unique(index * periods + period, return_inverse=True)
        starts = [0, *self._changes.tolist()]
        return [(int(unique[pair // periods]), starts[pair % periods]) for pair in pairs.tolist()], index

    def frame(self, address: int, sequence: int | None = None) -> Frame:
        """The function of the call that returns to ``address``, as things were at ``sequence`` (None: at the end)."""
        frame = self._frames.get((address, sequence))
        if frame is None:
            frame = self._frames[address, sequence] = self._find(address - 1, sequence)
        return frame

    def _find(self, address: int, sequence: int | None) -> Frame:
        covering = [o for o in self.objects if o.low <= address < o.high and (sequence is None or o.since <= sequence)]
        if not covering:
            return UNKNOWN
        found = covering[-1]
        symbol = symbols_of(found.path, found.size, found.modified).find(address - found.base)
        name = os.path.basename(found.path)
        return Frame(readable(symbol) if symbol else f"+{address - found.base:#x}", name, 0, native=True)
