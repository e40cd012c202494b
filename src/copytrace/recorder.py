"""The one owner of process-wide state: which span is open where, and the spool that closed spans are written to.

Inert until :meth:`Recorder.begin`. A span's parent travels by ContextVar, into tasks and ``asyncio.to_thread``; which
span is innermost on a thread is told to ``mark``, which numbers the change. Rows leave for the spool in blocks, so that
memory does not grow with spans.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import struct
import threading
import time
from contextvars import ContextVar
from json.encoder import encode_basestring_ascii as quoted
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from copytrace.callers import callers
from copytrace.extents import WRAPPERS, extents, forget
from copytrace.model import SEEN_DTYPE, SPAN_DTYPE, SiteInfo

native: ModuleType | None
try:
    from copytrace import _spans
except ImportError:
    native = None
else:
    native = _spans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    type Mark = Callable[[int], int]

_BLOCK = 1 << 16
_MOST_ATTRIBUTES = 4096
_SPANS, _SEEN, _SITES, _ATTRIBUTES = "spans.bin", "seen.bin", "sites.jsonl", "attributes.jsonl"

pack_span = struct.Struct("<QQIIQQQQQQB").pack
pack_seen = struct.Struct("<QBBQQQ").pack

parent_span: ContextVar[int] = ContextVar("copytrace_span", default=0)
"""The span that a new one is a child of."""


class ThreadState:
    """What is known of one thread: its innermost open span and, during a step of a coroutine, the one beneath it."""

    __slots__ = ("base", "busy", "copying", "current", "ident", "pending")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.current = 0
        self.base: int | None = None
        self.busy = False
        """True while a probe looks at arguments or results: what it calls is not recorded."""
        self.copying = False
        """True inside of a span that is itself the copy."""
        self.pending: list[Any] = []


class _Threads(threading.local):
    def __init__(self) -> None:
        self.state = ThreadState()


_threads = _Threads()


def _thread_state() -> ThreadState:
    return _threads.state


thread_state: Callable[[], ThreadState] = _thread_state if native is None else native.state
"""The calling thread's state."""


class Recorder:
    """Spans of one session's life at a time, spooled to a directory."""

    __slots__ = (
        "_attribute_lines",
        "_attributes",
        "_attributes_written",
        "_files",
        "_lock",
        "_sites",
        "failures",
        "first_failure",
        "mark",
        "next_span",
        "see",
        "seen",
        "spans",
    )

    def __init__(self) -> None:
        self.mark: Mark | None = None
        """Tells that a span is now innermost on the calling thread; returns the sequence. None when not recording."""
        self.failures = 0
        """Errors inside probes that were swallowed since the session opened."""
        self.first_failure = ""
        self.next_span: Callable[[], int] = itertools.count(1).__next__ if native is None else native.next_span
        """Ids are never given twice in a process: what an earlier session left in a context is no span of this one."""
        self.see: Callable[[int, int, Any], None] = self._see if native is None else native.see
        """``see(span, role, value)`` notes where the bytes of a value lie, as INPUT, OUTPUT or DESTINATION."""
        self.spans = bytearray()
        self.seen = bytearray()
        self._sites: dict[SiteInfo, int] = {}
        self._attributes: dict[tuple[tuple[str, Any], ...], int] = {}
        self._attributes_written = 0
        self._attribute_lines = bytearray()
        self._files: dict[str, IO[bytes]] = {}
        self._lock = threading.RLock()
        if native is not None:
            rows = (self.spans, self.seen)
            native.setup(parent_span, *rows, extents, WRAPPERS, self.flush, self.failed, np.ndarray)

    def begin(self, spool: Path, mark: Mark) -> None:
        """Start to record into the existing directory ``spool``. Raises RuntimeError when already recording."""
        with self._lock:
            if self.mark is not None:
                raise RuntimeError("the recorder is already recording: end() it first")
            _die_with_forks()
            self._files = {
                name: (spool / name).open("wb", buffering=0) for name in (_SPANS, _SEEN, _SITES, _ATTRIBUTES)
            }
            self.failures, self.first_failure = 0, ""
            self._clear()
            for site in self._sites:
                self._write_site(site)
            self.attributes({})
            self._set_mark(mark)

    def end(self) -> None:
        """Stop recording and close the spool; spans that are still open are left out. May be called again."""
        with self._lock:
            self._set_mark(None)
            self.flush()
            for file in self._files.values():
                file.close()
            self._files = {}
            self._clear()
            forget()

    def flush(self) -> None:
        """Write what is held in memory to the spool."""
        with self._lock:
            for name, rows in ((_ATTRIBUTES, self._attribute_lines), (_SEEN, self.seen), (_SPANS, self.spans)):
                block = bytes(rows)
                del rows[: len(block)]
                if block and name in self._files:
                    self._files[name].write(block)

    def stamp(self) -> int:
        """The sequence of this moment. Raises RuntimeError when not recording."""
        if self.mark is None:
            raise RuntimeError("the recorder is not recording: begin() it first")
        return self.mark(thread_state().current)

    def site(self, info: SiteInfo) -> int:
        """The index of ``info`` in the spool's sites, the same for the life of the process."""
        with self._lock:
            index = self._sites.get(info)
            if index is None:
                index = self._sites[info] = len(self._sites)
                if self._files:
                    self._write_site(info)
            return index

    def attributes(self, description: Mapping[str, Any]) -> int:
        """The index of ``description`` (JSON values, tuples for lists) in the spool's attributes; 0 is an empty one."""
        key = tuple(description.items())
        index = self._attributes.get(key)
        if index is not None:
            return index
        with self._lock:
            if len(self._attributes) >= _MOST_ATTRIBUTES:
                self._attributes = {(): 0}
            index = self._attributes[key] = self._add(json.dumps(dict(description), default=str))
            return index

    def request(self, key: str, store: str) -> int:
        """The index of ``{"key": key, "store": store}``, which is not compared with earlier ones: it hardly ever comes
        again.
        """
        with self._lock:
            return self._add(f'{{"key": {quoted(key)}, "store": {quoted(store)}}}')

    def _add(self, line: str) -> int:
        if not self._files:
            return 0
        self._attribute_lines += f"{line}\n".encode()
        self._attributes_written += 1
        return self._attributes_written - 1

    def _see(self, span: int, role: int, value: Any) -> None:
        for extent in extents(value):
            self.seen += pack_seen(span, role, *extent)

    def close(self, row: bytes) -> None:
        """Spool the row of a closed span."""
        self.spans += row
        if len(self.spans) > _BLOCK or len(self.seen) > _BLOCK:
            self.flush()

    def failed(self, error: Exception, where: str) -> None:
        """Count an error of a probe's own; it is raised again under ``COPYTRACE_STRICT=1``."""
        self.failures += 1
        self.first_failure = self.first_failure or f"{where}: {type(error).__name__}: {error}"
        if os.environ.get("COPYTRACE_STRICT") == "1":
            raise error

    def operation(self, label: str, payload: int = 0) -> Operation:
        """A context manager around an operation named by hand, which moves ``payload`` bytes."""
        return Operation(label, payload)

    def _write_site(self, info: SiteInfo) -> None:
        fields = {name: getattr(info, name) for name in SiteInfo.__slots__}
        self._files[_SITES].write(json.dumps(fields).encode() + b"\n")

    def _forget(self) -> None:
        """Become inert in a forked child, whose parent goes on writing to the same files."""
        self._set_mark(None)
        self._files = {}
        self._lock = threading.RLock()
        self._clear()

    def _set_mark(self, mark: Mark | None) -> None:
        if native is not None:
            native.set_mark(mark)
        self.mark = mark

    def _clear(self) -> None:
        self._attributes = {}
        self._attributes_written = 0
        for rows in (self._attribute_lines, self.spans, self.seen):
            rows.clear()


