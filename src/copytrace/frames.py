"""A line of a memray stack -> a :class:`copytrace.model.Frame` that names module, class and function and holds no
absolute path.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
from functools import cache, lru_cache
from pathlib import Path

from copytrace.layers import cython_name, layer_of_module, layer_of_native
from copytrace.model import Frame
from copytrace.native import crate_of, readable

OWN_FILE = "copytrace"
"""``co_filename`` of the frames that probes put on the stack."""

_PACKAGE = os.path.dirname(__file__) + os.sep
_INTERPRETER_SOURCE = re.compile(r"^(\./)?(Objects|Python|Modules|Include|Parser)/")


@cache
def _roots() -> tuple[tuple[str, bool], ...]:
    """Directories that file names are made relative to, and whether they hold installed packages."""
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    installed |= {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    roots = [(root.rstrip(os.sep) + os.sep, True) for root in installed if root]
    roots += [(root.rstrip(os.sep) + os.sep, False) for root in standard if root]
    return tuple(sorted(roots, key=lambda root: -len(root[0])))


@lru_cache(maxsize=1)
def _modules(count: int) -> dict[str, str]:
    """File -> module name, for the modules imported when there were ``count`` of them."""
    del count
    named = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            named.setdefault(file, name)
    return named


@cache
def relative(file: str) -> tuple[str, str]:
    """A file's name without this machine, and what it is: ``installed``, ``standard``, ``own`` or ``user``."""
    if file == OWN_FILE or file.startswith(_PACKAGE):
        return file.removeprefix(os.path.dirname(_PACKAGE.rstrip(os.sep)) + os.sep), "own"
    if file.startswith("<frozen"):
        return file, "standard"
    if file.startswith("<"):
        return file, "user"
    for root, installed in _roots():
        if file.startswith(root):
            rest = file[len(root) :]
            return rest, "installed" if installed or "site-packages" in rest else "standard"
    here = os.getcwd().rstrip(os.sep) + os.sep
    module = _modules(len(sys.modules)).get(file, "")
    if file.startswith(here):
        return file[len(here) :], "user"
    if module and module != "__main__":
        depth = module.count(".") + (1 if os.path.basename(file) == "__init__.py" else 0)
        return os.path.join(*Path(file).parts[-depth - 1 :]), "user"
    return os.path.basename(file), "user"


def module_of(file: str) -> str:
    """The dotted module of a source file: as it was imported, or read off its place in site-packages."""
    module = _modules(len(sys.modules)).get(file)
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
    module = module_of(file)
    if kind == "own":
        return Frame(function, name, line)
    qualified = _qualified(function, file, line)
    layer = (
        ""
        if kind == "standard"
        else layer_of_module(module, kind == "installed")
        if kind == "installed" or module != "__main__"
        else "user"
    )
    return Frame(f"{module}.{qualified}", name, line, layer=layer)


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
