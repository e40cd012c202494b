"""A session: probes, hook and memray from entry to exit, then a Trace.

The recorders are process-wide; sessions subscribe to them. The first to open starts them, the last to close stops
them, and each sees what happened between its own entry and exit.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from copytrace import assemble, follow
from copytrace.capture import Capture
from copytrace.environment import describe
from copytrace.errors import CopytraceError
from copytrace.probes import Attachment, attach_all
from copytrace.recorder import _die_with_forks, forget_thread, recorder
from copytrace.trace import Traced, joined
from copytrace.transfers import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from copytrace.model import Process, Trace


class _Collector:
    """What runs while any session is open."""

    def __init__(
        self,
        session: Session,
        following: follow.Following | None = None,
        attachment: Attachment | None = None,
    ) -> None:
        self.sessions: list[Session] = []
        self.unread: list[Session] = []
        """Those that closed while others were open: reading what was recorded waits until nothing is recorded."""
        self.temporary = session.spool is None
        self.spool = session.spool or Path(tempfile.mkdtemp(prefix="copytrace-"))
        if session.spool is not None:
            try:
                session.spool.mkdir(parents=True)
            except FileExistsError as error:
                raise CopytraceError(
                    f"{session.spool}: the directory exists; remove it or choose another output name"
                ) from error
            except OSError as error:
                raise CopytraceError(f"{session.spool}: cannot be made: {error.strerror}") from error
        self.memray = session.memray
        self.min_bytes = session.min_bytes
        self.sample = session.sample
        self.native = session.native
        self.recording = Recording(self.spool, moves=session.transfers)
        self.capture = Capture(self.spool, self.recording, native=session.native, changed=self.describe)
        self.attachment = attachment
        self.following = following
        self.follows = session.follow
        self.children = follow.Children()

    def start(self) -> None:
        self.recording.start()
        try:
            recorder.begin(self.spool, self.recording.mark, self.sample)
            self.attachment = self.attachment or attach_all()
            self.attachment.changed = self.describe
            if self.memray:
                self.capture.start()
            _watch_forks()
            self.describe()
            if self.follows:
                options = {name: getattr(self, name) for name in ("native", "memray", "sample")}
                options |= {"transfers": self.recording.moves, "min_bytes": self.min_bytes}
                self.following = follow.Following(self.spool / follow.DIRECTORY, options)
                self.following.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all of it, also when a part of it cannot end properly; then the last error is raised."""
        with ExitStack() as parts:
            parts.callback(self.recording.stop)
            parts.callback(recorder.end)
            if self.attachment is not None:
                parts.callback(self.attachment.detach)
            parts.callback(self.capture.stop)
            if self.following is not None:
                parts.callback(self.following.stop)

    def describe(self) -> None:
        """Keep the spool readable should the process die."""
        if self.sessions or self.attachment is not None:
            first = self.sessions[0] if self.sessions else None
            with suppress(OSError):
                assemble.describe(
                    self.spool,
                    label=first.label if first else "",
                    native=self.native,
                    min_bytes=first.min_bytes if first else 0,
                    segments=self.capture.all_segments(),
                    **self.facts(),
                )

    def facts(self) -> dict[str, Any]:
        """What a trace says of its making."""
        notes = list(self.capture.notes)
        recorder.flush()
        if recorder.lost:
            notes.append(recorder.lost)
        if self.following is None and self.children.any():
            notes.append("other processes were started and not followed; --follow traces those that run Python")
        if self.sample > 1:
            calls = recorder.outermost()
            notes.append(
                f"sampled: of {calls} outermost calls {-(-calls // self.sample)} were recorded (one of {self.sample})"
            )
        if recorder.failures:
            notes.append(
                f"{recorder.failures} errors inside probes were swallowed; run with COPYTRACE_STRICT=1 to see the first"
            )
        return {
            "environment": describe(),
            "probes": self.attachment.statuses() if self.attachment else (),
            "notes": notes,
            "reason": "memray was switched off" if not self.memray else "; ".join(self.capture.notes),
        }


_lock = threading.RLock()
_collector: _Collector | None = None
_following: follow.Following | None = None
"""Of a process that is not recorded itself, but whose forks are."""
_fork_handlers: list[bool] = []
"""Of each whether memray was there when it was registered; the last one acts."""


