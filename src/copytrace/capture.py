"""memray during a session: our own tracker, and stepping aside for one of the script's.

memray allows one tracker in a process. While a session is open ``memray.Tracker`` is a subclass that closes ours when
the script's begins, lets the script's run as it would alone, keeps a copy of its capture when it ends, and opens ours
again. The captures of a session are then segments in a row.
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copytrace.allocations import Segment
from copytrace.recorder import recorder
from copytrace.room import Room, is_there

if TYPE_CHECKING:
    from collections.abc import Callable

    from copytrace.transfers import Recording


class Capture:
    """The memray captures of a session. ``segments`` are those that ended, ``notes`` what could not be captured and
    why.
    """

    def __init__(self, spool: Path, recording: Recording, *, native: bool, changed: Callable[[], None]) -> None:
        self.spool = spool
        self.recording = recording
        self.native = native
        self.changed = changed
        self.segments: list[Segment] = []
        self.notes: list[str] = []
        self._lock = threading.RLock()
        self._own: Any = None
        self._segment: Segment | None = None
        self._room: Room | None = None
        self._number = 0
        self._running = False
        self._restore: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to capture; without memray or beside somebody else's tracker only a note is made."""
        try:
            import memray
        except ImportError as error:
            self.notes.append(f"memray is not there ({error}): allocations were not recorded")
            return
        self._running = True
        self._open()
        recorder.drained = self.check_room
        original = memray.Tracker
        memray.Tracker = self._stand_in(original)  # type: ignore[misc]

        def restore() -> None:
            if getattr(memray.Tracker, "_copytrace", None) is self:
                memray.Tracker = original  # type: ignore[misc]

        self._restore = restore

    def stop(self) -> None:
        """End the capture and put ``memray.Tracker`` back."""
        self._running = False
        self._restore()
        recorder.drained = None
        self._close()

    def check_room(self) -> None:
        """End the capture when the disk is about to be full."""
        if self._room is not None and self._lock.acquire(blocking=False):
            try:
                if self._room is not None and not self._room.hold():
                    self._close()
                    self.notes.append(
                        "allocations were recorded until the disk was nearly full, and no more after that"
                    )
            finally:
                self._lock.release()

    def abandon(self) -> None:
        """In a forked child: the capture is the parent's. memray drops it by itself, its hooks on threads remain."""
        self._lock = threading.RLock()
        self._running = False
        self._restore()
        internal = sys.modules.get("memray._memray")
        if internal is not None:
            vars(internal)["tracker_creation_lock"] = threading.Lock()  # a thread that is not there may hold the other
        if self._own is not None:
            self._own.__exit__(None, None, None)
        for name in ("_name", "_ident"):  # another thread may have been about to open or close a capture
            if name in vars(threading.Thread):
                delattr(threading.Thread, name)
        self._own = self._segment = self._room = None

    def all_segments(self) -> list[Segment]:
        """The segments that ended and the one that is being written."""
        return [*self.segments, *([self._segment] if self._segment else [])]

    def rotate(self) -> None:
        """End the running segment so that it can be read, and begin the next."""
        with self._lock:
            if self._own is not None:
                self._close()
                self._open()

    def _open(self) -> None:
        import memray

        with self._lock:
            if not is_there(self.spool):
                note = "the disk is nearly full: there is no room for what memray writes"
                self.notes += [note] if note not in self.notes else []
                return
            self._number += 1
            path = self.spool / f"memray-{self._number}.bin"
            destination = memray.FileDestination(path, compress_on_exit=False)  # it is read once, and soon
            tracker = _plain(memray.Tracker)(destination=destination, native_traces=self.native)
            segment = Segment(path, self.recording.set_markers(True), self.native)  # last: other threads go on
            try:
                tracker.__enter__()
            except RuntimeError as error:
                del tracker
                self.recording.set_markers(False)
                path.unlink(missing_ok=True)
                self.notes.append(
                    f"another memray tracker is running, so allocations were not recorded ({str(error).rstrip('.')})"
                )
                return
            self._own, self._segment, self._room = tracker, segment, Room(path)
            self._room.hold()
            self.changed()

    def _close(self) -> None:
        with self._lock:
            if self._own is None or self._segment is None:
                return
            self._own.__exit__(None, None, None)
            self.recording.set_markers(False)
            if self._room is not None:
                self._room.release()
            self.segments.append(self._segment)
            self._own = self._segment = self._room = None

    def _stand_in(self, original: Any) -> Any:
        capture = self

        class Tracker(original):  # type: ignore[misc]
            __doc__ = original.__doc__
            __module__ = original.__module__
            _copytrace = capture
            _copytrace_base = original

            def __init__(self, file_name: Any = None, **options: Any) -> None:
                destination = options.get("destination")
                self._copytrace_path = Path(
                    file_name if file_name is not None else getattr(destination, "path", None) or ""
                )
                self._copytrace_options = options

            def __enter__(self) -> Any:
                with capture._lock:
                    paused = capture._own is not None
                    capture._close()
                    self._copytrace_first = capture.recording.set_markers(True)
                    try:
                        return super().__enter__()
                    except BaseException:
                        capture.recording.set_markers(False)
                        if paused:
                            capture._open()
                        raise

            def __exit__(self, *error: Any) -> Any:
                with capture._lock:
                    left = super().__exit__(*error)
                    capture.recording.set_markers(False)
                    if capture._running:
                        capture._take(self._copytrace_path, self._copytrace_first, self._copytrace_options)
                    return left

        Tracker.__qualname__ = original.__qualname__
        return Tracker

    def _take(self, path: Path, first_mark: int, options: dict[str, Any]) -> None:
        """Keep a copy of a capture that the script made, and capture on our own again."""
        import memray

        if options.get("file_format", memray.FileFormat.ALL_ALLOCATIONS) is not memray.FileFormat.ALL_ALLOCATIONS:
            self.notes.append(
                f"the script's memray capture {path.name} is aggregated: its allocations are not in this report"
            )
        elif not path.is_file():
            self.notes.append(
                "the script's memray tracker did not write to a file: its allocations are not in this report"
            )
        else:
            self._number += 1
            copy = self.spool / f"memray-{self._number}.bin"
            try:
                shutil.copyfile(path, copy)
                self.segments.append(Segment(copy, first_mark, bool(options.get("native_traces", False))))
            except OSError as error:
                self.notes.append(f"the script's memray capture {path.name} could not be copied: {error.strerror}")
        self._open()


def _plain(tracker: Any) -> Any:
    """memray's own class, also while the stand-in has its place."""
    return getattr(tracker, "_copytrace_base", tracker)
