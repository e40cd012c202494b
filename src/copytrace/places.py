"""Names of source files without this machine: relative to site-packages, the standard library or where we work."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache, lru_cache
from pathlib import Path

OWN_FILE = "copytrace"
"""``co_filename`` of the frames that probes put on the stack."""

PACKAGE = os.path.dirname(__file__) + os.sep
"""Where copytrace's own modules are."""


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
    named: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            named.setdefault(file, name)
    return named


def imported_as(file: str) -> str | None:
    """The module that was imported from ``file``."""
    return _modules(len(sys.modules)).get(file)


@lru_cache(maxsize=1)
def _loaded(modules: int) -> dict[str, str]:
    """Base name -> path of the shared objects that are loaded; without ``/proc``, of the imported extension modules."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
        paths = {line.split(None, 5)[5] for line in lines if ".so" in line}
    except (OSError, IndexError):
        paths = set(_modules(modules))
    return {os.path.basename(path): path for path in paths}


def loaded_libraries() -> dict[str, str]:
    """Base name -> path of the shared objects that are loaded."""
    return _loaded(len(sys.modules))


def loaded_from(library: str) -> str:
    """The path of a loaded shared object by its base name, empty when it is not loaded."""
    return loaded_libraries().get(library, "")


@cache
def relative(file: str) -> tuple[str, str]:
    """A file's name without this machine, and what it is: ``installed``, ``standard``, ``own`` or ``user``."""
    if file == OWN_FILE or file.startswith(PACKAGE):
        return file.removeprefix(os.path.dirname(PACKAGE.rstrip(os.sep)) + os.sep), "own"
    if file.startswith("<frozen"):
        return file, "standard"
    if file.startswith("<"):
        return file, "user"
    for root, installed in _roots():
        if file.startswith(root):
            rest = file[len(root) :]
            return rest, "installed" if installed or "site-packages" in rest else "standard"
    here = os.getcwd().rstrip(os.sep) + os.sep
    if file.startswith(here):
        return file[len(here) :], "user"
    module = imported_as(file) or ""
    if module and module != "__main__":
        depth = module.count(".") + (1 if os.path.basename(file) == "__init__.py" else 0)
        return os.path.join(*Path(file).parts[-depth - 1 :]), "user"
    return os.path.basename(file), "user"
