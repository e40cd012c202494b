"""Stacks on a local directory, each in a process of its own: exact bytes, layers and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stacks import copies, functions, needs_the_hook, only, trace

if TYPE_CHECKING:
    from pathlib import Path

SIDE = 1003
SIZE = SIDE * SIDE * 4
ARRAY = f"a = np.random.default_rng(7).random(({SIDE}, {SIDE}), dtype='f4')\n"
SAME = "assert np.array_equal(np.asarray(out), a)"


@needs_the_hook
def test_icechunk_moves_a_raw_read_twice_in_rust_before_the_scatter(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        session = repo.writable_session("main")
        z = zarr.create_array(session.store, shape=a.shape, chunks=a.shape, dtype="f4", compressors=None)
        z[...] = a
        session.commit("all")
        out = zarr.open_array(repo.readonly_session("main").store, mode="r")[...]
        """,
        before=ARRAY
        + 'import icechunk, zarr; repo = icechunk.Repository.create(icechunk.local_filesystem_storage(tmp + "/repo"))',
        after=SAME,
    )
    write, read = only(report, "write"), only(report, "read")
    assert (write.store, write.copied_bytes, write.flushed_bytes) == ("IcechunkStore", 0, SIZE)
    found = copies(read)
    assert [(kind, nbytes, layer) for kind, nbytes, layer, _ in found] == [
        ("join", pytest.approx(SIZE, rel=0.01), "icechunk"),
        ("copy", pytest.approx(SIZE, rel=0.01), "icechunk"),
        ("scatter", SIZE, "zarr.buffer"),
    ]
    assert found[1][3] == "async_reader_to_bytes"
    assert read.extra_at_peak == pytest.approx(2.0, abs=0.05)
    assert {probe.name: probe.status for probe in report.coverage.probes}["icechunk"] == "attached"


_ZARRISTA = """
import asyncio
from zarrista import Array, ArrayBuilder, ArrayBytes, AsyncArray, ChunkGrid, DataType, FillValue
from zarrista.codec import zstd
from zarrista.store import FilesystemStore
grid = ChunkGrid.regular(a.shape, chunk_shape=a.shape)
builder = ArrayBuilder(grid, DataType.from_string("float32"), FillValue(bytes(4)))
"""


