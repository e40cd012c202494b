"""A session: probes, hook and memray from entry to exit, then a Trace.

The recorders are process-wide; sessions subscribe to them. The first to open starts them, the last to close stops
them, and each sees what happened between its own entry and exit.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from copytrace import assemble
from copytrace.capture import Capture
from copytrace.environment import describe
from copytrace.errors import CopytraceError
from copytrace.probes import Attachment, attach_all
from copytrace.recorder import recorder
from copytrace.trace import LoadedTrace
from copytrace.trace import save as save_trace
from copytrace.transfers import Recording

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from copytrace.model import Trace
    from copytrace.report import Report


class _Collector:
    """What runs while any session is open."""

    def __init__(self, session: Session) -> None:
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
        self.native = session.native
        self.recording = Recording(self.spool, moves=session.transfers)
        self.capture = Capture(self.spool, self.recording, native=session.native, changed=self.describe)
        self.attachment: Attachment | None = None

    def start(self) -> None:
        self.recording.start()
        try:
            recorder.begin(self.spool, self.recording.mark)
            self.attachment = attach_all()
            if self.memray:
                self.capture.start()
            self.describe()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.capture.stop()
        if self.attachment is not None:
            self.attachment.detach()
        recorder.end()
        self.recording.stop()

    def describe(self) -> None:
        """Keep the spool readable should the process die."""
        if self.sessions or self.attachment is not None:
            first = self.sessions[0] if self.sessions else None
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


class Session:
    """A block or function to be traced; a context manager and a decorator, also of coroutine functions.

    ``native``: record native stacks. ``memray``: record allocations. ``transfers``: record moves with the native
    hook. ``min_bytes``: leave copies below this many bytes, summed over a site, out of the report. ``label`` defaults
    to the file and line of the block. ``spool`` is the directory that the recorders write to, kept when the session
    does not end; a temporary one when not given.

    Raises CopytraceError on entry when the same object is already open or its spool cannot be made.
    """

    def __init__(
        self,
        label: str | None = None,
        *,
        native: bool = True,
        memray: bool = True,
        transfers: bool = True,
        min_bytes: int = 0,
        spool: Path | None = None,
    ) -> None:
        if min_bytes < 0:
            raise CopytraceError(f"min_bytes: {min_bytes} is negative; give a number of bytes from 0 up")
        if label is None:
            caller = sys._getframe(1)
            while caller.f_back is not None and caller.f_globals.get("__name__") == __name__:
                caller = caller.f_back
            label = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        self.label = label
        self.native = native
        self.memray = memray
        self.transfers = transfers
        self.min_bytes = min_bytes
        self.spool = spool
        self._trace: Trace | None = None
        self._read: Callable[[], Trace] | None = None
        self._open = False
        self._first = 0

    def __enter__(self) -> Self:
        global _collector
        with _lock:
            if self._open:
                raise CopytraceError(f"session {self.label}: already open; make another one for a nested block")
            if _collector is None:
                starting = _Collector(self)
                starting.start()
                _collector = starting
            _collector.sessions.append(self)
            self._trace = self._read = None
            self._open = True
            self._first = recorder.stamp()
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
            collector.sessions.remove(self)
            self._open = False
            ending = not collector.sessions
            if ending:
                _collector = None
                collector.stop()
            else:
                collector.capture.rotate()
                recorder.flush()
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
        with _lock:
            if self._read is not None:
                self._trace, self._read = self._read(), None

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
    def trace(self) -> Trace:
        """What was recorded. Raises CopytraceError while the session is open or was never entered."""
        self._settle()
        if self._trace is None:
            state = "still open: leave its block first" if self._open else "never entered"
            raise CopytraceError(f"session {self.label}: {state}")
        return self._trace

    @functools.cached_property
    def _loaded(self) -> LoadedTrace:
        return LoadedTrace(self.trace)

    @property
    def report(self) -> Report:
        """What the trace says. Raises CopytraceError while the session is open or was never entered."""
        if self._loaded.trace is not self.trace:
            self.__dict__.pop("_loaded", None)
        return self._loaded.report

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the trace to ``path``. Raises CopytraceError when the file exists and ``overwrite`` is not set."""
        save_trace(self.trace, path, overwrite=overwrite)


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
