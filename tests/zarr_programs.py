"""Programs that go through every probed site of zarr and numcodecs, on zarr 3.0.6 to 3.4. Each returns what it read."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
import zarr.abc.store
import zarr.codecs
import zarr.storage
from zarr.core.buffer import cpu, default_buffer_prototype

VERSION = tuple(int(part) for part in zarr.__version__.split(".")[:2])
PROTOTYPE = default_buffer_prototype()
SHAPE, CHUNKS = (211, 13), (100, 13)
DATA = np.random.default_rng(7).integers(0, 1000, SHAPE).astype("<i4")


def array(store: Any, data: np.ndarray = DATA, chunks: tuple[int, ...] = CHUNKS, **options: Any) -> zarr.Array:
    options.setdefault("compressors", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zarr.create_array(store, shape=data.shape, chunks=chunks, dtype=data.dtype, **options)


def selections(store: Any) -> list[Any]:
    """Every form of reading and writing an array."""
    z = array(store)
    got: list[Any] = []
    z[...] = DATA
    got.append(z[...])
    z[3:150, 2] = DATA[3:150, 3]
    got += [z[3:150, 2], z[5, 5], z[:0]]
    z.set_basic_selection((slice(0, 9), slice(0, 4)), 7)
    got.append(z.get_basic_selection((slice(0, 90), slice(0, 4))))
    out = cpu.NDBuffer.create(shape=SHAPE, dtype=DATA.dtype)
    got += [z.get_basic_selection(..., out=out), out.as_numpy_array()]
    z.set_orthogonal_selection(([1, 150], slice(0, 5)), DATA[[2, 3], :5])
    got.append(z.get_orthogonal_selection(([1, 150], slice(0, 5))))
    z.oindex[[3, 120], :] = DATA[[4, 5]]
    got.append(z.oindex[[3, 120], :])
    mask = DATA > 900
    z.set_mask_selection(mask, DATA[mask] * 2)
    got.append(z.get_mask_selection(mask))
    z.set_coordinate_selection(([1, 110], [2, 3]), np.array([5, 6], "<i4"))
    got.append(z.get_coordinate_selection(([1, 110], [2, 3])))
    z.vindex[[4, 111], [4, 5]] = np.array([8, 9], "<i4")
    got += [z.vindex[[4, 111], [4, 5]], z[[4, 111], [4, 5]]]
    z.set_block_selection((1, 0), DATA[:100] + 1)
    got.append(z.get_block_selection((1, 0)))
    z.blocks[0] = DATA[:100] - 1
    got.append(z.blocks[0])
    got.append(np.asarray(z))
    z.append(DATA)
    got.append(z[200:220])
    return got


def asynchronous(store: Any) -> list[Any]:
    """The same of the asynchronous array."""

    async def main() -> list[Any]:
        made = await zarr.api.asynchronous.create(store=store, shape=SHAPE, chunks=CHUNKS, dtype=DATA.dtype)
        await made.setitem(..., DATA)
        got = [await made.getitem(slice(3, 120))]
        if VERSION >= (3, 1):
            mask = DATA > 900
            got += [
                await made.get_orthogonal_selection(([1, 150], slice(0, 5))),
                await made.get_mask_selection(mask),
                await made.get_coordinate_selection(([1, 110], [2, 3])),
                await made.oindex.getitem(([1, 150], slice(0, 5))),
                await made.vindex.getitem(([1, 110], [2, 3])),
            ]
        await made.append(DATA)
        got.append(await made.getitem(slice(200, 220)))
        return got

    return asyncio.run(main())


def functions(directory: Path) -> list[Any]:
    """Functions that fill an array or read a whole one, of both APIs."""
    got: list[Any] = []
    zarr.save(str(directory / "save"), DATA)
    got.append(zarr.load(str(directory / "save")))
    zarr.save_array(str(directory / "save_array"), DATA)
    got.append(zarr.array(DATA, chunks=CHUNKS)[:])
    if hasattr(zarr, "from_array"):
        got.append(zarr.from_array({}, data=DATA)[:])
        got.append(zarr.create_array({}, data=DATA)[:])

    async def main() -> None:
        import zarr.api.asynchronous as api

        await api.save(str(directory / "async_save"), DATA)
        await api.save_array(str(directory / "async_save_array"), DATA)
        got.append(await api.load(store=str(directory / "async_save")))
        await api.array(DATA, chunks=CHUNKS)
        if hasattr(api, "from_array"):
            await api.from_array({}, data=DATA)

    asyncio.run(main())
    return got


def codecs(store: Any) -> list[Any]:
    """One array for each codec that zarr ships, and those of numcodecs through it, in both formats."""
    got: list[Any] = []
    floats = DATA.astype("<f8")

    def through(name: str, data: np.ndarray, **options: Any) -> None:
        z = array(store, data, name=name, **options)
        z[...] = data
        got.append(z[...])
        got.append(z[3:150])

    shipped = zarr.codecs
    through("zstd", DATA, compressors=shipped.ZstdCodec())
    through("blosc", DATA, compressors=shipped.BloscCodec())
    through("gzip", DATA, compressors=shipped.GzipCodec())
    through("crc32c", DATA, compressors=shipped.Crc32cCodec())
    through("transpose", DATA, filters=shipped.TransposeCodec(order=(1, 0)))
    through("big", DATA, serializer=shipped.BytesCodec(endian="big"))
    through("sharded", DATA, chunks=(50, 13), shards=(100, 13), compressors=shipped.ZstdCodec())
    z = array(
        store,
        DATA,
        name="sharded_and_compressed",
        serializer=shipped.ShardingCodec(chunk_shape=(50, 13)),
        compressors=[shipped.GzipCodec()],
        config={"write_empty_chunks": True},
    )
    z[...] = DATA
    got.append(z[...])
    texts = np.array(["one", "two", "three" * 100], dtype=object)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        through("v2", DATA, zarr_format=2, compressors=numcodecs.Zstd())
        through("v2_big", DATA.astype(">i4"), zarr_format=2, order="F")
        options = {"compressors": None} if VERSION < (3, 1) else {}
        z = zarr.create_array(store, name="texts", shape=(3,), chunks=(2,), dtype=str, **options)
        z[:] = texts
        got.append(list(z[:]))
        z = zarr.create_array(
            store, name="raw", shape=(3,), chunks=(2,), dtype="variable_length_bytes" if VERSION >= (3, 1) else bytes
        )
        z[:] = np.array([b"a", b"bb", b"ccc"], dtype=object)
        got.append(list(z[:]))
        if VERSION >= (3, 1):
            wrapped = zarr.codecs.numcodecs
            through("numcodecs_bytes", DATA, compressors=[wrapped.BZ2()])
            through(
                "numcodecs_array",
                floats,
                filters=[wrapped.FixedScaleOffset(offset=0, scale=1, dtype="<f8", astype="<f8")],
            )
            try:
                import pcodec
            except ImportError:
                pass
            else:
                assert pcodec
                through("numcodecs_serializer", floats, serializer=wrapped.PCodec())
        if importlib.util.find_spec("cast_value_rs"):
            through("cast_value", floats, filters=[shipped.CastValue(data_type="int32")])
        if hasattr(shipped, "ScaleOffset"):
            through("scale_offset", floats, filters=[shipped.ScaleOffset(offset=1.0, scale=2.0)])
    return got


def stores(store: zarr.abc.store.Store) -> list[Any]:
    """Every method of a store that carries bytes."""
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest

    value = cpu.Buffer.from_bytes(b"0123456789" * 101)
    got: list[Any] = []

    def text(buffer: Any) -> Any:
        return None if buffer is None else buffer.to_bytes()

    async def main() -> None:
        await store._ensure_open()
        await store.set("a/b", value)
        await store.set("a/new", value)
        with contextlib.suppress(NotImplementedError):
            await store.set_if_not_exists("a/b", cpu.Buffer.from_bytes(b"other"))
        if hasattr(store, "set_partial_values"):
            with contextlib.suppress(NotImplementedError, AttributeError):
                await store.set_partial_values([("a/new", 3, b"abc")])
        got.append(text(await store.get("a/b", prototype=PROTOTYPE)))
        got.append(text(await store.get("missing", prototype=PROTOTYPE)))
        requests = (RangeByteRequest(3, 9), OffsetByteRequest(1000), SuffixByteRequest(7))
        got.extend([text(await store.get("a/b", prototype=PROTOTYPE, byte_range=request)) for request in requests])
        found = await store.get_partial_values(
            PROTOTYPE, [("a/b", RangeByteRequest(0, 5)), ("a/new", RangeByteRequest(2, 4))]
        )
        got.extend(text(item) for item in found)
        if hasattr(store, "get_ranges"):
            ranges = store.get_ranges("a/b", [RangeByteRequest(1, 3), RangeByteRequest(5, 8)], prototype=PROTOTYPE)
            got.extend([sorted((index, text(item)) for index, item in batch) async for batch in ranges])
        with_sync = getattr(zarr.abc.store, "_store_supports_sync_io", lambda store: hasattr(store, "get_sync"))
        if with_sync(store):
            store.set_sync("a/sync", value)
            got.append(text(store.get_sync("a/sync", prototype=PROTOTYPE)))
        if with_sync(store) and hasattr(store, "get_ranges_sync"):
            found = store.get_ranges_sync("a/b", [RangeByteRequest(1, 3), RangeByteRequest(5, 8)], prototype=PROTOTYPE)
            got.append(sorted((index, text(item)) for index, item in found))

    asyncio.run(main())
    return got


def buffers() -> list[Any]:
    """The copies that zarr's buffers make."""
    nd = cpu.NDBuffer.from_numpy_array(np.arange(60.0).reshape(5, 12))
    transposed = cpu.NDBuffer.from_numpy_array(np.arange(60.0).reshape(5, 12).T)
    nd[1:3, ...] = nd[0:2]
    nd[[0, 4]] = np.ones((2, 12))
    nd[4] = 0
    flat = cpu.Buffer.from_bytes(b"x" * 100)
    byte = flat.as_array_like().dtype
    writable = cpu.Buffer.from_array_like(np.zeros(10, byte))
    writable[2:5] = np.frombuffer(b"abc", byte)
    got = [
        nd[[0, 2]].as_numpy_array(),
        transposed.reshape((60,)).as_numpy_array(),
        nd.astype("<f4").as_numpy_array(),
        nd.copy().as_numpy_array(),
        nd.all_equal(0),
        flat.to_bytes(),
        (flat + flat).to_bytes(),
        writable.to_bytes(),
    ]
    if hasattr(flat, "combine"):
        got.append(flat.combine([flat, flat]).to_bytes())
    return got


