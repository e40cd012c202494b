"""Real programs of many operations, and the trace of one read as a whole and in stretches."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, MemoryStore, WrapperStore

import copytrace
from copytrace import stacks, stretches
from copytrace.trace import joined
from oracle.stores import is_chunk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from copytrace.model import Trace

CHUNK = 20_000
DATA = np.random.default_rng(0).integers(1, 255, 10 * CHUNK, dtype="u1")


def _array(store: Any, **options: Any) -> Any:
    options = {"compressors": None, "config": {"write_empty_chunks": True}, **options}
    return zarr.create_array(store, shape=DATA.shape, chunks=(CHUNK,), dtype="u1", **options)


def _write_and_read(array: Any, rounds: int = 5) -> None:
    array[...] = DATA
    for number in range(rounds):
        assert np.array_equal(array[...], DATA)
        array[number * CHUNK : (number + 2) * CHUNK] = DATA[number * CHUNK : (number + 2) * CHUNK]
        array[5000:45_000]


def memory(_: Path) -> None:
    _write_and_read(_array(MemoryStore()))


def local(where: Path) -> None:
    _write_and_read(_array(LocalStore(where)))


def compressed(where: Path) -> None:
    _write_and_read(_array(LocalStore(where), compressors=ZstdCodec(level=1)))


def sharded(where: Path) -> None:
    _write_and_read(_array(LocalStore(where), shards=(5 * CHUNK,)))


def obstore(where: Path) -> None:
    from zarr.storage import ObjectStore

    store = pytest.importorskip("obstore.store")
    _write_and_read(_array(ObjectStore(store.LocalStore(where, mkdir=True))))
    _write_and_read(_array(ObjectStore(store.MemoryStore()), compressors=ZstdCodec(level=1)), 2)


def threads(_: Path) -> None:
    arrays = [_array(MemoryStore()) for _ in range(3)]
    for array in arrays:
        array[...] = DATA
    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            list(pool.map(lambda array: array[...], arrays))
            list(pool.map(lambda array: array[1000:30_000], arrays))


def tasks(_: Path) -> None:
    async def main() -> None:
        array = await zarr.api.asynchronous.create(
            store=MemoryStore(), shape=DATA.shape, chunks=(CHUNK,), dtype="u1", compressor=None, zarr_format=2
        )
        await array.setitem(..., DATA)
        for _ in range(4):
            await asyncio.gather(*(array.getitem(slice(number * 1000, 100_000)) for number in range(3)))

    asyncio.run(main())


class Keeps(WrapperStore[Any]):
    """A store with a cache: a copy of each chunk that was read."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.kept: dict[str, Any] = {}

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        if key not in self.kept:
            found = await self._store.get(key, prototype, byte_range)
            if not is_chunk(key) or found is None:
                return found
            self.kept[key] = prototype.buffer.from_array_like(found.as_numpy_array().copy())
        return self.kept[key]


def cache(where: Path) -> None:
    array = _array(Keeps(LocalStore(where)))
    array[...] = DATA
    for number in range(10):
        array[number * CHUNK : (number + 1) * CHUNK]
    for _ in range(10):
        array[...]


def by_hand(_: Path) -> None:
    target, held = np.zeros_like(DATA), []
    for number in range(8):
        with copytrace.operation("ingest", payload_bytes=DATA.nbytes):
            DATA.tobytes()
            target[:] = DATA
            if number % 2:
                held.append(bytes(memoryview(DATA)))
    array = _array(MemoryStore())
    for _ in range(3):
        array[...] = target
        with copytrace.operation("again", payload_bytes=DATA.nbytes):
            array[...].copy()


PROGRAMS: dict[str, Callable[[Path], None]] = {
    program.__name__: program
    for program in (memory, local, compressed, sharded, obstore, threads, tasks, cache, by_hand)
}


class Read(NamedTuple):
    """One recording, read twice. ``spool`` is where it is."""

    whole: Trace
    parts: Trace
    spool: Path


def recorded(
    program: Callable[[Path], None], where: Path, least: int, patch: pytest.MonkeyPatch, **options: Any
) -> Read:
    """What a program does, as a whole and in stretches of at least so many spans."""
    resolve_all(patch)
    spool = where / "spool"
    with copytrace.session("around", spool=spool, **options):
        session = copytrace.session("program", **options)
        with session:
            program(where / "array")
        read = session._read
    assert read is not None
    whole, *none = read()
    assert not none
    patch.setattr(stretches, "LEAST", least)
    parts = read()
    return Read(whole, joined(next(parts), parts), spool)


def resolve_all(patch: pytest.MonkeyPatch) -> None:
    """Have the stacks of however little memory resolved: what is little in a stretch may be much in the whole."""
    for name, value in {"_MUCH": 0, "_MUCH_FOR_AN_IMPORT": 0, "_MOST": 1 << 30, "_MOST_NATIVE": 1 << 30}.items():
        patch.setattr(stacks, name, value)
