"""Run a program in this process the way ``python`` would, and hand its exit over unchanged."""

from __future__ import annotations

import builtins
import io
import linecache
import os
import re
import sys
import tokenize
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Literal
from zipfile import is_zipfile

from copytrace.errors import CopytraceError

_SECRET = re.compile(
    r"""(?i)(\w*(?:secret|token|passw|access_?key|api_?key|account_?key|credential)\w*["']?\s*[=:,]\s*)(["'])[^"'\n]*\2"""
)
"""A text given to a name that speaks of a credential."""
_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s\"'@]+@")
"""The user and password of an address."""


class NotRunnableError(CopytraceError):
    """There is no such program; not to be taken for an error that a program raised."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a script (``-`` for standard input), a module or a piece of code, and its arguments."""

    kind: Literal["script", "module", "code"]
    target: str
    arguments: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """What the trace of this program is called when the user does not say."""
        if self.kind == "code":
            return "code"
        if self.kind == "module":
            return self.target
        return "stdin" if self.target == "-" else Path(self.target).resolve().stem

    @property
    def found(self) -> bool:
        """False for a script that does not exist; modules are looked up when they run."""
        return self.kind != "script" or self.target == "-" or Path(self.target).exists()

    def text(self) -> str:
        """The source of a script or piece of code, working and home directory made ``.`` and ``~`` and what looks like
        a credential left out; else empty.
        """
        if self.kind == "code":
            source = self.target
        elif self.kind == "script" and os.path.isfile(self.target):
            try:
                with tokenize.open(self.target) as stream:
                    source = stream.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                return ""
        else:
            return ""
        for place, name in ((os.getcwd(), "."), (os.path.expanduser("~"), "~")):
            if len(place) > 1:
                source = source.replace(place, name)
        source = _SECRET.sub(r"\g<1>\g<2>...\g<2>", source)
        return _USER.sub(r"\1...@", source)

    def run(self) -> None:
        """Run to the end as ``__main__``. Whatever the program raises comes out as it is, SystemExit too.

        Raises :class:`NotRunnableError` when the module is not found.
        """
        main = ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        vars(main)["__annotations__"] = {}
        sys.modules["__main__"] = main
        exec(self._prepare(main), vars(main))

    def _prepare(self, main: ModuleType) -> CodeType:
        if self.kind == "module":
            sys.argv[:] = ["-m", *self.arguments]
            _set_first_path(os.getcwd())
            spec = _module_spec(self.target)
            sys.argv[0] = spec.origin or self.target
            return _prepare_module(main, spec)
        if self.kind == "code":
            sys.argv[:] = ["-c", *self.arguments]
            _set_first_path("")
            return _prepare_text(main, self.target, "<string>")
        sys.argv[:] = [self.target, *self.arguments]
        if self.target == "-":
            _set_first_path("")
            return _prepare_text(main, sys.stdin.read(), "<stdin>")
        if os.path.isdir(self.target) or is_zipfile(self.target):
            folder = os.path.join(os.getcwd(), self.target)
            _set_first_path(folder)
            found = PathFinder.find_spec("__main__", [folder])
            if found is None:
                raise NotRunnableError(f"{self.target}: no __main__ module in it")
            return _prepare_module(main, found)
        return _prepare_script(main, self.target)


def _set_first_path(entry: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = entry


def _prepare_script(main: ModuleType, script: str) -> CodeType:
    _set_first_path(os.path.dirname(os.path.realpath(script)))
    file = os.path.join(os.getcwd(), script)
    main.__file__ = file
    main.__loader__ = SourceFileLoader("__main__", file)
    vars(main)["__cached__"] = None
    with io.open_code(file) as source:
        return compile(source.read(), file, "exec", dont_inherit=True)


def _prepare_text(main: ModuleType, text: str, name: str) -> CodeType:
    main.__loader__ = BuiltinImporter
    if sys.version_info >= (3, 13):
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return compile(text, name, "exec", dont_inherit=True)


def _prepare_module(main: ModuleType, spec: ModuleSpec) -> CodeType:
    code: CodeType | None = (
        spec.loader.get_code(spec.name) if spec.loader and hasattr(spec.loader, "get_code") else None
    )
    if code is None:
        raise NotRunnableError(f"no code object available for {spec.name}")
    main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
    if spec.origin is not None:
        main.__file__ = spec.origin
    vars(main)["__cached__"] = spec.cached
    return code


def _module_spec(name: str) -> ModuleSpec:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = find_spec(name)
    except (ImportError, ValueError) as error:
        raise NotRunnableError(f"-m {name}: {error}") from error
    if spec is None:
        raise NotRunnableError(f"-m {name}: no module of that name")
    return spec


def hide_own_frames(error: BaseException) -> None:
    """Take copytrace's own frames out of the tracebacks of ``error`` and of the errors it came from."""
    waiting: list[BaseException | None] = [error]
    done: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in done:
            continue
        done.add(id(current))
        current.__traceback__ = _without_own_frames(current.__traceback__)
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "copytrace" and (kept or package != "importlib"):
            kept.append(trace)
        trace = trace.tb_next
    for one, following in zip(kept, [*kept[1:], None], strict=False):
        one.tb_next = following
    return kept[0] if kept else None
