"""Programs that make each of the known copies, and the versions at which they do and no longer do."""

from __future__ import annotations

from dataclasses import dataclass

SIDE = 1448
SIZE = SIDE * SIDE * 4

_DATA = f"a = np.random.default_rng(3).random(({SIDE}, {SIDE}), dtype='f4')\n"
_ZARR = _DATA + "import zarr\n"
_WRITE = "z = zarr.create_array(store, shape=a.shape, chunks=a.shape, dtype='f4', compressors=None)\nz[...] = a\n"
_READ = _WRITE + "out = z[...]\n"
_LOCAL = _ZARR + "store = zarr.storage.LocalStore(tmp + '/a.zarr')\n"
_OBSTORE = (
    _ZARR + "import obstore.store\n"
    "store = zarr.storage.ObjectStore(obstore.store.LocalStore(prefix=tmp + '/o', mkdir=True))\n"
)
_ICECHUNK = (
    _ZARR + "import icechunk\n"
    "repository = icechunk.Repository.create(icechunk.local_filesystem_storage(tmp + '/repo'))\n"
    "store = repository.writable_session('main').store\n"
)
_FSSPEC = (
    _ZARR + "from zarr.storage import FsspecStore\n"
    "store = FsspecStore.from_url('file://' + tmp + '/a.zarr', storage_options=dict(auto_mkdir=True))\n"
)
_S3 = """
import warnings; warnings.simplefilter("ignore")
import s3fs
from zarr.storage import FsspecStore
login = dict(key={key!r}, secret={secret!r}, endpoint_url={url!r}, client_kwargs=dict(region_name={region!r}))
store = FsspecStore.from_url("s3://bucket/{name}.zarr", storage_options=dict(**login, asynchronous=True))
"""
_ZARRISTA = """
from zarrista import Array, ArrayBuilder, AsyncArray, ChunkGrid, DataType, FillValue
from zarrista.store import FilesystemStore
grid = ChunkGrid.regular(a.shape, chunk_shape=a.shape)
builder = ArrayBuilder(grid, DataType.from_string("float32"), FillValue(bytes(4)))
"""
_ZARR3 = "numcodecs[crc32c]>=0.15"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """``inside`` runs in a session after ``before`` and makes the copy of the remedy ``name`` with ``affected``.

    ``mended`` are the requirements with which it does not, empty where there is no such release. ``s3`` says that
    ``before`` is filled in with the address of a server.
    """

    name: str
    before: str
    inside: str
    affected: tuple[str, ...]
    mended: tuple[str, ...] = ()
    s3: bool = False


def _codec(name: str, call: str) -> Known:
    return Known(
        name="numcodecs-slice",
        before=_DATA + f"import numcodecs; codec = numcodecs.{name}\n",
        inside=f"{call} = codec.encode(a)\n",
        affected=("numcodecs==0.15.1",),
        mended=("numcodecs==0.16.0",),
    )


KNOWN = (
    Known(
        name="obstore-multipart",
        before=_OBSTORE,
        inside=_WRITE,
        affected=("zarr==3.3.0", "obstore==0.11.0"),
        mended=("zarr==3.3.0", "obstore==0.11.1"),
    ),
    Known(
        name="zarr-local-write",
        before=_LOCAL,
        inside=_WRITE,
        affected=("zarr==3.0.6", _ZARR3),
        mended=("zarr==3.0.7", _ZARR3),
    ),
    Known(
        name="zarr-obstore-write",
        before=_OBSTORE,
        inside=_WRITE,
        affected=("zarr==3.0.7", "obstore==0.11.1"),
        mended=("zarr==3.0.8", "obstore==0.11.1"),
    ),
    Known(name="zarr-fsspec-write", before=_FSSPEC, inside=_WRITE, affected=("zarr==3.4.2", "fsspec==2026.9.0")),
    Known(
        name="fsspec-maybe-convert",
        before=_DATA + "import fsspec; m = fsspec.get_mapper('file://' + tmp + '/m', auto_mkdir=True)\n",
        inside="m['x'] = a\n",
        affected=("fsspec==2026.9.0",),
    ),
    Known(name="zarr-scatter", before=_LOCAL, inside=_READ, affected=("zarr==3.4.2",)),
    Known(
        name="zarr-scatter-decoded",
        before=_LOCAL,
        inside=_READ.replace("None", "zarr.codecs.ZstdCodec(level=0)"),
        affected=("zarr==3.4.2",),
    ),
    Known(
        name="zarr-shard-append",
        before=_LOCAL,
        inside=_WRITE.replace("chunks=a.shape", f"shards=a.shape, chunks=({SIDE // 8}, {SIDE})"),
        affected=("zarr==3.1.3",),
        mended=("zarr==3.1.4",),
    ),
    _codec("Blosc(cname='lz4', clevel=5, shuffle=1)", "packed"),
    _codec("LZ4()", "packed"),
    _codec("Zstd(1)", "packed"),
    Known(
        name="icechunk-write",
        before=_ICECHUNK,
        inside=_WRITE,
        affected=("zarr==3.3.0", "icechunk==2.1.2"),
        mended=("zarr==3.3.0", "icechunk==2.2.0"),
    ),
    Known(name="icechunk-read", before=_ICECHUNK, inside=_READ, affected=("zarr==3.3.0", "icechunk==2.3.0")),
    Known(
        name="zarrista-write",
        before=_DATA + _ZARRISTA,
        inside="builder.create(FilesystemStore(tmp), '/a')[:, :] = a\n",
        affected=("zarrista==0.1.0",),
    ),
    Known(
        name="aiohttp-getbuffer",
        before=_ZARR + _S3,
        inside=_WRITE,
        affected=("zarr==3.3.0", "s3fs==2026.9.0", "aiohttp==3.14.5"),
        mended=("zarr==3.3.0", "s3fs==2025.5.1", "aiohttp==3.12.0"),
        s3=True,
    ),
    Known(
        name="aiohttp-stream-read",
        before=_ZARR + _S3,
        inside=_READ,
        affected=("zarr==3.3.0", "s3fs==2026.9.0", "aiohttp==3.14.5"),
        s3=True,
    ),
    Known(
        name="s3fs-concurrent-cat",
        before=_ZARR + _S3 + "a = np.concatenate([a] * 7)\n",
        inside=_READ,
        affected=("zarr==3.3.0", "s3fs==2026.9.0"),
        mended=("zarr==3.3.0", "s3fs==2026.2.0"),
        s3=True,
    ),
)