def fused(store: Any) -> list[Any]:
    """The synchronous pipeline, where there is one: whole and partial chunks, shards too."""
    got: list[Any] = []
    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.FusedCodecPipeline"}):
        for name, options in {
            "plain": {},
            "sharded": {"chunks": (50, 13), "shards": (100, 13)},
            "around": {
                "serializer": zarr.codecs.ShardingCodec(chunk_shape=(50, 13)),
                "compressors": [zarr.codecs.GzipCodec()],
            },
        }.items():
            z = array(store, DATA, name=f"fused_{name}", **options)
            z[...] = DATA
            z[3:40] = DATA[4:41]
            got += [z[...], z[5:60, 3]]
    return got


def numcodecs_classes() -> list[type]:
    found: list[type] = []

    def add(kind: type) -> None:
        for derived in kind.__subclasses__():
            if derived not in found and derived.__module__.startswith("numcodecs"):
                found.append(derived)
            add(derived)

    add(numcodecs.abc.Codec)
    return found


def numcodecs_all() -> list[Any]:
    """``encode`` and ``decode`` of every codec class of numcodecs that defines them."""
    data = np.arange(0, 2000, dtype="<i4")
    arguments: dict[str, tuple[dict[str, Any], Any]] = {
        "AsType": ({"encode_dtype": "<i8", "decode_dtype": "<i4"}, data),
        "Delta": ({"dtype": "<i4"}, data),
        "Quantize": ({"digits": 1, "dtype": "<f8"}, data.astype("<f8")),
        "FixedScaleOffset": ({"offset": 0, "scale": 1, "dtype": "<f8", "astype": "<i4"}, data.astype("<f8")),
        "PackBits": ({}, data > 1000),
        "Categorize": ({"labels": ["a", "b"], "dtype": "U1"}, np.array(["a", "b"] * 300)),
        "BitRound": ({"keepbits": 5}, data.astype("<f4")),
        "JSON": ({}, np.array(["a", "b"] * 300, dtype=object)),
        "MsgPack": ({}, np.array(["a", "b"] * 300, dtype=object)),
        "Pickle": ({}, data),
        "VLenUTF8": ({}, np.array(["a", "bb"] * 300, dtype=object)),
        "VLenBytes": ({}, np.array([b"a", b"bb"] * 300, dtype=object)),
        "VLenArray": ({"dtype": "<i4"}, np.array([data[:3], data[:5], None], dtype=object)[:2]),
        "PCodec": ({}, data),
        "ZFPY": ({"mode": 4, "tolerance": 0.1}, data.astype("<f8")),
        "Checksum32": ({}, None),
    }
    got = []
    numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE = True
    for kind in numcodecs_classes():
        if inspect.isabstract(kind):
            continue
        options, value = arguments.get(kind.__name__, ({}, data))
        if value is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            codec = kind(**options)
        encoded = codec.encode(value)
        decoded = codec.decode(encoded)
        got.append((kind.__name__, bytes(decoded) if "memoryview" in type(decoded).__name__ else decoded))
    return got