@needs_the_hook
@pytest.mark.parametrize("call", ["array[:, :] = a", "array.store_array_subset((slice(None), slice(None)), a)"])
def test_zarrista_copies_a_raw_write_once_and_reads_without_a_copy(tmp_path: Path, call: str) -> None:
    report = trace(
        tmp_path,
        f"""
        array = builder.create(FilesystemStore(tmp), "/a")
        {call}
        out = array.retrieve_chunk([0, 0])
        """,
        before=ARRAY + _ZARRISTA,
        after=SAME,
    )
    write, read = only(report, "write"), only(report, "read")
    assert (write.api, write.store, write.codecs, write.payload_bytes) == (
        "zarrista.Array",
        "FilesystemStore",
        ("bytes",),
        SIZE,
    )
    assert copies(write) == [("copy", SIZE, "zarrs", "store_chunk_opt")]
    assert write.flushed_bytes == SIZE
    assert (read.copied_bytes, read.fetched_bytes, read.extra_at_peak_bytes // 4096) == (0, SIZE, 0)


@needs_the_hook
def test_zarrista_with_zstd_is_one_encode_and_one_decode_into_the_result(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        array = builder.compressors([zstd(level=1, checksum=False)]).create(FilesystemStore(tmp), "/a")
        array.store_array_subset((slice(None), slice(None)), a)
        out = array.retrieve_chunk([0, 0])
        """,
        before=ARRAY + _ZARRISTA,
        after=SAME,
    )
    write, read = only(report, "write"), only(report, "read")
    assert [kind for kind, *_ in copies(write)] == ["encode"]
    (step,) = [step for step in write.steps if step.kind == "encode"]
    assert step.bytes == write.flushed_bytes < SIZE
    assert [(kind, nbytes) for kind, nbytes, *_ in copies(read)] == [("decode", SIZE)]
    assert read.extra_at_peak == pytest.approx(write.flushed_bytes / SIZE, abs=0.05)


def test_every_call_of_zarrista_that_moves_data_is_an_operation(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        array = builder.create(FilesystemStore(tmp), "/a")
        array.store_chunk([0, 0], ArrayBytes(a.tobytes()))
        array.store_chunks((slice(None), slice(None)), a)
        encoded = array.retrieve_encoded_chunk([0, 0])
        array.store_encoded_chunk([0, 0], encoded.buffer)
        array.retrieve_array_subset((slice(None), slice(None)))
        array.retrieve_subchunk([0, 0])
        array[:, :]

        async def work():
            array = await builder.create_async(obstore.store.LocalStore(tmp + "/o", mkdir=True), "/b")
            await array.store_array_subset((slice(None), slice(None)), a)
            await array.store_chunks((slice(None), slice(None)), a)
            await array.retrieve_encoded_chunk([0, 0])
            return await array.retrieve_chunk([0, 0])

        out = asyncio.run(work())
        """,
        before=ARRAY + _ZARRISTA + "import obstore.store",
        after=SAME,
    )
    operations = {
        (path.direction, path.api, path.store): (path.operations, path.payload_bytes) for path in report.paths
    }
    assert operations == {
        ("write", "zarrista.Array", "FilesystemStore"): (3, 3 * SIZE),
        ("read", "zarrista.Array", "FilesystemStore"): (4, 4 * SIZE),
        ("write", "zarrista.AsyncArray", "obstore.LocalStore"): (2, 2 * SIZE),
        ("read", "zarrista.AsyncArray", "obstore.LocalStore"): (2, 2 * SIZE),
    }
    assert report.coverage.unattributed_bytes == 0


@needs_the_hook
def test_the_zarrs_pipeline_is_named_by_crate_and_function(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            z = zarr.create_array(tmp + "/a", shape=a.shape, chunks=a.shape, dtype="f4", compressors=None)
            z[...] = a
            out = zarr.open_array(tmp + "/a")[...]
        """,
        before=ARRAY + "import zarr, zarrs",
        after=SAME,
    )
    write, read = only(report, "write"), only(report, "read")
    assert [(kind, nbytes, layer) for kind, nbytes, layer, _ in copies(write)] == [("copy", SIZE, "zarrs")]
    assert copies(read) == [("copy", SIZE, "zarrs", "copy_from_slice")]
    assert "zarrs.pipeline.ZarrsCodecPipeline.read" in functions(read)
    assert (write.extra_at_peak, read.extra_at_peak) == (pytest.approx(1.0, abs=0.05), pytest.approx(1.0, abs=0.05))


def test_fsspec_maps_turn_arrays_into_bytes_and_files_do_not(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        m["x"] = a
        out = np.frombuffer(m["x"], "f4").reshape(a.shape)
        with fs.open(tmp + "/y", "wb") as file:
            file.write(a)
        """,
        before=ARRAY
        + 'import fsspec; fs = fsspec.filesystem("file", auto_mkdir=True)\n'
        + 'm = fsspec.get_mapper("file://" + tmp + "/m", auto_mkdir=True)',
        after=SAME,
    )
    paths = {(path.direction, path.store): path for path in report.paths}
    assert copies(paths["write", "FSMap(LocalFileSystem)"]) == [("copy", SIZE, "fsspec", "maybe_convert")]
    assert paths["read", "FSMap(LocalFileSystem)"].copied_bytes == 0
    assert paths["read", "FSMap(LocalFileSystem)"].fetched_bytes == SIZE
    assert paths["write", "LocalFileOpener"].copied_bytes == 0
    assert str(tmp_path) not in report.to_json()


@needs_the_hook
def test_h5py_copies_are_named_by_hdf5s_functions(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        with h5py.File(tmp + "/a.h5", "w") as file:
            file.create_dataset("raw", shape=a.shape, dtype="f4")[...] = a
            file.create_dataset("chunked", shape=a.shape, chunks=a.shape, dtype="f4")[...] = a
        with h5py.File(tmp + "/a.h5") as file:
            out = np.empty_like(a)
            file["raw"].read_direct(out)
        """,
        before=ARRAY + "import h5py",
        after=SAME,
    )
    write, read = only(report, "write"), only(report, "read")
    assert (write.operations, write.store, write.payload_bytes) == (2, "File(sec2)", 2 * SIZE)
    assert all(layer == "h5py" for _, _, layer, _ in copies(write))
    assert (read.copied_bytes, read.fetched_bytes) == (0, SIZE)


@needs_the_hook
def test_tensorstores_threads_are_named(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        store = ts.open(spec, create=True).result()
        store.write(a).result()
        out = ts.open(spec).result().read().result()
        """,
        before=ARRAY
        + f"""
import tensorstore as ts
grid = dict(name="regular", configuration=dict(chunk_shape=[{SIDE}, {SIDE}]))
metadata = dict(shape=[{SIDE}, {SIDE}], data_type="float32", chunk_grid=grid)
spec = dict(driver="zarr3", kvstore=dict(driver="file", path=tmp + "/ts"), metadata=metadata)
""",
        after=SAME,
    )
    write, read = only(report, "write"), only(report, "read")
    assert (write.store, write.payload_bytes, read.payload_bytes) == ("zarr3(file)", SIZE, SIZE)
    for path in (write, read):
        assert [(kind, nbytes, layer) for kind, nbytes, layer, _ in copies(path)] == [("copy", SIZE, "tensorstore")]
    assert read.fetched_bytes == SIZE


def test_xarray_and_dask_are_among_the_callers(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        encoding = {"v": {"compressors": None, "chunks": a.shape}}
        xr.Dataset({"v": (("y", "x"), a)}).to_zarr(tmp + "/x.zarr", consolidated=False, encoding=encoding)
        with xr.open_zarr(tmp + "/x.zarr", chunks={}, consolidated=False) as opened:
            out = opened["v"].compute().values
        """,
        before=ARRAY + "import xarray as xr, dask.array, zarr",
        after=SAME,
    )
    write, read = only(report, "write"), only(report, "read")
    assert write.payload_bytes == read.payload_bytes == SIZE
    assert ("scatter", SIZE, "zarr.buffer", "__setitem__") in copies(read)
    named = functions(read)
    assert any(name.startswith("xarray.") for name in named), named
