"""Work that makes many objects and drops none: the garbage collector would only look at them again and again, and what
only leads to them need not be there all at once.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_BLOCK = 1 << 16


@contextmanager
def no_collection() -> Iterator[None]:
    """Leave the garbage collector off inside the block, and as it was after it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def in_turn(column: NDArray[Any]) -> Iterator[Any]:
    """The elements as Python objects, made as they are needed: of a table of millions of rows there are never all."""
    for start in range(0, len(column), _BLOCK):
        yield from column[start : start + _BLOCK].tolist()
