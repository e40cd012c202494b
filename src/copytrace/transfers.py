"""The native recorder of moves: starting it, and reading what it wrote.

A spool directory holds ``recording.json`` (how it was recorded) and, written by the extension, ``moves-*.bin`` (rows in
the order of their sequence, marks among them), ``counters.bin`` (small moves summed by caller) and ``objects.tsv``
(what was loaded where); without the extension ``marks.bin``. It can be read while it is written and when the process
has died.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left, bisect_right
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Self, overload

import numpy as np

from copytrace.errors import CopytraceError
from copytrace.marks import Marks
from copytrace.model import MARK_DTYPE, TRANSFER_DTYPE, Frame, Transfers
from copytrace.objects import Objects

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from numpy.typing import NDArray

HEADER = "recording.json"
MARKS = "marks.bin"

_ROW_DTYPE = np.dtype([(name, "<u8") for name in ("sequence", "thread", "source", "destination", "word", "caller")])
_KIND_SHIFT = np.uint64(56)
_SIZE_MASK = np.uint64((1 << 56) - 1)
_MARK = 3
_SUM_DTYPE = np.dtype([(name, "<u8") for name in ("caller", "moves", "bytes")])
_LOST_AT = 136  # in counters.bin
_NO_SUMS = np.empty(0, _SUM_DTYPE)

OTHERS = Frame("[other callers]", "", 0, native=True)
"""Stands for the callers of small moves that found no place of their own."""

_lock = threading.Lock()
_active: Recording | None = None


def _extension() -> tuple[ModuleType | None, str]:
    """The extension, or why there is none."""
    if os.environ.get("COPYTRACE_NO_EXTENSION", "") not in ("", "0"):
        return None, "switched off by COPYTRACE_NO_EXTENSION"
    try:
        return import_module("copytrace._transfers"), ""
    except ModuleNotFoundError:
        return None, "the native hook is not installed"
    except (ImportError, OSError):
        return None, "the native hook cannot be loaded here"


class Recording:
    """Numbers the marks of a session and, with the extension, records the moves of bytes between them.

    ``spool`` is the directory to write to, made when it does not exist. ``moves``: record moves. ``min_bytes``: keep
    each move from this many bytes up, sum smaller ones by caller. ``mark`` is bound by :meth:`start`: it takes the span
    that is innermost on this thread from now on and returns the sequence of that change.

    Raises ValueError when ``min_bytes`` is not positive.
    """

    mark: Callable[[int], int]
    _row_bits = 15
    _segments = 1 << 16

    def __init__(self, spool: Path, *, moves: bool = True, min_bytes: int = 4096) -> None:
        if min_bytes < 1:
            raise ValueError(f"min_bytes: {min_bytes} is not positive; give a number of bytes from 1 up")
        self.spool = spool
        self.moves = moves
        self.min_bytes = min_bytes
        self.reason = ""
        """Why moves are not recorded, empty when they are. Known once started."""
        self._marks: Any = None

    def start(self) -> None:
        """Begin to record.

        Raises RuntimeError when this process is being recorded already, CopytraceError when the spool holds another
        recording or cannot be written.
        """
        global _active
        with _lock:
            if _active is not None:
                raise RuntimeError(f"this process is being recorded already, to {_active.spool}")
            try:
                self.spool.mkdir(parents=True, exist_ok=True)
                if (self.spool / HEADER).exists():
                    raise CopytraceError(f"{self.spool}: holds another recording; choose an empty directory")
                self._begin()
                try:
                    (self.spool / HEADER).write_text(json.dumps(self._header()))
                except BaseException:
                    self._marks.stop()
                    raise
            except OSError as error:
                raise CopytraceError(f"{self.spool}: cannot be written: {error.strerror}") from error
            _active = self
            self.mark = self._marks.mark

    def _header(self) -> dict[str, Any]:
        native = not isinstance(self._marks, Marks)
        return {"version": 1, "native": native, "reason": self.reason, "min_bytes": self.min_bytes}

    def _begin(self) -> None:
        extension, missing = _extension()
        self.reason = missing if self.moves else "switched off"
        if extension is None:
            self._marks = Marks(self.spool / MARKS)
            return
        self._marks = extension
        slots = extension.start(
            self.spool.absolute(),
            moves=self.moves,
            min_bytes=self.min_bytes,
            row_bits=self._row_bits,
            segments=self._segments,
        )
        if self.moves and not slots:
            self.reason = "no loaded library could be hooked"

    def stop(self) -> None:
        """End the recording; does nothing when it is not running, as in a forked child."""
        global _active
        with _lock:
            if _active is self:
                self._marks.stop()
                _active = None

    def set_markers(self, on: bool) -> int:
        """Say whether memray may be tracking: then marks are made for it, too. Returns how many there were before."""
        return int(self._marks.set_markers(on))

    def sequence(self) -> int:
        """The last sequence taken, 0 before the first."""
        return int(self._marks.sequence())

    def flush(self) -> None:
        """Write what is held back, so that :func:`read` sees every mark that has returned."""
        if isinstance(self._marks, Marks):
            self._marks.flush()


def _forget() -> None:
    """In a forked child: the recording is the parent's."""
    global _active, _lock
    _lock = threading.Lock()
    if _active is not None:
        if isinstance(_active._marks, Marks):
            _active._marks.abandon()
        _active = None