def _watch_forks() -> None:
    """Act in a forked child after the handlers of our recorders and of memray, which drop what is the parent's."""
    _die_with_forks()
    beside_memray = "memray" in sys.modules
    if beside_memray not in _fork_handlers and hasattr(os, "register_at_fork"):
        _fork_handlers.append(beside_memray)
        os.register_at_fork(after_in_child=functools.partial(_in_forked_child, len(_fork_handlers)))


def _in_forked_child(handler: int) -> None:
    """The parent's session goes on there; if it follows its children, one of this process begins."""
    global _lock, _collector
    if handler != len(_fork_handlers):
        return
    collector, _collector, _lock = _collector, None, threading.RLock()
    following, attachment = _following, None
    if collector is not None:
        for session in (*collector.sessions, *collector.unread):
            session._open, session._read = False, None
        collector.capture.abandon()
        following, attachment = collector.following, collector.attachment
    if following is not None and not follow.about_to_exec():
        forget_thread()
        if attachment is not None:
            attachment.after_fork()
        follow.record(following, "forked", attachment)


def follow_forks(following: follow.Following) -> None:
    """Record in what this process forks, but not in itself."""
    global _following
    _following = following
    _watch_forks()


def record_until_left(
    following: follow.Following, followed: follow.Followed, attachment: Attachment | None
) -> Callable[[], None]:
    """Begin to record in this process, which is followed; what is returned ends it. The spool is left as it is."""
    global _collector
    recording = Session(followed.name, spool=followed.spool, **following.options)
    with _lock:
        collector = _Collector(recording, following, attachment)
        collector.start()
        collector.sessions.append(recording)
        recording._open = True
        recording._first = recorder.stamp()
        _collector = collector
        followed.tell(first_span=recorder.next_span())

    def keep() -> None:
        collector.describe()
        with suppress(OSError):
            followed.tell()

    if collector.attachment is not None:
        collector.attachment.changed = keep

    def leave() -> None:
        global _collector
        with _lock:
            if _collector is collector:
                _collector = None
                collector.stop()
                collector.describe()

    return leave


def _end_at_exit() -> None:
    """The interpreter ends with a session open: end the recorders, and leave nothing in the directory for temporary
    files, where nobody would find it.
    """
    global _collector
    with _lock:
        collector, _collector = _collector, None
        if collector is not None:
            with suppress(Exception):
                collector.stop()
            if collector.temporary:
                shutil.rmtree(collector.spool, ignore_errors=True)


def leave_all_but(last: Session) -> None:
    """Leave the sessions that a program has left open, so that ``last`` is the last."""
    with _lock:
        for session in [] if _collector is None else [each for each in _collector.sessions if each is not last]:
            session.__exit__(None, None, None)


