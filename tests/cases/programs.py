"""The programs. ``prepare(directory)`` returns the function that is measured; it may be called once a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import obstore
import zarr
from zarr.codecs import BloscCodec, BytesCodec, ZstdCodec
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, WrapperStore, ZipStore

N = 2_000_003
noise = np.random.default_rng(0).integers(1, 255, N, dtype="u1")
ramp = (np.arange(N // 4) // 100).astype("f4")
square = np.random.default_rng(1).random((500, 1000), dtype="f4")

RAW = {"compressors": None, "config": {"write_empty_chunks": True}}
Prepare = Callable[[Path], Callable[[], Any]]


def create(store: Any, like: Any, **options: Any) -> Any:
    options = {"chunks": like.shape, **RAW, **options}
    return zarr.create_array(store, shape=like.shape, dtype=like.dtype, **options)


def write(array: Any, data: Any) -> None:
    array[...] = data


def read(array: Any, selection: Any = Ellipsis) -> None:
    assert array[selection].size


def local_write(directory: Path) -> Callable[[], Any]:
    return partial(write, create(LocalStore(directory), noise), noise)


def local_read(directory: Path) -> Callable[[], Any]:
    write(array := create(LocalStore(directory), noise), noise)
    return partial(read, array)


def local_write_zstd(directory: Path) -> Callable[[], Any]:
    return partial(write, create(LocalStore(directory), ramp, compressors=ZstdCodec(level=1)), ramp)


def local_read_zstd(directory: Path) -> Callable[[], Any]:
    write(array := create(LocalStore(directory), ramp, compressors=ZstdCodec(level=1)), ramp)
    return partial(read, array)


def blosc_write(directory: Path) -> Callable[[], Any]:
    return partial(write, create(LocalStore(directory), ramp, compressors=BloscCodec(cname="lz4", clevel=1)), ramp)


def fsspec_write(directory: Path) -> Callable[[], Any]:
    store = FsspecStore.from_url(f"file://{directory}/a", storage_options={"auto_mkdir": True})
    return partial(write, create(store, noise), noise)


def zip_write(directory: Path) -> Callable[[], Any]:
    return partial(write, create(ZipStore(directory / "a.zip", mode="w"), noise), noise)


def obstore_write_multipart(directory: Path) -> Callable[[], Any]:
    data = np.resize(noise, 12_000_007)
    return partial(write, create(ObjectStore(obstore.store.LocalStore(directory / "a", mkdir=True)), data), data)


def obstore_read(directory: Path) -> Callable[[], Any]:
    write(array := create(ObjectStore(obstore.store.LocalStore(directory / "a", mkdir=True)), noise), noise)
    return partial(read, array)


def memory_write(directory: Path) -> Callable[[], Any]:
    del directory
    return partial(write, create(MemoryStore(), noise), noise)


def sharded_write(directory: Path) -> Callable[[], Any]:
    array = create(LocalStore(directory), square, chunks=(100, 1000), shards=square.shape)
    return partial(write, array, square)


def sharded_read(directory: Path) -> Callable[[], Any]:
    write(array := create(LocalStore(directory), square, chunks=(100, 1000), shards=square.shape), square)
    return partial(read, array)


def partial_read(directory: Path) -> Callable[[], Any]:
    write(array := create(LocalStore(directory), noise), noise)
    return partial(read, array, slice(1000, 21_001))


def fortran_write(directory: Path) -> Callable[[], Any]:
    data = np.asfortranarray(square)
    return partial(write, create(LocalStore(directory), data), data)


def big_endian_write(directory: Path) -> Callable[[], Any]:
    return partial(write, create(LocalStore(directory), square, serializer=BytesCodec(endian="big")), square)


def many_chunks_read(directory: Path) -> Callable[[], Any]:
    write(array := create(LocalStore(directory), noise, chunks=(65_537,)), noise)
    return partial(read, array)


def async_write(directory: Path) -> Callable[[], Any]:
    array = create(LocalStore(directory), noise)

    def run() -> None:
        asyncio.run(array.async_array.setitem(Ellipsis, noise))

    return run


class Fails(WrapperStore[Any]):
    """Copies and fails the first time."""

    failed = False

    async def set(self, key: str, value: Any) -> None:
        if key.startswith("c/") and not self.failed:
            self.failed = True
            raise OSError(f"full after {len(value.to_bytes())} bytes")
        await self._store.set(key, value)


def store_raises(directory: Path) -> Callable[[], Any]:
    array = create(Fails(LocalStore(directory)), noise)

    def run() -> None:
        try:
            array[...] = noise
        except OSError:
            array[...] = noise

    return run


def numcodecs_encode(directory: Path) -> Callable[[], Any]:
    del directory
    codec = numcodecs.Zstd(level=1)
    return lambda: codec.encode(ramp)


PROGRAMS: dict[str, Prepare] = {
    prepare.__name__: prepare
    for prepare in (
        local_write,
        local_read,
        local_write_zstd,
        local_read_zstd,
        blosc_write,
        fsspec_write,
        zip_write,
        obstore_write_multipart,
        obstore_read,
        memory_write,
        sharded_write,
        sharded_read,
        partial_read,
        fortran_write,
        big_endian_write,
        many_chunks_read,
        async_write,
        store_raises,
        numcodecs_encode,
    )
}