recorder = Recorder()

_watches_forks = False


def _die_with_forks() -> None:
    global _watches_forks
    if not _watches_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=recorder._forget)
        _watches_forks = True


class Operation:
    """One operation named by hand. Inside a running event loop it only names the parent of what is called: what else
    the loop runs meanwhile is not part of it.
    """

    __slots__ = ("_close", "label", "payload")

    def __init__(self, label: str, payload: int) -> None:
        self.label = label
        self.payload = payload
        self._close: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        mark, state = recorder.mark, thread_state()
        self._close = None
        if mark is None:
            return self
        site = recorder.site(SiteInfo("copytrace.operation", "", "operation"))
        attributes = recorder.attributes({"label": self.label, "called_from": callers()})
        span, parent, previous = recorder.next_span(), parent_span.get(), state.current
        waits = asyncio._get_running_loop() is not None
        started, enter = time.perf_counter_ns(), mark(span)
        parent_span.set(span)
        if waits:
            mark(previous)
        else:
            state.current = span

        def close(error: int) -> None:
            parent_span.set(parent)
            if not waits:
                state.current = previous
            if recorder.mark is mark:
                leave = mark(thread_state().current)
                row = (span, parent, site, attributes, state.ident, enter, leave, started)
                recorder.close(pack_span(*row, time.perf_counter_ns(), self.payload, error))

        self._close = close
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._close is not None:
            self._close(int(kind is not None))


def read_spool(spool: Path) -> tuple[NDArray[Any], NDArray[Any], tuple[SiteInfo, ...], tuple[Mapping[str, Any], ...]]:
    """Spans (``SPAN_DTYPE``, in the order they closed), buffers seen (``SEEN_DTYPE``), sites and attributes of a spool.

    Buffers of spans that did not close are left out; a spool that was cut off in the middle of a row is read up to
    there. Raises FileNotFoundError when there is no spool.
    """
    sites = tuple(SiteInfo(**fields) for fields in _lines(spool / _SITES))
    spans, seen = _rows(spool / _SPANS, SPAN_DTYPE), _rows(spool / _SEEN, SEEN_DTYPE)
    return spans, seen[np.isin(seen["span"], spans["id"])], sites, tuple(_lines(spool / _ATTRIBUTES))


def _rows(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    whole = path.stat().st_size // dtype.itemsize
    return np.fromfile(path, dtype, count=whole)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
