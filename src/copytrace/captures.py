"""memray's capture files: records of allocations as rows of numbers, and the stacks they were made on.

The extension reads the format of the memray that is required, 25 times as fast as memray's own reader makes objects of
it, and native frames are named from the symbol tables of their libraries. Captures of another version are read by
memray itself, whose symbolizer keeps the debug information of all libraries.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from copytrace.native import Symbols, symbols_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType

    from numpy.typing import NDArray

    from copytrace._captures import Reader

SMALLEST = 512
"""Bytes; smaller blocks come from CPython's own pools, which memray does not see, and are left out."""

FREE, MALLOC, REALLOC, MUNMAP = 5, 6, 7, 15
_FIELDS = attrgetter("tid", "address", "size", "allocator", "stack_id", "native_stack_id")
_MAX_FRAMES = 60
_EVALUATES = ("_PyEval_EvalFrameDefault", "_TAIL_CALL_")
"""How functions of CPython that evaluate Python frames are called."""

type Entry = tuple[str, str, int, str]
"""Function, source file, line and shared object of a frame; the last is empty where Python's own or not known."""

type Stack = tuple[Sequence[Entry], Sequence[Entry]]
"""The Python frames of a stack, innermost first, and these mixed with the native ones."""


class Capture(Protocol):
    """One capture file, read from its beginning to its end."""

    def take(self, count: int) -> NDArray[np.int64]:
        """Up to ``count`` more records as rows: thread, address, size, allocator, and the number of the stack from 1
        for an allocation of at least :data:`SMALLEST` bytes; shape (n, 5), none at the end.
        """

    def stack(self, number: int, *, native: bool) -> Stack:
        """The stack of that number; without native frames unless ``native``."""


def open_capture(path: Path) -> Capture:
    """Begin to read a capture.

    Raises OSError, RuntimeError or ValueError when there is none, also later when it is damaged.
    """
    with suppress(ImportError, NotImplementedError):
        from copytrace._captures import Reader

        reader = Reader(str(path))
        if reader.python_version >> 16 == sys.hexversion >> 16:
            return _Plain(reader)
    return _ByMemray(path)


def is_end(allocator: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which records end a block."""
    return np.isin(allocator, (FREE, MUNMAP))


class _Plain:
    """What the extension reads."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._images: list[_Images] = []
        self._python: dict[tuple[int, int], Entry] = {}
        self._native: dict[tuple[int, int], Entry | None] = {}

    def take(self, count: int) -> NDArray[np.int64]:
        return np.frombuffer(self._reader.take(count, SMALLEST), np.int64).reshape(-1, 5)

    def stack(self, number: int, *, native: bool) -> Stack:
        reader = self._reader
        frames, addresses, generation, thread = reader.stack(number)
        python = [self._python_entry(code, offset) for code, offset, _ in frames]
        if not (native and reader.native):
            return python[:_MAX_FRAMES], python[:_MAX_FRAMES]
        found = (self._native_entry(address, generation) for address in addresses)
        kept = len(python) - reader.skipped if thread == reader.main_thread and reader.skipped else -1
        mixed = mix(python, [begins for _, _, begins in frames], [entry for entry in found if entry], kept)
        return python[:_MAX_FRAMES], mixed[:_MAX_FRAMES]

    def _python_entry(self, code: int, offset: int) -> Entry:
        entry = self._python.get((code, offset))
        if entry is None:
            function, file, first, table = self._reader.codes[code]
            entry = self._python[code, offset] = function, file, line_of(first, table, offset), ""
        return entry

    def _native_entry(self, address: int, generation: int) -> Entry | None:
        key = generation, address
        if key not in self._native:
            while len(self._images) < generation:
                self._images.append(_Images(self._reader.images[len(self._images)]))
            self._native[key] = self._images[generation - 1].find(address - 1) if generation else None
        return self._native[key]


def mix(python: Sequence[Entry], begins: Sequence[bool], native: Sequence[Entry], kept: int) -> list[Entry]:
    """A stack of native frames in which each evaluation stands for the Python frames that ran in it; all are innermost
    first. ``begins`` says which Python frames began an evaluation. Given are the innermost ``kept`` Python frames and
    the native ones that they called; all when it is -1.

    Where evaluations cannot be told from other functions, the Python frames alone.
    """
    result: list[Entry] = []
    left = len(python)
    for entry in reversed(native):
        if not left or not entry[0].startswith(_EVALUATES):
            result.append(entry)
            continue
        while left:
            if left == kept:
                result.clear()
            left -= 1
            result.append(python[left])
            if left and begins[left - 1]:
                break
    return list(python) if left else result[::-1]


class _Images:
    """The shared objects that were loaded at one time."""

    def __init__(self, images: Sequence[tuple[str, int, Sequence[tuple[int, int]]]]) -> None:
        self._segments = sorted(
            (base + address, base + address + size, base, file)
            for file, base, segments in images
            for address, size in segments
        )
        self._starts = [start for start, *_ in self._segments]
        self._symbols_of = cache(_symbols_now)

    def find(self, address: int) -> Entry | None:
        """The function that an address lies in, None outside all objects."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._segments[at][1]:
            return None
        _, _, base, file = self._segments[at]
        symbols = self._symbols_of(file)
        if symbols is None:
            return None
        return symbols.find(address - base) or f"+{address - base:#x}", "", 0, file


def _symbols_now(file: str) -> Symbols | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return symbols_of(file, status.st_size, status.st_mtime_ns)


def line_of(first: int, table: bytes, offset: int) -> int:
    """The line of the instruction at a byte ``offset`` of code that begins at line ``first``, 0 when it has none."""
    for begin, end, line in _EMPTY.replace(co_firstlineno=first, co_linetable=table).co_lines():
        if begin <= offset < end:
            return line or 0
    return 0


_EMPTY: CodeType = compile("", "", "exec")


class _ByMemray:
    """What memray reads."""

    def __init__(self, path: Path) -> None:
        from memray import FileReader

        self._reader = FileReader(path, max_memory_records=1)
        self._native = self._reader.metadata.has_native_traces
        self._records: Iterator[Any] = iter(self._reader.get_allocation_records())
        self._kept: list[Any] = []
        self._known: dict[int, int] = {}

    def take(self, count: int) -> NDArray[np.int64]:
        batch = list(islice(self._records, count))
        rows = np.fromiter(chain.from_iterable(map(_FIELDS, batch)), np.int64, 6 * len(batch)).reshape(-1, 6)
        keys = rows[:, 4] << 32 | rows[:, 5]
        rows[:, 4] = 0
        told = np.flatnonzero((rows[:, 2] >= SMALLEST) & ~is_end(rows[:, 3]))
        distinct, first, inverse = np.unique(keys[told], return_index=True, return_inverse=True)
        for key, at in sorted(zip(distinct.tolist(), told[first].tolist(), strict=True), key=lambda pair: pair[1]):
            if key not in self._known:
                self._kept.append(batch[at])
                self._known[key] = len(self._kept)
        rows[told, 4] = np.array([self._known[key] for key in distinct.tolist()], np.int64)[inverse]
        return rows[:, :5]

    def stack(self, number: int, *, native: bool) -> Stack:
        record = self._kept[number - 1]
        python = _entries(record.stack_trace(_MAX_FRAMES))
        if native and self._native:
            with suppress(AssertionError):  # memray 1.20 raises it now and then for hybrid stacks
                return python, _entries(record.hybrid_stack_trace(_MAX_FRAMES))
        return python, python


def _entries(frames: Sequence[tuple[str, str, int]]) -> list[Entry]:
    return [(function, file, line, "") for function, file, line in frames]
