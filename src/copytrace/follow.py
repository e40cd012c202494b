"""Tracing the processes that a traced process starts, and theirs.

The session that follows makes a directory and names it in the environment. Each process writes to a spool of its own
in there and ends it when it exits; the session reads them all when it closes. What is forked begins at once, what is
started as another Python program by a ``sitecustomize`` that stands first on ``PYTHONPATH``.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from copytrace.errors import CopytraceError
from copytrace.model import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from copytrace.model import Trace

VARIABLE = "COPYTRACE_FOLLOW"
"""Names the directory in which a process is to leave its spool."""
DIRECTORY = "processes"
"""Of the spools of the other processes, in the spool of the session that follows them."""

_STARTUP = str(Path(__file__).parent / "startup")
_OPTIONS, _FACTS, _RUNNING, _SPOOL = "options.json", "process.json", "running", "spool"


class Following:
    """Where followed processes leave their spools, and with which options they record."""

    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        self.directory = directory
        self.options = options
        self._before: dict[str, str | None] = {}

    @classmethod
    def inherited(cls) -> Self | None:
        """What the environment asks of this process; None when it is not, or no longer, followed."""
        directory = os.environ.get(VARIABLE)
        if not directory:
            return None
        try:
            return cls(Path(directory), dict(json.loads((Path(directory) / _OPTIONS).read_text())))
        except (OSError, ValueError):
            return None

    def prepare(self) -> None:
        """Make the directory, if nobody has. Raises OSError when it cannot be made."""
        self.directory.mkdir(exist_ok=True)
        (self.directory / _OPTIONS).write_text(json.dumps(self.options))

    def start(self) -> None:
        """Have children followed from now on. Raises OSError when the directory cannot be made."""
        self.prepare()
        path = [_STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])]
        for name, value in ((VARIABLE, str(self.directory.absolute())), ("PYTHONPATH", os.pathsep.join(path))):
            self._before[name] = os.environ.get(name)
            os.environ[name] = value

    def stop(self) -> None:
        """Put the environment back, where nobody else has changed it meanwhile; may be called again."""
        for name, before in self._before.items():
            now = os.environ.get(name, "")
            if name != VARIABLE and _STARTUP not in now.split(os.pathsep):
                continue
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
        self._before = {}


class Followed:
    """This process, followed: it records from now to its end. ``kind`` is ``forked``, ``started`` or ``worker``;
    without a ``name`` it is called what multiprocessing or its program is called.

    Raises OSError when the process that follows has ended meanwhile.
    """

    def __init__(self, following: Following, kind: str, name: str = "") -> None:
        self.pid = os.getpid()
        self._place = following.directory / f"{time.monotonic_ns():020d}-{self.pid}"
        self._place.mkdir()
        self.spool = self._place / _SPOOL
        self.name = name or ("forked child" if kind == "forked" else _program())
        self._named = bool(name)
        self._facts: dict[str, Any] = {"kind": kind, "started": time.perf_counter_ns(), "ended": False}
        self._lock = _hold(self._place / _RUNNING)
        self.tell()
        if "multiprocessing.util" in sys.modules:
            from multiprocessing import util

            util.register_after_fork(self, Followed.tell)  # when it has its name
        elif "--multiprocessing-fork" in sys.orig_argv:
            self._name_when_prepared()

    def tell(self, **facts: Any) -> None:
        """Write down what is known of this process, its name above all."""
        process = sys.modules.get("multiprocessing.process")
        if process is not None and not self._named and process.current_process().name != "MainProcess":
            self.name = str(process.current_process().name)
        self._facts |= {"name": self.name, **facts}
        temporary = self._place / f"{_FACTS}.new"
        temporary.write_text(json.dumps(self._facts))
        temporary.replace(self._place / _FACTS)

    def _name_when_prepared(self) -> None:
        """Learn the name that multiprocessing gives to what it spawned, which its first message tells."""
        from multiprocessing import spawn

        prepare = spawn.prepare

        @functools.wraps(prepare)
        def name_and_prepare(data: dict[str, Any]) -> None:
            spawn.prepare = prepare
            self.name = str(data.get("name", self.name))
            self.tell()
            prepare(data)

        spawn.prepare = name_and_prepare  # type: ignore[assignment]


def _hold(path: Path) -> IO[bytes]:
    """A file that is locked while this process lives and runs this program."""
    import fcntl

    file = path.open("wb")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def _is_held(path: Path) -> bool:
    import fcntl

    try:
        with path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _program() -> str:
    """What this process runs, as it is called in a report."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, "")
        elif word in ("-c", "-m"):
            return f"python -m {next(words, '')}" if word == "-m" else "python -c"
        elif not word.startswith("-"):
            return os.path.basename(word)
    return "python"


# --- in a child ------------------------------------------------------------------------------------------------------

_followed: Followed | None = None
_leave: Callable[[], None] | None = None
_watches_exit = False


def begin() -> None:
    """Begin in a Python program that a followed process has started. Does nothing when it is not followed."""
    following = Following.inherited()
    command = " ".join(sys.orig_argv)
    if following is None or "resource_tracker import main" in command:
        return
    if "multiprocessing.forkserver import main" in command:
        from copytrace._session import follow_forks

        follow_forks(following)
    else:
        record(following, "started")


