"""Room on the disk for a file that grows while it is written.

memray goes on with a broken tree of native frames when its file cannot grow, and may end the process with a
segmentation fault (1.20.0). So room is held ahead of its file, and the capture is ended while there still is some.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

LEAST = 8 << 20
"""Bytes held ahead of a small file; of a larger one a quarter of its size, as memray makes its file a tenth larger at a
time.
"""
_KEEP_SIZE = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Room:
    """What is held ahead of the file ``path``, which exists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0

    def hold(self) -> bool:
        """Hold more when half of it is used up. False when the disk has no more; True also where the file system cannot
        hold room.
        """
        try:
            size = self.path.stat().st_size
            ahead = max(LEAST, size // 4)
            if self._end - size < ahead // 2:
                if not _reserve(self.path, size, ahead):
                    return False
                self._end = size + ahead
        except OSError:  # the file is gone
            pass
        return True

    def release(self) -> None:
        """Give back what the file did not take."""
        with suppress(OSError):
            os.truncate(self.path, self.path.stat().st_size)


def is_there(directory: Path) -> bool:
    """Whether the disk of ``directory`` has room for a file to begin."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return True
    return disk.f_bavail * disk.f_frsize >= LEAST


def _reserve(path: Path, start: int, count: int) -> bool:
    fallocate = _fallocate()
    if fallocate is None:
        return True
    file = os.open(path, os.O_WRONLY)
    try:
        return fallocate(file, _KEEP_SIZE, start, count) == 0 or ctypes.get_errno() not in _FULL
    finally:
        os.close(file)


@cache
def _fallocate() -> Any:
    """That of the C library, which leaves the size of a file as it is; None where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function
