"""Captures read in a process of its own.

memray's symbolizer reads the debug information of every library it meets and keeps it, up to 200 MB with CPython's.
That must not stay in the process that was traced. The helper is started when it is first needed, serves what is asked
of it in a row, and ends when nothing was for some seconds. It is no child of the traced process: nobody who waits for
children meets it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from copytrace.places import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from copytrace.allocations import Segment, Taken

_IDLE = 5.0
"""Seconds without a question after which the helper ends."""
_MOST = 1 << 30
"""Bytes from which it ends when it has answered."""
_PROGRAM = """
import os, sys
os.setsid()
if os.fork():
    os._exit(0)
sys.path[:] = {path!r}
from copytrace.apart import serve
serve({idle!r})
"""


class Helper:
    """The helper of this process. ``ask`` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipes: tuple[IO[bytes], IO[bytes]] | None = None
        """Of questions and of answers, while a helper may be there."""

    def ask(self, segments: Sequence[Segment], marks: NDArray[Any]) -> tuple[Taken, list[str]] | None:
        """What :func:`copytrace.allocations.take` returns, None when no helper can be had."""
        with self._lock, tempfile.TemporaryDirectory(prefix="copytrace-") as folder:
            np.save(Path(folder) / _MARKS, marks)
            question = {"folder": folder, "segments": [[str(s.path.absolute()), *s[1:]] for s in segments]}
            try:
                return self._exchange(question) or self._exchange(question)
            except BaseException:
                self._drop()
                raise

    def _exchange(self, question: dict[str, Any]) -> tuple[Taken, list[str]] | None:
        try:
            questions, answers = self._pipes = self._pipes or _start()
            questions.write(json.dumps(question).encode() + b"\n")
            questions.flush()
            if answers.readline() == b"done\n":
                return _read_answer(Path(question["folder"]))
        except OSError:
            pass
        self._drop()
        return None

    def after_fork(self) -> None:
        """In a forked child, whose parent's helper it is."""
        self._lock = threading.Lock()
        self._drop()

    def _drop(self) -> None:
        for pipe in self._pipes or ():
            with suppress(OSError):
                pipe.close()
        self._pipes = None


def _start() -> tuple[IO[bytes], IO[bytes]]:
    """Raises OSError when there is no Python to run."""
    if not sys.executable:
        raise FileNotFoundError("no Python to run")
    path = list(dict.fromkeys([str(Path(PACKAGE).parent), *map(str, sys.path)]))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM.format(path=path, idle=_IDLE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


helper = Helper()
atexit.register(helper._drop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=helper.after_fork)

_MARKS, _LIVES, _REST = "marks.npy", "lives.npy", "rest.json"


def serve(idle: float) -> None:
    """Answer questions on standard input until it ends, none has come for ``idle`` seconds, or much memory is kept."""
    from resource import RUSAGE_SELF, getrusage

    from copytrace.allocations import Segment, take

    while select.select([sys.stdin.buffer], [], [], idle)[0] and (line := sys.stdin.buffer.readline()):
        question = json.loads(line)
        folder = Path(question["folder"])
        segments = [Segment(Path(path), first, native) for path, first, native in question["segments"]]
        taken, notes = take(segments, np.load(folder / _MARKS))
        np.save(folder / _LIVES, taken.lives)
        (folder / _REST).write_text(json.dumps([taken.stacks, taken.records, notes]), errors="surrogatepass")
        sys.stdout.buffer.write(b"done\n")
        sys.stdout.buffer.flush()
        if getrusage(RUSAGE_SELF).ru_maxrss << 10 > _MOST:
            return


def _read_answer(folder: Path) -> tuple[Taken, list[str]]:
    from copytrace.allocations import Taken

    stacks, records, notes = json.loads((folder / _REST).read_text(errors="surrogatepass"))
    return Taken(np.load(folder / _LIVES), stacks, records), notes