os.register_at_fork(after_in_child=_forget)


# --- reading ---------------------------------------------------------------------------------------------------------


def read(spool: Path) -> tuple[Transfers, NDArray[Any]]:
    """The moves and the marks (rows of ``MARK_DTYPE``) in a spool directory, in the order of their sequence.

    Raises as :class:`Recorded`.
    """
    return Recorded(spool).between(0, 1 << 63, small=True)


class Recorded:
    """What a recording left in a spool directory, read a part at a time.

    Raises CopytraceError when the directory holds no recording or a damaged one.
    """

    def __init__(self, spool: Path) -> None:
        if _active is not None and _active.spool == spool:
            _active.flush()
        try:
            header = json.loads((spool / HEADER).read_text())
            self._reason, self._native = str(header["reason"]), bool(header["native"])
        except FileNotFoundError as error:
            raise CopytraceError(f"{spool}: holds no recording") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CopytraceError(f"{spool / HEADER}: damaged ({type(error).__name__})") from error
        self._spool = spool
        self._counters = _Counters.read(spool / "counters.bin") if self._native else _Counters(0, 0, _NO_SUMS)
        self._objects = Objects.read(spool / "objects.tsv") if self._native else Objects([])
        self._drafts: dict[int, list[Path]] = {}
        """By the number of a segment what it is called until it is taken into use, when it was so at first."""
        for file in spool.glob("moves-[0-9][0-9][0-9][0-9][0-9]*.bin") if self._native else ():
            self._drafts.setdefault(int(file.name[6:11]), []).extend([file] if file.name.count(".") > 1 else [])
        self._segments = sorted(self._drafts)

    def between(self, first: int, until: int, *, small: bool) -> tuple[Transfers, NDArray[Any]]:
        """The moves and the marks from the sequence ``first`` on and before ``until``. With ``small`` come the sums of
        small moves, which have no sequence.
        """
        callers: dict[Frame, int] = {}
        moves = [np.empty(0, TRANSFER_DTYPE)]
        marks = [np.empty(0, MARK_DTYPE), *([] if self._native else [self._marks_alone(first, until)])]
        for segment in self._segments:
            if segment << self._counters.row_bits < until and (segment + 1) << self._counters.row_bits > first:
                raw = self._finished(segment)
                raw = raw[(raw["sequence"] >= first) & (raw["sequence"] < until)]
                marked = raw["word"] >> _KIND_SHIFT == _MARK
                marks.append(_marks(raw[marked]))
                moves.append(_resolved(raw[~marked], self._objects, callers))
        sums: dict[int, tuple[int, int]] = {}
        for address, count, nbytes in self._counters.sums.tolist() if small else ():
            caller = callers.setdefault(self._objects.frame(address) if address else OTHERS, len(callers))
            before = sums.get(caller, (0, 0))
            sums[caller] = before[0] + count, before[1] + nbytes
        transfers = Transfers(
            np.concatenate(moves),
            tuple(callers),
            tuple((caller, *total) for caller, total in sums.items()),
            self._counters.lost,
            recorded=self._native and not self._reason,
            reason=self._reason,
        )
        return transfers, np.concatenate(marks)

    def marks(self) -> MarkTable:
        """All marks."""
        if not self._native:
            return MarkTable([self._marks_alone(0, 1 << 63)].__getitem__, 1)
        return MarkTable(self._marks_of_segment, len(self._segments))

    def _finished(self, segment: int) -> NDArray[Any]:
        """The rows of a segment that were written to the end: each lies where its sequence says, which begins at 1.

        A process that goes on renames and removes files meanwhile; one that was killed may have left drafts.
        """
        drafts = [_table(draft, _ROW_DTYPE) for draft in self._drafts[segment]]
        table = _table(self._spool / f"moves-{segment:05d}.bin", _ROW_DTYPE)
        found = []
        for each in [table] if len(table) or not drafts else drafts:
            first = segment << self._counters.row_bits
            places = np.arange(first, first + len(each), dtype=np.uint64)
            found.append(each[(each["sequence"] == places) & (places > 0)])
        return found[0] if len(found) == 1 else np.sort(np.concatenate(found), order="sequence")

    def _marks_of_segment(self, number: int) -> NDArray[Any]:
        raw = self._finished(self._segments[number])
        return _marks(raw[raw["word"] >> _KIND_SHIFT == _MARK])

    def _marks_alone(self, first: int, until: int) -> NDArray[Any]:
        marks = _table(self._spool / MARKS, MARK_DTYPE)
        marks = marks[(marks["sequence"] >= first) & (marks["sequence"] < until)]
        return np.sort(marks, order="sequence")


