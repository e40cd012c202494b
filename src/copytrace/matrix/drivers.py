"""How each stack writes and reads one array in one chunk.

Each driver is source text that the worker runs with these names: ``np``, ``shape`` and ``dtype``, ``compressed`` and
``writing`` (bool), ``path`` (a directory of its own), ``s3`` (``bucket``, ``prefix``, ``endpoint``, ``key``,
``secret``, ``region``, ``verify``; None on local disk) and, to write, ``data``. ``prepare`` and then ``before_write``
or ``before_read`` run before the session, ``write`` and ``read`` inside it; ``read`` leaves the array in ``out``.
"""

from __future__ import annotations

from typing import NamedTuple


class Driver(NamedTuple):
    """Source text of the stages."""

    prepare: str
    write: str
    read: str
    before_write: str = ""
    before_read: str = ""


_ZARR = """
import zarr
import zarr.codecs
import zarr.storage
compressors = zarr.codecs.ZstdCodec(level=0) if compressed else None
"""
_ZARR_WRITE = """
z = zarr.create_array(
    store, shape=shape, chunks=shape, dtype=dtype, compressors=compressors, config={"write_empty_chunks": True}
)
z[...] = data
"""
_ZARR_READ = """
out = zarr.open_array(store, mode="r")[...]
"""
_LOCAL = 'store = zarr.storage.LocalStore(path + "/a.zarr")\n'
_OBSTORE = """
import obstore.store
from zarr.storage import ObjectStore
store = ObjectStore(obstore.store.LocalStore(prefix=path, mkdir=True))
"""
_ZARRS = """
import zarrs
zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
"""
_ICECHUNK_WRITE = """
import icechunk
repository = icechunk.Repository.create(icechunk.local_filesystem_storage(path + "/repo"))
session = repository.writable_session("main")
store = session.store
"""
_ICECHUNK_READ = """
import icechunk
repository = icechunk.Repository.open(icechunk.local_filesystem_storage(path + "/repo"))
store = repository.readonly_session("main").store
"""
_S3FS = """
import s3fs
from zarr.storage import FsspecStore
options = {
    "key": s3["key"],
    "secret": s3["secret"],
    "endpoint_url": s3["endpoint"],
    "client_kwargs": {"region_name": s3["region"], "verify": s3["verify"]},
}
url = f"s3://{s3['bucket']}/{s3['prefix']}"
store = FsspecStore.from_url(url, storage_options={**options, "asynchronous": True})
"""
_S3_OBSTORE = """
import obstore.store
from zarr.storage import ObjectStore
store = ObjectStore(
    obstore.store.S3Store(
        s3["bucket"],
        prefix=s3["prefix"],
        endpoint=s3["endpoint"],
        region=s3["region"],
        access_key_id=s3["key"],
        secret_access_key=s3["secret"],
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "allow_invalid_certificates": not s3["verify"]},
    )
)
"""
_ZARR2 = """
import numcodecs
import zarr
compressor = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE) if compressed else None
"""
_ZARR2_WRITE = """
z = zarr.open_array(store, mode="w", shape=shape, chunks=shape, dtype=dtype, compressor=compressor)
z[...] = data
"""
_ZARR2_S3FS = """
import s3fs
from zarr.storage import FSStore
store = FSStore(
    f"s3://{s3['bucket']}/{s3['prefix']}",
    mode="w" if writing else "r",
    key=s3["key"],
    secret=s3["secret"],
    endpoint_url=s3["endpoint"],
    client_kwargs={"region_name": s3["region"], "verify": s3["verify"]},
)
"""
_ZARRISTA = """
import asyncio
from zarrista import Array, ArrayBuilder, AsyncArray, ChunkGrid, DataType, FillValue
whole = (slice(None),) * len(shape)
"""
_ZARRISTA_BUILD = """
builder = ArrayBuilder(
    ChunkGrid.regular(shape, chunk_shape=shape), DataType.from_string(dtype), FillValue(np.zeros(1, dtype).tobytes())
)
if compressed:
    from zarrista.codec import zstd
    builder = builder.compressors([zstd(level=0, checksum=False)])
"""
_ZARRISTA_LOCAL = "from zarrista.store import FilesystemStore\nstore = FilesystemStore(path)\n"
_ZARRISTA_OBSTORE = "import obstore.store\nstore = obstore.store.LocalStore(prefix=path, mkdir=True)\n"


