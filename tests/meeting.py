"""A store that meets something before it moves bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zarr.storage import MemoryStore, WrapperStore


class Meets(WrapperStore[Any]):
    """Calls ``met(key)`` before each get and set, and awaits what it returns when that can be awaited."""

    def __init__(self, met: Callable[[str], Any], store: Any = None) -> None:
        super().__init__(MemoryStore() if store is None else store)
        self.met = met

    async def _meet(self, key: str) -> None:
        found = self.met(key)
        if hasattr(found, "__await__"):
            await found

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        await self._meet(key)
        return await self._store.get(key, prototype, byte_range)

    async def set(self, key: str, value: Any) -> None:
        await self._meet(key)
        await self._store.set(key, value)
