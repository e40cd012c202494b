"""What a library has where it once had something else."""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_CUTOFF = 0.7
"""How alike two names are at least, as difflib measures it, to be taken for one that was renamed."""


def successor(target: str) -> str:
    """What may have taken the place of ``target`` (``"package.module:Class.method"``), in the same form, among what is
    imported; empty when that cannot be told.

    The same name in another module of the package comes first, then a similar one in the same module, then a similar
    one in the same class wherever that is now.
    """
    module, _, path = target.partition(":")
    package = module.partition(".")[0]
    modules = {
        name: found for name, found in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")
    }
    elsewhere = sorted(name for name, found in modules.items() if _has(found, path) and _is_home(found, path))
    if elsewhere:
        return f"{difflib.get_close_matches(module, elsewhere, 1, 0.0)[0]}:{path}"
    if module in modules and (alike := _alike(path, _names(modules[module]))):
        return f"{module}:{alike}"
    owner, _, method = path.rpartition(".")
    if owner:
        for name in sorted(name for name, found in modules.items() if _has(found, owner) and _is_home(found, owner)):
            members = [f"{owner}.{member}" for member in vars(_find(modules[name], owner))]
            if alike := _alike(f"{owner}.{method}", members):
                return f"{name}:{alike}"
    return ""


def _alike(path: str, names: list[str]) -> str:
    """The same method of a class with a similar name, or else a similar one of the same class."""
    owner, _, method = path.rpartition(".")
    kinds = [name for name in names if name.rpartition(".")[2] == method]
    methods = [name for name in names if name.rpartition(".")[0] == owner]
    found = [*difflib.get_close_matches(path, kinds, 1, _CUTOFF), *difflib.get_close_matches(path, methods, 1, _CUTOFF)]
    return found[0] if found else ""


def _names(module: ModuleType) -> list[str]:
    """Functions, classes and methods of a module."""
    return list(_walk(module))


def _walk(module: ModuleType) -> Iterator[str]:
    for name, value in list(vars(module).items()):
        if callable(value):
            yield name
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from (f"{name}.{member}" for member, of in list(vars(value).items()) if callable(of) or _binds(of))


def _binds(value: object) -> bool:
    return isinstance(value, classmethod | staticmethod)


def _find(module: ModuleType, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _has(module: ModuleType | None, path: str) -> bool:
    return module is not None and _find(module, path) is not None


def _is_home(module: ModuleType, path: str) -> bool:
    """Whether the object is defined there, not imported from elsewhere."""
    outermost = vars(module).get(path.partition(".")[0])
    return getattr(outermost, "__module__", module.__name__) == module.__name__
