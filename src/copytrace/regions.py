"""Blocks of memory, each during one life: in columns what is asked of all of them, as objects those that are looked at.

A *region* is an allocation, with those that realloc turned it into without moving it, or memory from before the session
that a probe was handed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from copytrace.carried import Carried
    from copytrace.model import Trace


@dataclass(slots=True)
class Region:
    """``rows`` are rows of the allocations, empty for memory from before the session. ``nbytes`` is the size of the
    largest. ``native`` says that a thread without any Python frame allocated it. ``key`` is the same in each stretch of
    a trace: where in memray's stream the region was born, or a negative number for memory from before the session.
    """

    id: int
    address: int
    nbytes: int
    rows: list[int]
    span: int = 0
    stack: int = 0
    enter: int = 0
    native: bool = False
    key: int = 0


class Regions(dict[int, Region]):
    """Regions by their ids: those of allocations are numbered as their first blocks are, and memory from before the
    session follows. An object is made when it is first asked for; columns have shape (n,), without that memory.
    """

    def __init__(self, trace: Trace, carried: Carried) -> None:
        super().__init__()
        blocks = trace.allocations
        without_python = np.array([all(frame.native for frame in stack) for stack in blocks.stacks] or [False])
        goes_on = (blocks.previous >= 0) & ~blocks.moved
        self.first = np.flatnonzero(~goes_on)
        """The row of each in the allocations."""
        self.of_row = np.full(len(goes_on), -1, np.int64)
        """The region of each row of the allocations."""
        self.of_row[self.first] = np.arange(len(self.first))
        self.address = blocks.address[self.first]
        self.nbytes = blocks.size[self.first]
        self.span = blocks.span[self.first]
        self.stack = blocks.stack[self.first]
        self.enter = blocks.enter[self.first]
        self.key = blocks.born[self.first].astype(np.int64)
        self.later: dict[int, list[int]] = {}
        """The other rows of those that have several."""
        for row, before in zip(np.flatnonzero(goes_on).tolist(), blocks.previous[goes_on].tolist(), strict=True):
            number = self.of_row[row] = self.of_row[before]
            self.later.setdefault(int(number), []).append(row)
            self.nbytes[number] = max(self.nbytes[number], blocks.size[row])
        begun = np.isin(blocks.born[self.first], np.array(list(carried.regions), np.uint64))
        self.continued: list[int] = np.flatnonzero(begun).tolist()
        """Those that began in an earlier stretch, in another block."""
        for number in self.continued:
            beginning = carried.regions[int(self.key[number])]
            self.key[number], self.span[number], self.enter[number] = beginning.key, beginning.span, beginning.enter
            self.nbytes[number] = max(int(self.nbytes[number]), beginning.nbytes)
            self.stack[number] = carried.stacks[beginning.stack]
        self.native = without_python[self.stack] & (self.span == 0)
        self._outside = 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.first) + self._outside

    def add_outside(self, address: int, nbytes: int, key: int) -> int:
        """One more, of memory from before the session."""
        number = self.count
        self[number] = Region(number, address, nbytes, [], key=key)
        self._outside += 1
        return number

    def is_block(self, number: int) -> bool:
        """Whether it was allocated in the session."""
        return number < len(self.first)

    def last(self, number: int) -> int:
        """The row of the last block of one that was allocated."""
        return self.later[number][-1] if number in self.later else int(self.first[number])

    def at(self, numbers: NDArray[np.int64]) -> Iterator[Region]:
        """Those with ``numbers``."""
        return map(self.__getitem__, numbers.tolist())

    def __missing__(self, number: int) -> Region:
        self.make(np.array([number], np.int64))
        return self[number]

    def make(self, numbers: NDArray[np.int64]) -> None:
        """Make the objects of regions that were allocated."""
        columns = (self.address, self.nbytes, self.first, self.span, self.stack, self.enter, self.native, self.key)
        chosen = (column[numbers].tolist() for column in columns)
        for number, address, nbytes, row, *rest in zip(numbers.tolist(), *chosen, strict=True):
            self[number] = Region(number, address, nbytes, [row, *self.later.get(number, ())], *rest)