def _awaited(write: str, read: str) -> tuple[str, str]:
    """Source text that writes, and that defines how to read, with an ``AsyncArray``."""
    return (
        f"""
async def write():
    array = await builder.create_async(store, "/a")
    await array.{write}
asyncio.run(write())
""",
        f"""
async def read(place):
    array = await AsyncArray.open(store, place)
    return await array.{read}
""",
    )


_SUBSET, _CHUNK = "store_array_subset(whole, data)", "retrieve_chunk([0] * len(shape))"
_CHUNKS, _READ_SUBSET = "store_chunks(whole, data)", "retrieve_array_subset(whole)"
_AWAIT_WRITE, _AWAIT_READ = _awaited(_SUBSET, _CHUNK)
_AWAIT_CHUNKS, _AWAIT_SUBSET = _awaited(_CHUNKS, _READ_SUBSET)

DRIVERS = {
    "zarr-local": Driver(_ZARR + _LOCAL, _ZARR_WRITE, _ZARR_READ),
    "zarr-obstore": Driver(_ZARR + _OBSTORE, _ZARR_WRITE, _ZARR_READ),
    "zarr-icechunk": Driver(
        _ZARR, _ZARR_WRITE + 'session.commit("array")\n', _ZARR_READ, _ICECHUNK_WRITE, _ICECHUNK_READ
    ),
    "zarrs-local": Driver(_ZARR + _ZARRS + _LOCAL, _ZARR_WRITE, _ZARR_READ),
    "zarrs-obstore": Driver(_ZARR + _ZARRS + _OBSTORE, _ZARR_WRITE, _ZARR_READ),
    "zarr-s3fs": Driver(_ZARR + _S3FS, _ZARR_WRITE, _ZARR_READ),
    "zarr-s3-obstore": Driver(_ZARR + _S3_OBSTORE, _ZARR_WRITE, _ZARR_READ),
    "zarr2-local": Driver(
        _ZARR2 + 'store = zarr.DirectoryStore(path + "/a.zarr")\n',
        _ZARR2_WRITE,
        'out = zarr.open_array(store, mode="r")[...]\n',
    ),
    "zarr2-s3fs": Driver(_ZARR2 + _ZARR2_S3FS, _ZARR2_WRITE, 'out = zarr.open_array(store, mode="r")[...]\n'),
    "zarrista-local": Driver(
        _ZARRISTA + _ZARRISTA_LOCAL,
        _ZARRISTA_BUILD + f'builder.create(store, "/a").{_SUBSET}\n',
        f'out = Array.open(store, "/a").{_CHUNK}\n',
    ),
    "zarrista-local-chunks": Driver(
        _ZARRISTA + _ZARRISTA_LOCAL,
        _ZARRISTA_BUILD + f'builder.create(store, "/a").{_CHUNKS}\n',
        f'out = Array.open(store, "/a").{_READ_SUBSET}\n',
    ),
    "zarrista-local-index": Driver(
        _ZARRISTA + _ZARRISTA_LOCAL,
        _ZARRISTA_BUILD + 'builder.create(store, "/a")[whole] = data\n',
        'out = Array.open(store, "/a")[whole]\n',
    ),
    "zarrista-obstore": Driver(
        _ZARRISTA + _ZARRISTA_OBSTORE, _ZARRISTA_BUILD + _AWAIT_WRITE, _AWAIT_READ + 'out = asyncio.run(read("/a"))\n'
    ),
    "zarrista-obstore-chunks": Driver(
        *(_ZARRISTA + _ZARRISTA_OBSTORE, _ZARRISTA_BUILD + _AWAIT_CHUNKS),
        _AWAIT_SUBSET + 'out = asyncio.run(read("/a"))\n',
    ),
    "zarrista-icechunk": Driver(
        _ZARRISTA,
        _ZARR_WRITE + 'session.commit("array")\n',
        _AWAIT_READ + 'out = asyncio.run(read("/"))\n',
        _ZARR + _ICECHUNK_WRITE,
        _ICECHUNK_READ + 'store = repository.readonly_session("main")\n',
    ),
}
"""Name -> driver; :data:`copytrace.matrix.configurations` says which row uses which."""
