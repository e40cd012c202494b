"""The trace file: a zip of a JSON header and plain numpy arrays, versioned, without pickles.

It is resolved: names of functions and libraries are in it, so it can be read on a machine that has none of them. A
directory ``FILE.partial``, what a run that did not end has left, is read as well. Of a long trace, which is many
stretches, one is in memory at a time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from copytrace.archive import check_size, holds, place_of, read, write
from copytrace.errors import CopytraceError
from copytrace.model import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from copytrace.model import Process
    from copytrace.report import Report

_PACKED: dict[str, Any] = {"compression": zipfile.ZIP_DEFLATED, "compresslevel": 4}


class LoadedTrace:
    """A trace that was read from a file. ``trace`` is the data, ``report`` what it says."""

    def __init__(self, trace: Trace, source: str = "") -> None:
        self.trace = trace
        self._source = source

    @cached_property
    def report(self) -> Report:
        """Raises CopytraceError when the file holds what no recorder writes."""
        from copytrace.processes import attribute
        from copytrace.report import Report
        from copytrace.reports.json import from_dict, to_dict

        if not self._source:
            return Report.from_data(attribute(self.trace))
        try:
            found = Report.from_data(attribute(self.trace))
            return from_dict(Report, to_dict(found), self._source)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise CopytraceError(f"{self._source}: damaged copytrace trace ({type(error).__name__})") from error


class Traced(ABC):
    """What has a :attr:`trace` once it is over: its report, and its file."""

    _loaded: LoadedTrace | None = None

    @property
    @abstractmethod
    def trace(self) -> Trace:
        """What was recorded."""

    @property
    def report(self) -> Report:
        """What the trace says. Raises as :attr:`trace`."""
        trace = self.trace
        if self._loaded is None or self._loaded.trace is not trace:
            self._loaded = LoadedTrace(trace)
        return self._loaded.report

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the trace to ``path``. Raises CopytraceError when the file exists and ``overwrite`` is not set, and as
        :attr:`trace`.
        """
        save(self.trace, path, overwrite=overwrite)


class Stored(Sequence[Trace]):
    """Parts of a trace in a file, of which each is read when it is asked for, and none is kept.

    Reading one raises CopytraceError, one line, when it is damaged.
    """

    def __init__(self, source: Path, count: int, *, own: bool = False) -> None:
        self.source = source
        self.own = own
        """Whether the file holds nothing else, and goes when this does."""
        self._count = count
        if own:
            weakref.finalize(self, _remove, source, os.getpid())

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Trace: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Trace]: ...
    def __getitem__(self, index: int | slice) -> Trace | Sequence[Trace]:
        if isinstance(index, slice):
            return [self[number] for number in range(self._count)[index]]
        number = range(self._count)[index]
        with _opened(self.source) as archive:
            return read(archive, self.source, place_of(number))[0]

    def __iter__(self) -> Iterator[Trace]:
        with _opened(self.source) as archive:
            for number in range(self._count):
                yield read(archive, self.source, place_of(number))[0]


def _remove(file: Path, process: int) -> None:
    """Remove a file, but not in a process that was forked from the one that made it."""
    if os.getpid() == process:
        file.unlink(missing_ok=True)


def joined(first: Trace, others: Iterable[Trace]) -> Trace:
    """A trace with others as its parts. When one of these continues another they may be many: then they are put into a
    temporary file, one by one, which goes when the parts do.

    Raises CopytraceError when that file cannot be written.
    """
    others = iter(others)
    held: list[Trace] = []
    for part in others:
        held.append(part)
        del part
        if held[-1].continued:
            return replace(first, parts=_stored(held, others))
    return replace(first, parts=tuple(held)) if held else first


def _stored(held: list[Trace], others: Iterator[Trace]) -> Stored:
    """Put parts into a file, and let go of them: first those that are ``held``."""
    handle, name = tempfile.mkstemp(prefix="copytrace-")
    count = 0
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", **_PACKED) as archive:
            while (part := held.pop(0) if held else next(others, None)) is not None:
                write(part, archive, place_of(count))
                count += 1
                del part
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):
            raise CopytraceError(f"{name}: could not be written: {error.strerror}") from error
        raise
    return Stored(Path(name), count, own=True)


def save(trace: Trace, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write ``trace`` to ``path`` at once or not at all.

    Raises CopytraceError when the file exists and ``overwrite`` is not set, or when it cannot be written.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise CopytraceError(f"{target}: the file exists; choose another name or overwrite it (-f)")
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise CopytraceError(f"{target}: cannot write there: {error.strerror}") from error
    try:
        os.close(handle)
        ready = isinstance(trace.parts, Stored) and trace.parts.own
        if isinstance(trace.parts, Stored) and ready:
            shutil.copyfile(trace.parts.source, temporary)
        with zipfile.ZipFile(temporary, "a" if ready else "w", **_PACKED) as archive:
            write(trace, archive)
            for number, part in enumerate(() if ready else trace.parts):
                write(part, archive, place_of(number))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        if overwrite:
            os.replace(temporary, target)
        else:
            os.link(temporary, target)
    except FileExistsError as error:
        raise CopytraceError(f"{target}: the file exists; choose another name or overwrite it (-f)") from error
    except OSError as error:
        raise CopytraceError(f"{target}: could not be written: {error.strerror}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> LoadedTrace:
    """Read a trace file, or the ``.partial`` directory of a run that did not end.

    Raises CopytraceError, one line, when there is no such file or it is damaged, cut short, newer or no trace at all.
    """
    source = Path(path)
    if source.is_dir():
        from copytrace.assemble import recover
        from copytrace.follow import DIRECTORY, collect

        untraced: list[Process] = []
        own = recover(source)
        trace = joined(next(own), chain(own, collect(source / DIRECTORY, untraced)))
        return LoadedTrace(replace(trace, untraced=tuple(untraced)), str(source))
    with _opened(source) as archive:
        trace, count = read(archive, source)
        if not holds(archive, count):
            raise CopytraceError(f"{source}: damaged copytrace trace (parts are missing)")
        return LoadedTrace(replace(trace, parts=Stored(source, count)) if count else trace, str(source))


@contextmanager
def _opened(source: Path) -> Iterator[zipfile.ZipFile]:
    """The archive in a file. Raises CopytraceError when it cannot be read, also in what is done with it."""
    try:
        with zipfile.ZipFile(source) as archive:
            check_size(archive, source.stat().st_size)
            yield archive
    except FileNotFoundError as error:
        partial = Path(f"{source}.partial")
        hint = f"; a run that did not end left {partial}" if partial.is_dir() else ""
        raise CopytraceError(f"{source}: no such file{hint}") from error
    except zipfile.BadZipFile as error:
        raise CopytraceError(f"{source}: not a copytrace trace, or cut short") from error
    except OSError as error:
        raise CopytraceError(f"{source}: cannot be read: {error.strerror}") from error
    except CopytraceError:
        raise
    except Exception as error:
        raise CopytraceError(f"{source}: damaged copytrace trace ({type(error).__name__})") from error
