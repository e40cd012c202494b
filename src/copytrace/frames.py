"""A line of a memray stack -> a :class:`copytrace.model.Frame` that names module, class and function and holds no
absolute path.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

from copytrace.layers import cython_name, layer_of_module, layer_of_native
from copytrace.model import Frame
from copytrace.native import crate_of, readable
from copytrace.places import imported_as, relative

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


@cache
def _scopes(file: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, qualified name) of every function of a source file, outermost first."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                if not isinstance(child, ast.ClassDef):
                    found.append((first, child.end_lineno or first, name))
                visit(child, name + ".")
            else:
                visit(child, prefix)

    visit(tree, "")
    return tuple(found)


@cache
def _qualified(function: str, file: str, line: int) -> str:
    best = ""
    for first, last, name in _scopes(file):
        if first <= line <= last and name.rsplit(".", 1)[-1] == function:
            best = name
    return best or function


@cache
def python_frame(function: str, file: str, line: int) -> Frame:
    """The frame of Python function ``function`` (its bare name) at ``line`` of ``file``."""
    name, kind = relative(file)
    if kind == "own":
        return Frame(function, name, line)
    module = module_of(file)
    layer = "" if kind == "standard" else layer_of_module(module, kind)
    return Frame(f"{module}.{_qualified(function, file, line)}", name, line, layer=layer)


@cache
def native_frame(symbol: str, file: str, line: int, library: str = "") -> Frame:
    """The frame of a native function; ``file`` is its source when debug information tells it, ``library`` its shared
    object.
    """
    function = cython_name(symbol) if symbol.startswith("__pyx_") else readable(symbol)
    if _INTERPRETER_SOURCE.match(file):
        return Frame(function, "libpython", line, native=True)
    base = os.path.basename(library or file).replace("<unknown>", "")
    return Frame(function, base, line, native=True, layer=layer_of_native(symbol, crate_of(function), base))
