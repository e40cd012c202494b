"""zarr's and numcodecs' probes on real arrays: every site works, nothing changes, and what is noted is exact."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.abc.codec
import zarr.abc.store
import zarr.codecs
import zarr.storage
from zarr.core.buffer import BufferPrototype, cpu

import zarr_programs as programs
from copytrace.probes import Attachment
from copytrace.probes.numcodecs import PROBE as NUMCODECS
from copytrace.probes.zarr import PROBE as ZARR
from copytrace.recorder import recorder
from spooled import Recorded, Span, recording
from zarr_programs import CHUNKS, DATA, SHAPE, VERSION

NBYTES = DATA.nbytes


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray):
        same = first.dtype == second.dtype and first.shape == second.shape
        return same and (
            equal(list(first.flat), list(second.flat)) if first.dtype == object else first.tobytes() == second.tobytes()
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def fsspec_store(directory: Path) -> zarr.abc.store.Store:
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    return zarr.storage.FsspecStore(
        AsyncFileSystemWrapper(MemoryFileSystem(), asynchronous=True), path=f"/{directory.name}"
    )


def object_store(_directory: Path) -> zarr.abc.store.Store:
    obstore = pytest.importorskip("obstore")
    return zarr.storage.ObjectStore(obstore.store.MemoryStore())


def cache_store(_directory: Path) -> zarr.abc.store.Store:
    cache = pytest.importorskip("zarr.experimental.cache_store")
    return cache.CacheStore(zarr.storage.MemoryStore(), cache_store=zarr.storage.MemoryStore())


STORES: dict[str, Callable[[Path], zarr.abc.store.Store]] = {
    "LocalStore": lambda directory: zarr.storage.LocalStore(directory / "local"),
    "MemoryStore": lambda _directory: zarr.storage.MemoryStore(),
    "ZipStore": lambda directory: zarr.storage.ZipStore(directory / "a.zip", mode="w"),
    "FsspecStore(MemoryFileSystem)": fsspec_store,
    "LoggingStore(MemoryStore)": lambda _directory: zarr.storage.LoggingStore(
        zarr.storage.MemoryStore(), log_level="ERROR"
    ),
    "WrapperStore(LocalStore)": lambda directory: zarr.storage.WrapperStore(
        zarr.storage.LocalStore(directory / "wrapped")
    ),
}
if hasattr(zarr.storage, "ObjectStore"):
    STORES["ObjectStore(MemoryStore)"] = object_store
if VERSION >= (3, 2):
    STORES["CacheStore(MemoryStore)"] = cache_store
if hasattr(zarr.storage, "ManagedMemoryStore"):
    STORES["ManagedMemoryStore"] = lambda directory: zarr.storage.ManagedMemoryStore(directory.name)


@pytest.fixture(params=list(STORES))
def named_store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, zarr.abc.store.Store]:
    return request.param, STORES[request.param](tmp_path)


def everything(directory: Path) -> list[Any]:
    directory.mkdir()
    got: list[Any] = []
    got.append(programs.selections(zarr.storage.MemoryStore()))
    got.append(programs.asynchronous(zarr.storage.MemoryStore()))
    got.append(programs.functions(directory))
    got.append(programs.codecs(zarr.storage.MemoryStore()))
    got.append(programs.buffers())
    got.append(programs.numcodecs_all())
    if VERSION >= (3, 3):
        got.append(programs.fused(zarr.storage.MemoryStore()))
        got.append(programs.fused(zarr.storage.FsspecStore(fsspec_store(directory).fs, path="/fused")))
    for name, make in STORES.items():
        place = directory / f"{name.partition('(')[0]}-store"
        place.mkdir()
        store = make(place)
        got.append(programs.stores(store))
        store.close()
    return got


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return everything(tmp_path_factory.mktemp("bare") / "x")


class TestEverySite:
    NOT_RUN_HERE = (
        "zarr.storage.GpuMemoryStore.",  # needs a GPU
        "zarr.codecs.cast_value.CastValue.",  # needs cast-value-rs
        "zarr.codecs.numcodecs._NumcodecsArrayBytesCodec.",  # needs pcodec or zfpy
        "zarr.testing.",
        "numcodecs.zarr3.",
    )

    def test_works_changes_nothing_and_is_restored(self, tmp_path: Path, bare: list[Any]) -> None:
        raw = _places()
        with recording(tmp_path / "spool") as recorded:
            got = everything(tmp_path / "x")
            assert recorded.attachment is not None
            statuses = {found.name: found for found in recorded.attachment.statuses()}
        assert equal(got, bare)
        expected = set()
        for name in ("zarr", "numcodecs"):
            assert statuses[name].status == "attached", statuses[name].reason
            expected |= {site["name"] for site in statuses[name].sites if site["status"] == "attached"}
        own = {name for name in expected if name.startswith(("zarr.", "numcodecs."))}  # other tests define classes too
        missed = sorted(name for name in own - set(recorded.names) if not name.startswith(self.NOT_RUN_HERE))
        assert missed == []
        assert _places() == raw
        for (owner, attribute), original in raw.items():
            assert vars(owner).get(attribute) is original, (owner, attribute)

    def test_every_kind_of_span_has_what_it_needs(self, tmp_path: Path) -> None:
        with recording(tmp_path / "spool") as recorded:
            everything(tmp_path / "x")
        for span in recorded.spans:
            assert span.exit > span.enter
            if (
                span.kind in ("encode", "decode", "copy", "join", "gather", "convert", "scatter")
                and span.library == "zarr"
                and not span.error
            ):
                assert span.inputs or span.name.endswith(("__setitem__", "_single", "_sync")), span
        by_id = {span.id: span for span in recorded.spans}
        # Whatever thread or task it ran on, a request for a chunk has an operation above it.
        for span in recorded.spans:
            if span.kind == "request" and str(span.attributes.get("key", "")).startswith("c/"):
                above = span
                while above.parent:
                    above = by_id[above.parent]
                assert above.kind == "operation", (span.name, above.name)


def _places() -> dict[tuple[Any, str], Any]:
    attachment = Attachment([ZARR, NUMCODECS])
    places = [(patch.owner, patch.attribute) for patch in attachment._patches.values()]
    attachment.detach()
    return {(owner, attribute): vars(owner).get(attribute) for owner, attribute in places}


def operations(recorded: Recorded) -> list[Span]:
    return [span for span in recorded.spans if span.kind == "operation"]


class TestOperations:
    @pytest.mark.parametrize(
        ("write", "call", "nbytes"),
        [
            (lambda z: z.__setitem__(..., DATA), "__setitem__", NBYTES),
            (lambda z: z.__setitem__((slice(3, 150), 2), DATA[3:150, 2]), "__setitem__", 147 * 4),
            (lambda z: z.__setitem__((slice(0, 10), slice(None)), 5), "__setitem__", 10 * 13 * 4),
            (lambda z: z.set_basic_selection((slice(0, 7),), DATA[:7]), "set_basic_selection", 7 * 13 * 4),
            (
                lambda z: z.set_orthogonal_selection(([1, 150], slice(0, 5)), DATA[[2, 3], :5]),
                "set_orthogonal_selection",
                2 * 5 * 4,
            ),
            (lambda z: z.oindex.__setitem__(([3, 120], slice(None)), DATA[[4, 5]]), "oindex.__setitem__", 2 * 13 * 4),
            (
                lambda z: z.set_mask_selection(DATA > 900, DATA[DATA > 900]),
                "set_mask_selection",
                int((DATA > 900).sum()) * 4,
            ),
            (
                lambda z: z.set_coordinate_selection(([1, 9], [2, 3]), np.array([5, 6], "<i4")),
                "set_coordinate_selection",
                8,
            ),
            (lambda z: z.vindex.__setitem__(([4, 9], [4, 5]), np.array([8, 9], "<i4")), "vindex.__setitem__", 8),
            (lambda z: z.set_block_selection((1, 0), DATA[:100]), "set_block_selection", 100 * 13 * 4),
            (lambda z: z.blocks.__setitem__(0, DATA[:100]), "blocks.__setitem__", 100 * 13 * 4),
            (lambda z: z.append(DATA[:5]), "append", 5 * 13 * 4),
        ],
    )
    def test_write(self, tmp_path: Path, write: Callable[[zarr.Array], None], call: str, nbytes: int) -> None:
        z = programs.array(zarr.storage.MemoryStore(), compressors=zarr.codecs.ZstdCodec())
        with recording(tmp_path) as recorded:
            write(z)
        outermost = operations(recorded)[0]
        assert outermost.name == f"zarr.Array.{call}"
        assert (outermost.direction, outermost.error, outermost.parent) == ("write", False, 0)
        assert {name: outermost.attributes[name] for name in ("api", "call", "store", "codecs")} == {
            "api": "zarr.Array",
            "call": f"zarr.Array.{call}",
            "store": "MemoryStore",
            "codecs": ["bytes", "zstd"],
        }
        funnel = recorded.one("zarr.AsyncArray._set_selection")
        assert funnel.payload == nbytes
        assert outermost.name in recorded.ancestors(funnel)
        assert funnel.attributes["store"] == "MemoryStore"

    @pytest.mark.parametrize(
        ("read", "call", "nbytes"),
        [
            (lambda z: z[...], "__getitem__", NBYTES),
            (lambda z: z[3:150, 2], "__getitem__", 147 * 4),
            (lambda z: z[5, 5], "__getitem__", 4),
            (lambda z: z.get_basic_selection((slice(0, 7),)), "get_basic_selection", 7 * 13 * 4),
            (lambda z: z.get_orthogonal_selection(([1, 150], slice(0, 5))), "get_orthogonal_selection", 40),
            (lambda z: z.oindex[[3, 120], :], "oindex.__getitem__", 2 * 13 * 4),
            (lambda z: z.get_mask_selection(DATA > 900), "get_mask_selection", int((DATA > 900).sum()) * 4),
            (lambda z: z.get_coordinate_selection(([1, 9], [2, 3])), "get_coordinate_selection", 8),
            (lambda z: z.vindex[[4, 9], [4, 5]], "vindex.__getitem__", 8),
            (lambda z: z.get_block_selection((1, 0)), "get_block_selection", 100 * 13 * 4),
            (lambda z: z.blocks[0], "blocks.__getitem__", 100 * 13 * 4),
            (np.asarray, "__array__", NBYTES),
        ],
    )
    def test_read(self, tmp_path: Path, read: Callable[[zarr.Array], Any], call: str, nbytes: int) -> None:
        z = programs.array(zarr.storage.MemoryStore())
        z[...] = DATA
        with recording(tmp_path) as recorded:
            got = read(z)
        outermost = operations(recorded)[0]
        assert outermost.name == f"zarr.Array.{call}"
        assert (outermost.direction, outermost.attributes["codecs"]) == ("read", ["bytes"])
        assert recorded.one("zarr.AsyncArray._get_selection").payload == nbytes
        if isinstance(got, np.ndarray) and got.ndim:
            assert outermost.outputs == [nbytes]
            assert outermost.seen[0].address == got.ctypes.data

    def test_called_from_names_this_line(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.MemoryStore())
        with recording(tmp_path) as recorded:
            z[...] = DATA
        outermost, *inner = operations(recorded)
        function, file, line = outermost.attributes["called_from"][0]
        assert function.endswith("TestOperations.test_called_from_names_this_line")
        assert Path(file).name == Path(__file__).name
        assert not Path(file).is_absolute()
        assert "z[...] = DATA" in Path(__file__).read_text().splitlines()[line - 1]
        assert all("called_from" not in span.attributes for span in inner)

    def test_value_is_the_callers_memory(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.MemoryStore())
        with recording(tmp_path) as recorded:
            z[...] = DATA
        outermost = operations(recorded)[0]
        assert [(seen.address, seen.nbytes, seen.contiguous) for seen in outermost.seen] == [
            (DATA.ctypes.data, NBYTES, True)
        ]

    def test_out_is_a_destination(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.MemoryStore())
        z[...] = DATA
        out = cpu.NDBuffer.create(shape=SHAPE, dtype=DATA.dtype)
        with recording(tmp_path) as recorded:
            z.get_basic_selection(..., out=out)
        for name in ("zarr.Array.get_basic_selection", "zarr.AsyncArray._get_selection"):
            (seen,) = [seen for seen in recorded.one(name).seen if seen.role == 2]
            assert (seen.address, seen.nbytes) == (out.as_numpy_array().ctypes.data, NBYTES)

    def test_structured_fields(self, tmp_path: Path) -> None:
        dtype = np.dtype([("a", "<i4"), ("b", "<f8")])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_args, **_options: None)
            z = zarr.create_array({}, shape=(10,), chunks=(5,), dtype=dtype, zarr_format=2, compressors=None)
        with recording(tmp_path) as recorded:
            z[:] = np.ones(10, dtype)
            with contextlib.suppress(TypeError):  # some versions of zarr cannot read a field
                z.get_basic_selection(slice(0, 4), fields="b")
        assert [span.payload for span in recorded.named("zarr.AsyncArray._set_selection")] == [120]
        assert [span.payload for span in recorded.named("zarr.AsyncArray._get_selection")] == [32]

    def test_field_that_is_not_there_raises_as_without_a_session(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.MemoryStore())
        with recording(tmp_path) as recorded, pytest.raises(IndexError, match="fields"):
            z.get_basic_selection(..., fields="b")
        assert all(span.error for span in recorded.named("zarr.AsyncArray._get_selection"))

    @pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
    def test_no_elements_and_no_dimensions(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        z = zarr.create_array({}, shape=shape, chunks=tuple(max(1, n) for n in shape), dtype="f8", compressors=None)
        data = np.ones(shape)
        with recording(tmp_path) as recorded:
            z[...] = data
            assert equal(np.asarray(z[...]), data)
        assert {span.payload for span in operations(recorded)} <= {0, data.nbytes}

    def test_error_is_noted_and_passes(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.MemoryStore())
        with recording(tmp_path) as recorded, pytest.raises(IndexError):
            z[500, 3]
        assert operations(recorded)[0].error

    def test_asynchronous_operations(self, tmp_path: Path) -> None:
        with recording(tmp_path) as recorded:
            programs.asynchronous(zarr.storage.MemoryStore())
        outermost = [span for span in operations(recorded) if span.parent == 0 and not span.name.startswith("zarr.api")]
        assert {span.attributes["api"] for span in outermost} == {"zarr.AsyncArray"}
        written = recorded.named("zarr.AsyncArray._set_selection")
        assert [span.payload for span in written] == [NBYTES, NBYTES]

    def test_functions(self, tmp_path: Path) -> None:
        with recording(tmp_path / "spool") as recorded:
            zarr.save(str(tmp_path / "a"), DATA)
            zarr.load(str(tmp_path / "a"))
        save, load = recorded.one("zarr.save"), recorded.one("zarr.load")
        assert (save.payload, save.inputs, save.direction) == (NBYTES, [NBYTES], "write")
        assert (load.outputs, load.direction) == ([NBYTES], "read")
        assert save.attributes["call"] == "zarr.save"


class TestDescriptions:
    def test_stores(self, tmp_path: Path, named_store: tuple[str, zarr.abc.store.Store]) -> None:
        name, store = named_store
        with recording(tmp_path / "spool") as recorded:
            z = programs.array(store)
            z[...] = DATA
            if name != "ZipStore":
                assert (z[...] == DATA).all()
        store.close()
        assert recorded.named("zarr.Array.__setitem__")[0].attributes["store"] == name
        kind = name.partition("(")[0]
        written = [
            span for span in recorded.spans if span.attributes.get("key") == "c/0/0" and span.direction == "write"
        ]
        assert written[0].attributes["store"] == name
        assert written[0].name.rsplit(".", 2)[1] in (kind, "WrapperStore")
        assert written[0].inputs == [100 * 13 * 4]
        if name != "ZipStore":
            read = [
                span for span in recorded.spans if span.attributes.get("key") == "c/0/0" and span.direction == "read"
            ]
            assert read[0].outputs == [100 * 13 * 4]

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            ({"compressors": None}, ["bytes"]),
            ({"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()]}, ["bytes", "gzip", "crc32c"]),
            ({"filters": zarr.codecs.TransposeCodec(order=(1, 0)), "compressors": None}, ["transpose", "bytes"]),
            (
                {"chunks": (50, 13), "shards": (100, 13), "compressors": zarr.codecs.ZstdCodec()},
                ["sharding(bytes+zstd)"],
            ),
            (
                {"zarr_format": 2, "compressors": numcodecs.Zstd(), "filters": [numcodecs.Delta("<i4")]},
                ["delta", "zstd"],
            ),
            ({"zarr_format": 2, "compressors": None}, ["bytes"]),
        ],
    )
    def test_codecs(self, tmp_path: Path, options: dict[str, Any], names: list[str]) -> None:
        z = programs.array(zarr.storage.MemoryStore(), **options)
        with recording(tmp_path) as recorded:
            z[...] = DATA
        assert operations(recorded)[0].attributes["codecs"] == names

    def test_wrapped_twice(self, tmp_path: Path) -> None:
        inner = zarr.storage.LoggingStore(fsspec_store(tmp_path), log_level="ERROR")
        z = programs.array(zarr.storage.WrapperStore(inner))
        with recording(tmp_path / "spool") as recorded:
            z[...] = DATA
        assert (
            operations(recorded)[0].attributes["store"] == "WrapperStore(LoggingStore(FsspecStore(MemoryFileSystem)))"
        )


class TestUsersClasses:
    def test_store_defined_during_the_session(self, tmp_path: Path) -> None:
        with recording(tmp_path) as recorded:

            class Mine(zarr.storage.MemoryStore):
                async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
                    return await super().get(key, prototype, byte_range)

            z = programs.array(Mine())
            z[...] = DATA
            assert (z[...] == DATA).all()
        requests = [
            span for span in recorded.spans if span.attributes.get("key") == "c/1/0" and span.direction == "read"
        ]
        assert [span.name.rsplit(".", 2)[1] for span in requests] == ["Mine", "MemoryStore"]
        assert requests[0].library == "test_probes_zarr"
        assert {span.attributes["store"] for span in requests} == {"Mine"}
        assert operations(recorded)[0].attributes["store"] == "Mine"
        assert not hasattr(Mine.get, "__wrapped__")

    def test_wrapper_defined_before_the_session(self, tmp_path: Path) -> None:
        class Slow(zarr.storage.WrapperStore[Any]):
            async def set(self, key: str, value: Any) -> None:
                await asyncio.sleep(0)
                await super().set(key, value)

        z = programs.array(Slow(zarr.storage.MemoryStore()))
        with recording(tmp_path) as recorded:
            z[...] = DATA
        requests = [span for span in recorded.spans if span.attributes.get("key") == "c/1/0"]
        assert [span.name.rsplit(".", 2)[1] for span in requests if span.kind == "request"] == [
            "Slow",
            "WrapperStore",
            "MemoryStore",
        ]
        assert requests[0].attributes["store"] == "Slow(MemoryStore)"

    def test_codec_defined_during_the_session(self, tmp_path: Path) -> None:
        from dataclasses import dataclass

        with recording(tmp_path) as recorded:

            @dataclass(frozen=True)
            class Reverse(zarr.abc.codec.BytesBytesCodec):
                is_fixed_size = True

                @classmethod
                def from_dict(cls, data: Any) -> Any:
                    assert data["name"] == "reverse"
                    return cls()

                def to_dict(self) -> Any:
                    return {"name": "reverse"}

                async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
                    return chunk_spec.prototype.buffer.from_bytes(chunk_bytes.to_bytes()[::-1])

                async def _encode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
                    return chunk_spec.prototype.buffer.from_bytes(chunk_bytes.to_bytes()[::-1])

                def compute_encoded_size(self, input_byte_length: int, _chunk_spec: Any) -> int:
                    return input_byte_length

            zarr.registry.register_codec("reverse", Reverse)
            z = programs.array(zarr.storage.MemoryStore(), compressors=[Reverse()])
            z[...] = DATA
            assert (z[...] == DATA).all()
        encoded = [span for span in recorded.spans if span.name.endswith("Reverse._encode_single")]
        assert [(span.kind, span.inputs, span.outputs) for span in encoded] == [("encode", [5200], [5200])] * 3
        assert operations(recorded)[0].attributes["codecs"] == ["bytes", "reverse"]


class TestCopies:
    def test_scatter_notes_the_region_it_writes(self, tmp_path: Path) -> None:
        target, value = np.zeros((10, 12), "<f8"), np.ones((4, 5), "<f8")
        buffer = cpu.NDBuffer.from_numpy_array(target)
        with recording(tmp_path) as recorded:
            buffer[2:6, 1:6] = cpu.NDBuffer.from_numpy_array(value)
            buffer[..., 3] = value[0, 0]
            buffer[:] = 4
            buffer[3] = np.arange(12.0)
            buffer[[1, 2]] = np.ones((2, 12))
        spans = recorded.named("zarr.core.buffer.cpu.NDBuffer.__setitem__")
        assert [(span.inputs, span.destinations) for span in spans] == [
            ([160], [160]),
            ([], [80]),
            ([], [960]),
            ([96], [96]),
            ([192], [960]),
        ]
        first = spans[0].seen[1]
        region = target[2:6, 1:6]
        low, high = np.lib.array_utils.byte_bounds(region)
        assert (first.address, first.extent, first.contiguous) == (low, high - low, False)
        assert spans[0].seen[0].address == value.ctypes.data

    def test_basic_indexing_is_no_copy_and_fancy_indexing_is(self, tmp_path: Path) -> None:
        buffer = cpu.NDBuffer.from_numpy_array(np.arange(120.0).reshape(10, 12))
        with recording(tmp_path) as recorded:
            buffer[2:6, 1:6]
            buffer[3]
            buffer[..., 2]
            buffer[:, [1, 4]]
            buffer[np.arange(10) > 5]
        spans = recorded.named("zarr.core.buffer.cpu.NDBuffer.__getitem__")
        assert [(span.kind, span.inputs, span.outputs) for span in spans] == [
            ("gather", [960], [160]),
            ("gather", [960], [384]),
        ]

    def test_reshape_copies_only_what_is_not_contiguous(self, tmp_path: Path) -> None:
        data = np.arange(120.0).reshape(10, 12)
        with recording(tmp_path) as recorded:
            cpu.NDBuffer.from_numpy_array(data).reshape((120,))
            cpu.NDBuffer.from_numpy_array(data.T).reshape((120,))
        assert recorded.one("zarr.core.buffer.core.NDBuffer.reshape").outputs == [960]

    def test_conversions_joins_and_copies(self, tmp_path: Path) -> None:
        nd = cpu.NDBuffer.from_numpy_array(np.arange(120.0))
        flat = cpu.Buffer.from_bytes(b"x" * 101)
        with recording(tmp_path) as recorded:
            nd.astype("<f4")
            nd.copy()
            flat.to_bytes()
            flat + cpu.Buffer.from_bytes(b"y" * 7)
        convert, copy, to_bytes = (
            recorded.one(f"zarr.core.buffer.{name}")
            for name in ("cpu.NDBuffer.astype", "core.NDBuffer.copy", "core.Buffer.to_bytes")
        )
        assert (convert.kind, convert.inputs, convert.outputs) == ("convert", [960], [480])
        assert (copy.kind, copy.inputs, copy.outputs) == ("copy", [960], [960])
        assert (to_bytes.kind, to_bytes.inputs, to_bytes.outputs) == ("copy", [101], [101])
        joined = recorded.one("zarr.core.buffer.cpu.Buffer.__add__")
        assert (joined.kind, joined.inputs, joined.outputs) == ("join", [101, 7], [108])

    def test_primitive_inside_a_copy_is_not_told_again(self, tmp_path: Path) -> None:
        nd = cpu.NDBuffer.from_numpy_array(np.arange(1200.0))
        with recording(tmp_path) as recorded:
            nd.copy()
            nd.astype("<f4")
        assert [span.library for span in recorded.spans] == ["zarr", "zarr"]


class TestTransforms:
    def test_numcodecs_inside_zarrs_codec(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.MemoryStore(), compressors=zarr.codecs.ZstdCodec())
        with recording(tmp_path) as recorded:
            z[...] = DATA
            z[...]
        encoded, decoded = recorded.named("numcodecs.zstd.Zstd.encode"), recorded.named("numcodecs.zstd.Zstd.decode")
        assert [span.inputs for span in encoded] == [[5200]] * 3
        assert [span.outputs for span in decoded] == [[5200]] * 3
        assert sorted(span.outputs for span in encoded) == sorted(span.inputs for span in decoded)
        assert all(span.kind == "context" for span in recorded.spans if "ZstdCodec" in span.name)
        assert all("zarr.Array.__setitem__" in recorded.ancestors(span) for span in encoded)
        assert all(span.attributes == {"codec": "zstd"} for span in encoded)

    def test_destination_of_a_decode(self, tmp_path: Path) -> None:
        codec, out = numcodecs.Zstd(), np.empty(2000, "<i4")
        encoded = codec.encode(np.arange(2000, dtype="<i4"))
        with recording(tmp_path) as recorded:
            codec.decode(encoded, out)
            codec.decode(encoded, out=out)
        assert [(span.inputs, span.destinations) for span in recorded.named("numcodecs.zstd.Zstd.decode")] == [
            ([len(encoded)], [8000])
        ] * 2

    def test_instances_are_pickled_as_before(self, tmp_path: Path) -> None:
        import pickle

        store = zarr.storage.MemoryStore()
        z = programs.array(store)
        z[...] = DATA
        with recording(tmp_path):
            for thing in (
                numcodecs.Zstd(3),
                zarr.codecs.ZstdCodec(level=3),
                zarr.codecs.ShardingCodec(chunk_shape=(5,)),
            ):
                assert pickle.loads(pickle.dumps(thing)) == thing
            assert (pickle.loads(pickle.dumps(z))[...] == DATA).all()

    def test_sharded_write_and_partial_read(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.MemoryStore(), chunks=(50, 13), shards=(100, 13))
        with recording(tmp_path) as recorded:
            z[...] = DATA
            assert (z[3:20] == DATA[3:20]).all()
        assert [span.payload for span in recorded.named("zarr.AsyncArray._get_selection")] == [17 * 13 * 4]
        partial = recorded.named("zarr.codecs.sharding.ShardingCodec._decode_partial_single")
        assert [span.outputs for span in partial] == [[17 * 13 * 4]]
        assert all(span.kind == "context" for span in recorded.spans if "ShardingCodec" in span.name)


class TestThreadsAndTasks:
    def test_two_writes_at_once_keep_apart(self, tmp_path: Path) -> None:
        async def main() -> None:
            arrays = [
                await zarr.api.asynchronous.create(
                    store=zarr.storage.LocalStore(tmp_path / name), shape=SHAPE, chunks=CHUNKS, dtype=DATA.dtype
                )
                for name in "ab"
            ]
            await asyncio.gather(*(made.setitem(..., DATA) for made in arrays))

        with recording(tmp_path / "spool") as recorded:
            asyncio.run(main())
        first, second = recorded.named("zarr.AsyncArray.setitem")
        by_id = {span.id: span for span in recorded.spans}
        for span in recorded.spans:
            if str(span.attributes.get("key", "")).startswith("c/"):
                above = span
                while above.parent:
                    above = by_id[above.parent]
                assert above in (first, second)
        under = {
            top.id: sum(1 for span in recorded.named("zarr.storage.LocalStore.set") if _is_under(span, top, by_id))
            for top in (first, second)
        }
        assert under == {first.id: 3, second.id: 3}

    def test_work_in_a_thread_belongs_to_its_request(self, tmp_path: Path) -> None:
        z = programs.array(zarr.storage.LocalStore(tmp_path / "a"))
        z[...] = DATA
        moments: list[tuple[int, int]] = []

        class Stamping(cpu.Buffer):
            @classmethod
            def from_bytes(cls, bytes_like: Any) -> Any:
                moments.append((recorder.stamp(), threading.get_ident()))
                return super().from_bytes(bytes_like)

        prototype = BufferPrototype(buffer=Stamping, nd_buffer=cpu.NDBuffer)
        with recording(tmp_path / "spool") as recorded:
            z.get_basic_selection(..., prototype=prototype)
        requests = {span.id: span for span in recorded.named("zarr.storage.LocalStore.get")}
        assert len(moments) >= 3
        for sequence, thread in moments:
            assert recorded.innermost_at(sequence, thread) in requests
            assert all(span.thread != thread for span in requests.values())


def _is_under(span: Span, top: Span, by_id: dict[int, Span]) -> bool:
    while span.parent:
        span = by_id[span.parent]
        if span is top:
            return True
    return False