class Session(Traced):
    """A block or function to be traced; a context manager and a decorator, also of coroutine functions.

    ``native``: record native stacks. ``memray``: record allocations. ``transfers``: record moves with the native
    hook. ``follow``: trace the processes that are started meanwhile and theirs, too. ``min_bytes``: leave copies below
    this many bytes, summed over a site, out of the report. ``label`` defaults to the file and line of the block.
    ``spool`` is the directory that the recorders write to, kept when the session does not end; a temporary one when
    not given. ``sample``: record one of so many outermost calls and what it calls, from the first on, and leave the
    others out; operations named by hand are all recorded.

    Raises CopytraceError when ``sample`` is below 1 or ``min_bytes`` below 0, and on entry when the same object is
    already open or its spool cannot be made.
    """

    def __init__(
        self,
        label: str | None = None,
        *,
        native: bool = True,
        memray: bool = True,
        transfers: bool = True,
        follow: bool = False,
        sample: int = 1,
        min_bytes: int = 0,
        spool: str | os.PathLike[str] | None = None,
    ) -> None:
        if min_bytes < 0:
            raise CopytraceError(f"min_bytes: {min_bytes} is negative; give a number of bytes from 0 up")
        if sample < 1:
            raise CopytraceError(f"sample: {sample}; give 1 to record every call, or more for one of so many")
        if label is None:
            caller = sys._getframe(1)
            while caller.f_back is not None and caller.f_globals.get("__name__") == __name__:
                caller = caller.f_back
            label = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        self.label = label
        self.native = native
        self.memray = memray
        self.transfers = transfers
        self.follow = follow
        self.sample = sample
        self.min_bytes = min_bytes
        self.spool = Path(spool) if spool is not None else None
        self._trace: Trace | None = None
        self._failure: Exception | None = None
        self._read: Callable[[], Iterator[Trace]] | None = None
        self._open = False
        self._first = 0
        self._opened = 0
        self._followed: Path | None = None

    def __enter__(self) -> Self:
        global _collector
        with _lock:
            if self._open:
                raise CopytraceError(f"session {self.label}: already open; make another one for a nested block")
            if _collector is None:
                starting = _Collector(self)
                try:
                    starting.start()
                except BaseException:
                    shutil.rmtree(starting.spool, ignore_errors=True)
                    raise
                _collector = starting
                atexit.unregister(_end_at_exit)
                atexit.register(_end_at_exit)
            _collector.sessions.append(self)
            self._trace = self._read = self._failure = None
            self._open = True
            self._first = recorder.stamp()
            self._opened = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _collector
        with _lock:
            collector = _collector
            if collector is None or not self._open:
                return
            last = recorder.stamp()
            facts = collector.facts()
            self._followed = self.followed
            collector.sessions.remove(self)
            self._open = False
            ending = not collector.sessions
            if ending:
                _collector = None
                try:
                    collector.stop()
                except Exception as error:
                    facts["notes"].append(f"the recorders did not end properly ({type(error).__name__}: {error})")
            else:
                collector.capture.rotate()
                recorder.flush()
            if self.sample != collector.sample:
                facts["notes"].append(
                    f"one of {collector.sample} calls was recorded, as the session around this one does"
                )
            if self.follow and collector.following is None:
                facts["notes"].append("processes were not followed: the session around this one does not follow them")
            facts["notes"] = [
                *collector.capture.notes,
                *(note for note in facts["notes"] if note not in collector.capture.notes),
            ]
            self._read = functools.partial(
                assemble.assemble,
                collector.spool,
                tuple(collector.capture.segments),
                label=self.label,
                native=collector.native,
                min_bytes=self.min_bytes,
                between=(self._first, last),
                **facts,
            )
            if not ending:
                collector.unread.append(self)
                return
            for session in (*collector.unread, self):
                session._settle()
            if collector.temporary:
                shutil.rmtree(collector.spool, ignore_errors=True)

    def _settle(self) -> None:
        """Read what was recorded. An error is kept for whoever asks for the trace: it is none of the block's."""
        with _lock:
            read, self._read = self._read, None
            if read is None:
                return
            try:
                untraced: list[Process] = []
                others = follow.collect(self._followed, untraced, self._opened) if self._followed is not None else ()
                own = read()
                self._trace = joined(next(own), chain(own, others))
                if untraced:
                    self._trace = replace(self._trace, untraced=tuple(untraced))
            except Exception as error:
                self._failure = error

    def __call__[**P, R](self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return traced_coroutine  # type: ignore[return-value]

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return traced

    @property
    def followed(self) -> Path | None:
        """Where the processes that are followed leave what they record; None when none are."""
        collector = _collector if self._open else None
        following = collector.following if collector is not None and self.follow else None
        return following.directory if following is not None else None

    @property
    def trace(self) -> Trace:
        """What was recorded. Raises CopytraceError while the session is open or was never entered."""
        self._settle()
        if self._failure is not None:
            why = str(self._failure) or type(self._failure).__name__
            raise CopytraceError(f"session {self.label}: what was recorded cannot be read: {why}") from self._failure
        if self._trace is None:
            state = "still open: leave its block first" if self._open else "never entered"
            raise CopytraceError(f"session {self.label}: {state}")
        return self._trace


session = Session


@contextmanager
def operation(name: str, *, payload_bytes: int = 0) -> Iterator[None]:
    """Name what happens inside as one operation that moves ``payload_bytes`` bytes; does nothing while no session is
    open.

    Raises CopytraceError when ``payload_bytes`` is negative.
    """
    if payload_bytes < 0:
        raise CopytraceError(
            f"payload_bytes: {payload_bytes} is negative; give the bytes of the region that {name} moves"
        )
    with recorder.operation(name, payload_bytes):
        yield
