"""Word of imports, for as long as somebody waits for them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ImportWatch:
    """Calls ``loaded(name)`` after a module of ``names`` was imported, when the import of its top-level package is
    over.

    A package imports functions by name from its own modules; were they replaced before it is done, copies of the
    replacement would stay in it. The machinery of imports is as it was after :meth:`stop`.
    """

    def __init__(self, names: set[str], loaded: Callable[[str], None]) -> None:
        self.names = names
        self._loaded = loaded
        self._searching: set[str] = set()

    def start(self) -> None:
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with a loader that tells us when it is done."""
        if name not in self.names or name in self._searching:
            return None
        self._searching.add(name)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                if finder is not self and find is not None:
                    spec: ModuleSpec | None = find(name, path, target)
                    if spec is not None:
                        self._follow(spec, name)
                        return spec
            return None
        finally:
            self._searching.discard(name)

    def _follow(self, spec: ModuleSpec, name: str) -> None:
        loader: Any = spec.loader
        if isinstance(loader, type) or not hasattr(loader, "__dict__") or not hasattr(loader, "exec_module"):
            return

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            top = sys.modules.get(name.partition(".")[0])
            if self in sys.meta_path and (top is module or not is_initializing(top)):
                self._loaded(name)

        loader.exec_module = exec_module


def is_initializing(module: ModuleType | None) -> bool:
    """Whether the module's import has begun and is not over: names may be missing that it is about to define."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
