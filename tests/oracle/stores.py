"""Stores of the user's own that copy at known lines, and arrays to write to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zarr
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore, WrapperStore

if TYPE_CHECKING:
    from zarr.abc.store import Store


def raw_array(store: Store, nbytes: int, chunk: int | None = None) -> Any:
    """An uncompressed array of bytes in ``store``, in one chunk unless ``chunk`` says otherwise."""
    return zarr.create_array(
        store,
        shape=(nbytes,),
        chunks=(chunk or nbytes,),
        dtype="u1",
        compressors=None,
        config={"write_empty_chunks": True},
    )


def is_chunk(key: str) -> bool:
    return key.startswith("c/")


class CopiesBoth(WrapperStore[Any]):
    """One copy each way, around another store."""

    async def set(self, key: str, value: Any) -> None:
        if is_chunk(key):
            value = cpu.Buffer.from_bytes(bytes(value.as_numpy_array()))  # set
        await self._store.set(key, value)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        found = await self._store.get(key, prototype, byte_range)
        if is_chunk(key) and found is not None:
            found = prototype.buffer.from_array_like(found.as_numpy_array().copy())  # get
        return found


class SlicesAndJoins(MemoryStore):
    """A slice assigned from a memoryview (CPython copies it first) and a copy on the way in; two halves joined on the
    way out.
    """

    async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
        if is_chunk(key):
            array = value.as_numpy_array()
            kept = bytearray(len(array))  # kept
            kept[:] = memoryview(array)  # assigned
            value = cpu.Buffer.from_bytes(bytes(kept))  # frozen
        await super().set(key, value, byte_range)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        found = await super().get(key, prototype, byte_range)
        if is_chunk(key) and found is not None:
            whole = found.to_bytes()  # whole
            left = whole[:100_001]  # left
            right = whole[100_001:]  # right
            found = prototype.buffer.from_bytes(b"".join([left, right]))  # joined
        return found


class Pieces(WrapperStore[Any]):
    """Takes a value apart into pieces and puts them together again, each way."""

    piece = 8192

    async def set(self, key: str, value: Any) -> None:
        if is_chunk(key):
            value = cpu.Buffer.from_bytes(self._again(value))
        await self._store.set(key, value)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        found = await self._store.get(key, prototype, byte_range)
        return prototype.buffer.from_bytes(self._again(found)) if is_chunk(key) and found is not None else found

    def _again(self, value: Any) -> bytes:
        view = memoryview(value.as_numpy_array())
        pieces = [bytes(view[at : at + self.piece]) for at in range(0, len(view), self.piece)]  # taken
        return b"".join(pieces)  # joined


class SmallPieces(Pieces):
    """Pieces below what the hook keeps; the memory still tells."""

    piece = 1024
