"""Rows that are not in the spool's files yet, kept where they outlive the process.

``pending.bin`` is mapped while a session is open. It begins with a word for each file: how many bytes of that file are
written, and how many follow in its area here. A process that is killed leaves both.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NAME = "pending.bin"
AREA = 1 << 17
"""Bytes held for one file; what is beyond is lost when the process is killed."""
SHIFT = 20
"""A word is ``written << SHIFT | held``."""
_FIRST = 4096
_FILES = 3
SIZE = _FIRST + _FILES * AREA
_WORD = struct.Struct("<Q")


class Pending:
    """Mirrors the rows of up to three files. Where no file can be mapped, the memory is this process's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            with path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, SIZE)
                self.memory = mmap.mmap(file.fileno(), SIZE)
        except (OSError, AttributeError):
            path.unlink(missing_ok=True)
            self.memory = mmap.mmap(-1, SIZE)

    def written(self, file: int) -> int:
        """Bytes of ``file`` that are written: the first row held follows them."""
        word: int = _WORD.unpack_from(self.memory, 8 * file)[0]
        return word >> SHIFT

    def add(self, file: int, rows: bytearray, row: bytes) -> None:
        """Append ``row`` to the ``rows`` that are not written yet."""
        with self._lock:
            held, end = len(rows), len(rows) + len(row)
            rows += row
            if end <= AREA:
                start = _FIRST + file * AREA
                self.memory[start + held : start + end] = row
                _WORD.pack_into(self.memory, 8 * file, self.written(file) << SHIFT | end)

    def settle(self, file: int, rows: bytearray, count: int) -> None:
        """The first ``count`` bytes of ``rows`` were written."""
        with self._lock:
            written = self.written(file) + count
            del rows[:count]
            rest, start = bytes(rows[:AREA]), _FIRST + file * AREA
            self.memory[start : start + len(rest)] = rest
            _WORD.pack_into(self.memory, 8 * file, written << SHIFT | len(rest))

    def close(self) -> None:
        """All is written, or the files are another process's."""
        self.memory.close()


class Spooled:
    """A spool's file ``name``, the one with ``number``, with what was to follow: ``size`` bytes.

    Raises FileNotFoundError when there is no such file.
    """

    def __init__(self, spool: Path, number: int, name: str) -> None:
        self._path = spool / name
        self._written = self._path.stat().st_size
        self._held = b""
        try:
            with (spool / NAME).open("rb") as file:
                word = _WORD.unpack(os.pread(file.fileno(), 8, 8 * number))[0]
                held = os.pread(file.fileno(), min(word & (1 << SHIFT) - 1, AREA), _FIRST + number * AREA)
        except (FileNotFoundError, struct.error):
            pass
        else:
            if word >> SHIFT <= self._written:
                self._written, self._held = word >> SHIFT, held
        self.size = self._written + len(self._held)

    def read(self, start: int, count: int) -> bytes:
        """Up to ``count`` bytes from ``start`` on."""
        count = max(min(count, self.size - start), 0)
        with self._path.open("rb") as file:
            data = os.pread(file.fileno(), max(min(count, self._written - start), 0), start)
        held = max(start - self._written, 0)
        return data + self._held[held : held + count - len(data)]