class MarkTable:
    """Rows of ``MARK_DTYPE`` that are in pieces: ``piece`` reads one of ``count``. No more than the last few that were
    read are kept.
    """

    def __init__(self, piece: Callable[[int], NDArray[Any]], count: int) -> None:
        self._piece = lru_cache(4)(piece)
        self._starts = [0, *accumulate(len(piece(number)) for number in range(count))]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> NDArray[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self[place : place + 1][0]
        first, until, _ = index.indices(len(self))
        found = [np.empty(0, MARK_DTYPE)]
        for number in range(bisect_right(self._starts, first) - 1, bisect_left(self._starts, until)):
            start = self._starts[number]
            found.append(self._piece(number)[max(first - start, 0) : until - start])
        return np.concatenate(found)


def _marks(raw: NDArray[Any]) -> NDArray[Any]:
    marks = np.empty(len(raw), MARK_DTYPE)
    marks["sequence"], marks["thread"], marks["span"] = raw["sequence"], raw["thread"], raw["source"]
    return marks


def _resolved(raw: NDArray[Any], objects: Objects, callers: dict[Frame, int]) -> NDArray[Any]:
    """Moves as they were written as rows of ``TRANSFER_DTYPE``; ``callers`` numbers the functions."""
    rows = np.empty(len(raw), TRANSFER_DTYPE)
    for name in ("sequence", "thread", "source", "destination"):
        rows[name] = raw[name]
    rows["kind"] = raw["word"] >> _KIND_SHIFT
    rows["nbytes"] = raw["word"] & _SIZE_MASK
    rows["count"] = 1
    keys, index = objects.distinct(raw["caller"], raw["sequence"])
    numbers = [callers.setdefault(objects.frame(*key), len(callers)) for key in keys]
    rows["caller"] = np.array(numbers, np.uint32)[index]
    return rows


class _Counters(NamedTuple):
    row_bits: int
    lost: int
    sums: NDArray[Any]
    """Caller, moves and bytes of small moves."""

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            data = path.read_bytes()
            row_bits, sums_at, sum_count = np.frombuffer(data, "<u8", 3).tolist()
            lost = int(np.frombuffer(data, "<u8", 1, _LOST_AT)[0])
            sums = np.frombuffer(data, _SUM_DTYPE, sum_count, sums_at)
            return cls(min(row_bits, 63), lost, sums[sums["moves"] != 0])
        except (OSError, ValueError, OverflowError) as error:
            raise CopytraceError(f"{path}: damaged ({type(error).__name__})") from error


def _table(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The whole rows of a file, none when it is not there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data, dtype, len(data) // dtype.itemsize)
