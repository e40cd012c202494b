"""The one owner of process-wide state: which span is open where, and the spool that closed spans are written to.

Inert until :meth:`Recorder.begin`. A span's parent travels by ContextVar, into tasks and ``asyncio.to_thread``; which
span is innermost on a thread is told to ``mark``, which numbers the change. Rows leave for the spool in blocks, so that
memory does not grow with spans; until then they lie in a mapped file as well, so that none is lost when the process is
killed.
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
from functools import cache
from json.encoder import encode_basestring_ascii as quoted
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from copytrace.callers import callers
from copytrace.errors import CopytraceError
from copytrace.extents import WRAPPERS, extents, forget
from copytrace.model import MUTED, SiteInfo
from copytrace.pending import NAME as PENDING
from copytrace.pending import Pending

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

    type Mark = Callable[[int], int]

_BLOCK = 1 << 16
_MOST_ATTRIBUTES = 4096
MOST_HELD = 1 << 22
"""Bytes for one file that are held while it cannot be written; further ones are dropped."""
FILES = ("spans.bin", "seen.bin", "attributes.jsonl")
SPANS, SEEN, ATTRIBUTES = range(3)
SITES = "sites.jsonl"

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


def forget_thread() -> None:
    """Forget what is open on the calling thread, in a forked child or where an interrupt came between."""
    state = thread_state()
    state.current, state.base, state.busy, state.copying = 0, None, False, False
    state.pending.clear()
    parent_span.set(0)


class Recorder:
    """Spans of one session's life at a time, spooled to a directory."""

    __slots__ = (
        "_attribute_lines",
        "_attributes",
        "_attributes_written",
        "_files",
        "_lock",
        "_outermost",
        "_pending",
        "_sites",
        "_sites_file",
        "_writing",
        "drained",
        "every",
        "failures",
        "first_failure",
        "left",
        "lost",
        "mark",
        "muted_before",
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
        self.left: dict[int, int] = {}
        """Operations that were left before one inside of them was, as generators do -> the one around."""
        self.every = 1
        """Of so many outermost calls one is recorded."""
        self.muted_before = MUTED
        """What is above was left out since recording began."""
        self._outermost = 0
        self.drained: Callable[[], None] | None = None
        """Called after each block of rows that was written."""
        self.lost = ""
        """Why rows are missing in the spool, empty when none are."""
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
        self._files: list[IO[bytes]] = []
        self._sites_file: IO[bytes] | None = None
        self._pending: Pending | None = None
        self._lock = threading.RLock()
        self._writing = False
        if native is not None:
            rows = (self.spans, self.seen)
            strided = np.zeros((4, 3), "S17")[::2, ::-1]
            native.setup(parent_span, *rows, extents, WRAPPERS, self._drain, self.failed, strided)

    def begin(self, spool: Path, mark: Mark, every: int = 1) -> None:
        """Start to record into the existing directory ``spool`` one of ``every`` outermost calls.

        Raises RuntimeError when already recording, CopytraceError when the spool cannot be written.
        """
        with self._lock:
            if self.mark is not None:
                raise RuntimeError("the recorder is already recording: end() it first")
            _die_with_forks()
            forget_thread()
            try:
                self._files = [(spool / name).open("wb", buffering=0) for name in FILES]
                self._sites_file = (spool / SITES).open("wb", buffering=0)
                self._pending = Pending(spool / PENDING)
            except OSError as error:
                self._close()
                raise CopytraceError(f"{spool}: cannot be written: {error.strerror}") from error
            if native is not None:
                native.set_pending(self._pending.memory)
            self.failures, self.first_failure, self.lost = 0, "", ""
            self.every, self._outermost, self.muted_before = every, 0, MUTED | self.next_span()
            if native is not None:
                native.set_sampling(every)
            self._clear()
            if native is not None:
                for rows in self._rows():
                    native.reserve(rows)
            self._write_sites(*self._sites)
            self.attributes({})
            self._set_mark(mark)

    def end(self) -> None:
        """Stop recording and close the spool; spans that are still open are left out. May be called again."""
        with self._lock:
            self._set_mark(None)
            self.flush()
            written = not any(self._rows())
            path = self._pending.path if self._pending is not None else None
            self._close()
            if path is not None and written:
                path.unlink(missing_ok=True)
            self._clear()
            forget()

    def _close(self) -> None:
        for file in (*self._files, *([self._sites_file] if self._sites_file else [])):
            file.close()
        self._files, self._sites_file = [], None
        if native is not None:
            native.set_pending(None)
        if self._pending is not None:
            self._pending.close()
        self._pending = None

    def flush(self) -> None:
        """Write what is held in memory to the spool. What cannot be written stays there, and ``lost`` says why."""
        with self._lock:
            if self._writing:
                return
            self._writing = True
            try:
                for number in (ATTRIBUTES, SEEN, SPANS):
                    self._write(number)
            finally:
                self._writing = False

    def _drain(self) -> None:
        """The same unless another thread does so already."""
        if self._lock.acquire(blocking=False):
            try:
                self.flush()
            except Exception as error:
                self.failed(error, "the spool")
            finally:
                self._lock.release()
            if self.drained is not None:
                self.drained()

    def _write(self, number: int) -> None:
        """Write the rows of a file. What an attempt wrote before a signal interrupted it is not written again."""
        rows, pending = self._rows()[number], self._pending
        if pending is None or not rows:
            return
        file = self._files[number].fileno()
        base = pending.written(number)
        done = os.fstat(file).st_size - base
        try:
            while done < len(rows):
                done += (_write_some if native is None else native.write_some)(file, rows, done)
        except OSError as error:
            self.lost = f"spans could not be written to the spool: {error.strerror}"
        (pending.settle if native is None else native.settle)(number, rows, done)

    def _append(self, number: int, row: bytes) -> None:
        rows = self._rows()[number]
        if native is not None:
            native.add(number, rows, row)
        elif self._pending is not None and len(rows) < MOST_HELD:
            self._pending.add(number, rows, row)

    def _rows(self) -> tuple[bytearray, bytearray, bytearray]:
        return self.spans, self.seen, self._attribute_lines

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
                self._write_sites(info)
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
            if native is not None and self._files:
                before = len(self._attribute_lines)
                try:
                    added = native.request(self._attribute_lines, key, store)
                except BaseException:
                    self._count_since(before)
                    raise
                if added:
                    self._attributes_written += 1
                    return self._last()
            return self._add(f'{{"key": {quoted(key)}, "store": {quoted(store)}}}')

    def _add(self, line: str) -> int:
        if not self._files or len(self._attribute_lines) >= MOST_HELD:
            return 0
        row, before = f"{line}\n".encode(), len(self._attribute_lines)
        try:
            self._append(ATTRIBUTES, row)
        except BaseException:
            self._count_since(before)
            raise
        self._attributes_written += 1
        return self._last()

    def _count_since(self, before: int) -> None:
        """Count the line that was added before an interrupt came, if one was."""
        self._attributes_written += len(self._attribute_lines) > before

    def _last(self) -> int:
        number = self._attributes_written - 1
        if len(self._attribute_lines) > _BLOCK:
            self._drain()
        return number

    def _see(self, span: int, role: int, value: Any) -> None:
        for extent in extents(value):
            self._append(SEEN, pack_seen(span, role, *extent))

    def close(self, row: bytes) -> None:
        """Spool the row of a closed span."""
        self._append(SPANS, row)
        if len(self.spans) > _BLOCK or len(self.seen) > _BLOCK:
            self._drain()

    def leaves_out(self, above: int, copies: bool) -> bool:
        """Whether a call beneath the span ``above`` is left out: one that is not sampled, or what such a one calls."""
        if above or self.every == 1 or copies:
            return above > self.muted_before
        self._outermost += 1
        return (self._outermost - 1) % self.every > 0

    def outermost(self) -> int:
        """Outermost calls since recording began, counted when they are sampled."""
        return self._outermost if native is None else native.outermost()

    def failed(self, error: Exception, where: str) -> None:
        """Count an error of a probe's own; it is raised again under ``COPYTRACE_STRICT=1``."""
        self.failures += 1
        self.first_failure = self.first_failure or f"{where}: {type(error).__name__}: {error}"
        if os.environ.get("COPYTRACE_STRICT") == "1":
            raise error

    def still_open(self, span: int) -> int:
        """``span`` or, when it was left before an operation inside of it, the nearest around it that was not."""
        while span in self.left:
            span = self.left[span]
        return span

    def operation(self, label: str, payload: int = 0) -> Operation:
        """A context manager around an operation named by hand, which moves ``payload`` bytes."""
        return Operation(label, payload)

    def _write_sites(self, *sites: SiteInfo) -> None:
        if self._sites_file is None:
            return
        try:
            self._sites_file.write(b"".join(map(_line, sites)))
        except OSError as error:
            self.lost = f"spans could not be written to the spool: {error.strerror}"

    def _forget(self) -> None:
        """Become inert in a forked child, whose parent goes on writing to the same files."""
        self._set_mark(None)
        self._close()
        self._lock = threading.RLock()
        self._writing = False
        self._clear()

    def _set_mark(self, mark: Mark | None) -> None:
        if native is not None:
            native.set_mark(mark)
        self.mark = mark

    def _clear(self) -> None:
        self._attributes = {}
        self._attributes_written = 0
        self.left = {}
        for rows in (self._attribute_lines, self.spans, self.seen):
            rows.clear()


recorder = Recorder()


_watches_forks = False


def _write_some(descriptor: int, rows: bytearray, start: int) -> int:
    return os.write(descriptor, rows[start : start + _BLOCK])


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
        if mark is None or parent_span.get() > recorder.muted_before:
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
            if parent_span.get() == span:
                parent_span.set(recorder.still_open(parent))
            else:
                recorder.left[span] = parent
            if state.current == span:
                state.current = recorder.still_open(previous)
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


@cache
def _line(site: SiteInfo) -> bytes:
    return json.dumps({name: getattr(site, name) for name in SiteInfo.__slots__}).encode() + b"\n"
