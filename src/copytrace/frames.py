"""A line of a memray stack -> a :class:`copytrace.model.Frame` that names module, class and function and holds no
absolute path.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from bisect import bisect_right
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

from copytrace.layers import cython_name, layer_of_module, layer_of_native
from copytrace.model import Frame
from copytrace.native import Symbols, crate_of, readable, symbols_of
from copytrace.places import imported_as, loaded_libraries, relative

_LARGEST_SEARCHED = 16 << 20
"""Bytes of a shared object; larger ones are not of plain C."""

_PYTHONS_OWN = re.compile(r"_?Py[A-Z_]|<unknown>|_?_?libc_|(c|m|re)alloc$")
_INTERPRETER_SOURCE = re.compile(r"^(\./)?(Objects|Python|Modules|Include|Parser)/")


def module_of(file: str) -> str:
    """The dotted module of a source file: as it was imported, or read off its place in site-packages."""
    module = imported_as(file)
    if module:
        return module
    name, kind = relative(file)
    if kind == "user" or not name.endswith(".py"):
        return Path(name).stem
    return name.removesuffix(".py").removesuffix("/__init__").replace(os.sep, ".")


_HEADING = re.compile(r"(?:async\s+def|def|class)\s+(\w+)")
_HEADS = ("async", "def", "class")
_CONTINUES = ("#", ")", "]", "}", '"', "'")


@cache
def _outline(file: str) -> tuple[tuple[int, int, str], ...]:
    """(line, indentation, name) of the lines of a source file that may begin or end a block; name is of ``def`` and
    ``class``, else empty.
    """
    found = []
    for number, line in enumerate(linecache.getlines(file), 1):
        text = line.lstrip()
        if text and not text.startswith(_CONTINUES):
            heading = _HEADING.match(text) if text.startswith(_HEADS) else None
            found.append((number, len(line) - len(text), heading[1] if heading else ""))
    return tuple(found)


@cache
def _qualified(function: str, file: str, line: int) -> str:
    """``function`` with the classes and functions it is nested in, read off the indentation above ``line``."""
    outline = _outline(file)
    names: list[str] = []
    limit = None
    for _, depth, name in outline[: bisect_right(outline, (line, sys.maxsize))][::-1]:
        if not names:
            if name == function or (name and not function.isidentifier()):
                names += [name] if name == function else [function, name]
                limit = depth
        elif limit is not None and depth < limit:
            limit = depth
            if name:
                names.append(name)
        if limit == 0:
            break
    return ".".join(reversed(names)) or function


@cache
def python_frame(function: str, file: str, line: int) -> Frame:
    """The frame of Python function ``function`` (its bare name) at ``line`` of ``file``."""
    name, kind = relative(file)
    if kind == "own":
        return Frame(function, name, line)
    module = module_of(file)
    layer = "" if kind == "standard" else layer_of_module(module, kind)
    return Frame(f"{module}.{_qualified(function, file, line)}", name, line, layer=layer)


@lru_cache(maxsize=1)
def _extensions(modules: int) -> tuple[tuple[str, Symbols], ...]:
    """Base name and functions of the extension modules imported from packages, those of numpy and memray left out."""
    del modules
    found = []
    for name, path in loaded_libraries().items():
        place, kind = relative(path)
        package = place.split(os.sep, 1)[0]
        if kind in ("installed", "user") and package not in ("numpy", "numpy.libs", "memray", "copytrace"):
            with suppress(OSError):
                status = os.stat(path)
                if status.st_size <= _LARGEST_SEARCHED:
                    found.append((name, symbols_of(path, status.st_size, status.st_mtime_ns)))
    return tuple(found)


@cache
def _library_of(symbol: str) -> str:
    """The base name of the extension module that defines a C function, empty when none or several do: memray does not
    say where it found a name.
    """
    if _PYTHONS_OWN.match(symbol):
        return ""
    found = [name for name, symbols in _extensions(len(sys.modules)) if symbols.defines(symbol)]
    return found[0] if len(found) == 1 else ""


@cache
def native_frame(symbol: str, file: str, line: int, library: str = "") -> Frame:
    """The frame of a native function; ``file`` is its source when debug information tells it, ``library`` its shared
    object.
    """
    function = cython_name(symbol) if symbol.startswith("__pyx_") else readable(symbol)
    if _INTERPRETER_SOURCE.match(file):
        return Frame(function, "libpython", line, native=True)
    base = os.path.basename(library or file).replace("<unknown>", "")
    if not base and not crate_of(function) and not symbol.startswith("__pyx_"):
        base = _library_of(symbol)
    return Frame(function, base, line, native=True, layer=layer_of_native(symbol, crate_of(function), base))
