"""What one stretch of a trace leaves to the next: memory that goes on living, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from copytrace.model import Allocations, Frame, Trace
    from copytrace.regions import Regions


class Beginning(NamedTuple):
    """How a region began that realloc has kept in its place since."""

    key: int
    nbytes: int
    span: int
    enter: int
    stack: tuple[Frame, ...]


@dataclass(slots=True)
class Carried:
    """What the stretches so far leave. Blocks are named by ``born``, their place in memray's stream."""

    since: int = 0
    """How far that stream was read: blocks born before this place were in an earlier stretch."""
    regions: dict[int, Beginning] = field(default_factory=dict)
    """Blocks that are not the first of their region."""
    stacks: dict[tuple[Frame, ...], int] = field(default_factory=dict)
    """The stacks on which those began that are in the stretch at hand, and their places among its stacks."""
    outside: list[tuple[int, int]] = field(default_factory=list)
    """Address and bytes of memory from before the session, in the order in which it was seen."""
    owners: dict[int, int] = field(default_factory=dict)
    """Blocks -> the operations that hold them."""
    set_up: dict[int, str] = field(default_factory=dict)
    """Blocks of no operation -> the store or site that set them up."""
    clock: list[tuple[int, int]] = field(default_factory=list)
    """Sequences and nanoseconds at which stretches began and ended."""

    def earlier(self, blocks: Allocations) -> NDArray[np.int64]:
        """The rows of a stretch that were in an earlier one."""
        return np.flatnonzero(blocks.born < self.since)

    def restored(self, trace: Trace) -> Trace:
        """A stretch that has the stacks on which regions began, too; ``stacks`` says where."""
        blocks = trace.allocations
        here = (self.regions.get(born) for born in blocks.born[self.earlier(blocks)].tolist())
        begun = dict.fromkeys(beginning.stack for beginning in here if beginning is not None)
        self.stacks = {stack: number for number, stack in enumerate(begun, len(blocks.stacks))}
        return replace(trace, allocations=replace(blocks, stacks=(*blocks.stacks, *begun)))

    def note_regions(self, blocks: Allocations, regions: Regions) -> None:
        """Tell the next stretch of the regions that live on in a block that is not their first."""
        lasting = outlives(blocks)
        self.regions = {}
        for number in sorted({*regions.later, *regions.continued}):
            row = regions.last(number)
            if lasting[row]:
                region = regions[number]
                stack = blocks.stacks[region.stack]
                beginning = Beginning(region.key, region.nbytes, region.span, region.enter, stack)
                self.regions[int(blocks.born[row])] = beginning


def outlives(blocks: Allocations) -> NDArray[np.bool_]:
    """Which rows live on when the stretch is over."""
    living: NDArray[np.bool_] = blocks.died >= blocks.records
    return living