def record(following: Following, kind: str, attachment: Any = None, name: str = "") -> None:
    """Record in this process from now to its end, with the probes that a forked process has found attached."""
    global _followed, _leave
    try:
        from copytrace._session import record_until_left

        followed = Followed(following, kind, name)
        _leave = record_until_left(following, followed, attachment)
        _followed = followed
        _watch_exit()
    except FileNotFoundError:
        return  # the session is over
    except Exception as error:
        if os.environ.get("COPYTRACE_STRICT") == "1":
            raise
        _excuse(following, kind, name, error)


def _excuse(following: Following, kind: str, name: str, error: Exception) -> None:
    facts = {"name": name or _program(), "kind": kind, "reason": " ".join(f"{type(error).__name__}: {error}".split())}
    try:
        (following.directory / f"untraced-{os.getpid()}.json").write_text(json.dumps(facts))
    except OSError:
        return


def _watch_exit() -> None:
    """Leave at the exit of this process: when the interpreter ends, and in ``os._exit``, by which forked children of
    multiprocessing and others end.
    """
    global _watches_exit
    atexit.register(leave)
    if _watches_exit:
        return
    exit_at_once = os._exit

    @functools.wraps(exit_at_once)
    def leave_and_exit(status: int) -> Any:
        leave()
        exit_at_once(status)

    os._exit = leave_and_exit
    _watches_exit = True


def about_to_exec() -> bool:
    """Whether this process was forked by ``subprocess`` with a ``preexec_fn``: it becomes another program at once."""
    return sys._getframe(2).f_globals.get("__name__") == "subprocess"


def leave() -> None:
    """End the record of this process, if it is followed. May be called again."""
    global _followed
    followed, _followed = _followed, None
    if followed is None or followed.pid != os.getpid():
        return
    try:
        if _leave is not None:
            _leave()
        followed.tell(ended=True)
    except OSError:
        return  # the session is over, and its directory gone
    except Exception:
        if os.environ.get("COPYTRACE_STRICT") == "1":
            raise


# --- in the process that follows -------------------------------------------------------------------------------------


def running(directory: Path) -> bool:
    """Whether a process that left a spool in ``directory`` has not ended yet."""
    return any(_is_held(place / _RUNNING) for place in _places(directory))


def collect(directory: Path, untraced: list[Process], since: int = 0) -> Iterator[Trace]:
    """The traces of the processes that left a spool in ``directory``, in the order in which they began, each with the
    stretches that continue it. Those processes of which there is none are put into ``untraced``. ``since``: only what
    began then or later (ns of ``time.perf_counter_ns``).
    """
    for place in _places(directory):
        facts = _read(place / _FACTS)
        if _number(facts, "started") < since:
            continue
        process = Process(str(facts.get("name", "?")), str(facts.get("kind", "started")), *_status(place, facts))
        try:
            yield from _own(place / _SPOOL, process, _number(facts, "first_span"))
        except CopytraceError as error:
            reason = process.reason or str(error).replace(str(place), place.name)
            untraced.append(replace(process, status="untraced", reason=reason))
    for file in sorted(directory.glob("untraced-*.json")):
        facts = _read(file)
        reason = str(facts.get("reason", ""))
        untraced.append(Process(str(facts.get("name", "?")), str(facts.get("kind", "started")), "untraced", reason))


def _places(directory: Path) -> Iterator[Path]:
    for place in sorted(directory.glob("[0-9]*-[0-9]*")):
        if (place / _FACTS).exists():
            yield place


def _read(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _number(facts: dict[str, Any], name: str) -> int:
    number = facts.get(name, 0)
    return number if isinstance(number, int) and 0 <= number < 1 << 64 else 0


def _status(place: Path, facts: dict[str, Any]) -> tuple[str, str]:
    if facts.get("ended"):
        return "complete", ""
    if _is_held(place / _RUNNING):
        return "running", "it had not ended when the session closed"
    return "cut-off", "it was terminated, killed or crashed, or became another program"


def _own(spool: Path, process: Process, first_span: int) -> Iterator[Trace]:
    """The trace in a spool without the spans that were open when the process was forked."""
    import numpy as np

    from copytrace.assemble import recover

    for trace in recover(spool, ended=True):
        spans = trace.spans[trace.spans["id"] > first_span]
        seen = trace.seen[np.isin(trace.seen["span"], spans["id"])]
        yield replace(trace, spans=spans, seen=seen, process=process, complete=process.status == "complete")


class Children:
    """Tells whether this process has had children since."""

    def __init__(self) -> None:
        self._living = _living()
        self._ended = _faults_of_ended()

    def any(self) -> bool:
        """True when a child was started since; False when none was or it cannot be told."""
        living = _living()
        return bool(living - self._living) or (_faults_of_ended() != self._ended and self._living <= living)


def _living() -> set[str]:
    try:
        return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}
    except OSError:
        return set()


def _faults_of_ended() -> int:
    """Page faults of the children that ended and were waited for; each has some."""
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
