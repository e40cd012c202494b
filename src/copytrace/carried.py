"""What one stretch of a trace leaves to the next: memory that goes on living, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from copytrace.model import Allocations


@dataclass(slots=True)
class Carried:
    """What the stretches so far leave. Blocks are named by ``born``, their place in memray's stream."""

    since: int = 0
    """Blocks born before this place were in an earlier stretch."""
    regions: dict[int, int] = field(default_factory=dict)
    """Blocks that are not the first of their region -> the key of that."""
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

    def lasting(self, blocks: Allocations) -> NDArray[np.bool_]:
        """Which rows of a stretch may be in the next one: those that outlive the last birth in it."""
        found: NDArray[Any] = blocks.died >= self.until(blocks)
        return found

    def until(self, blocks: Allocations) -> int:
        """Blocks born from this place on are in no stretch so far."""
        return max(self.since, int(blocks.born.max()) + 1) if len(blocks.born) else self.since
