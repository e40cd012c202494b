"""Marks without the extension: numbered and allocated in one order under the interpreter's lock, written to a file."""

from __future__ import annotations

import operator
import threading
from collections import deque
from itertools import count, cycle
from struct import Struct
from typing import TYPE_CHECKING

from copytrace.model import MARK_BASE, MARK_PERIOD

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 4096
"""Marks held back before they are written."""

_SHIFT = 16
_ROW = Struct("<QQQ")


class Marks:
    """Writes a row of :data:`copytrace.model.MARK_DTYPE` for each mark.

    The number of a mark and the size it allocates come out of one chain of C iterators, so that no other thread can
    come between them: ``bytearray(k)`` allocates k + 1 bytes.

    Raises OSError when the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        numbers = count(1 << _SHIFT, 1 << _SHIFT)
        sizes = cycle(range(MARK_BASE - 1, MARK_BASE - 1 + MARK_PERIOD))
        self._quiet = map(operator.add, numbers, sizes)
        self._loud = map(operator.add, numbers, map(len, map(bytearray, sizes)))
        self._next = self._quiet
        self._last = 0
        self._rows: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._file = path.open("xb", buffering=0)

    def mark(self, span: int) -> int:
        """Take the next sequence for the change to ``span`` on this thread."""
        sequence: int = next(self._next) >> _SHIFT
        self._rows.append(_ROW.pack(sequence, threading.get_ident(), span))
        if sequence > self._last:
            self._last = sequence
        if len(self._rows) >= BLOCK:
            self.flush(wait=False)
        return sequence

    def set_markers(self, on: bool) -> int:
        """Whether the next marks allocate; how many marks there were before, without those that other threads are just
        taking.
        """
        self._next = self._loud if on else self._quiet
        return self._last

    def sequence(self) -> int:
        """The last sequence taken."""
        return self._last

    def flush(self, wait: bool = True) -> None:
        """Write the rows held back; when another thread does so already, either wait or leave it to that one."""
        if self._writing.acquire(blocking=wait):
            try:
                rows = [self._rows.popleft() for _ in range(len(self._rows))]
                self._file.write(b"".join(rows))
            finally:
                self._writing.release()

    def stop(self) -> None:
        """Write what is left and close the file; later marks are numbered and forgotten."""
        self.flush()
        self._rows = deque(maxlen=0)
        self._file.close()

    def abandon(self) -> None:
        """In a forked child: the file is the parent's."""
        self._rows = deque(maxlen=0)
        self._file.close()
