"""zarr 2.18 in an environment of its own: arrays, chunks and stores."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from copytrace.matrix.environments import cache_directory, environment
from stacks import copies, functions, only, trace

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")]

SIDE = 1003
SIZE = SIDE * SIDE * 4
ARRAY = f"import numcodecs, zarr; a = np.random.default_rng(7).random(({SIDE}, {SIDE}), dtype='f4')\n"
SAME = "assert np.array_equal(out, a)"


@pytest.fixture(scope="module")
def python() -> str:
    requirements = ("zarr==2.18.7", "numcodecs==0.15.1", "fsspec", "numpy<2.5")
    return str(environment(requirements, cache=cache_directory()) / "python")


def test_a_raw_read_is_one_copy_and_a_raw_write_none(tmp_path: Path, python: str) -> None:
    report = trace(
        tmp_path,
        """
        z = zarr.open_array(store, mode="w", shape=a.shape, chunks=a.shape, dtype="f4", compressor=None)
        z[...] = a
        out = z[...]
        """,
        before=ARRAY + "store = zarr.DirectoryStore(tmp + '/a')",
        after=SAME,
        python=python,
    )
    write, read = only(report, "write"), only(report, "read")
    assert (write.api, write.store, write.codecs, write.payload_bytes) == (
        "zarr.Array",
        "DirectoryStore",
        ("bytes",),
        SIZE,
    )
    assert (write.copied_bytes, write.flushed_bytes) == (0, SIZE)
    assert [(kind, nbytes) for kind, nbytes, *_ in copies(read)] == [("scatter", SIZE)]
    assert "zarr.core.Array._process_chunk" in functions(read)
    assert {probe.name: probe.status for probe in report.coverage.probes if probe.library == "zarr"} == {
        "zarr2": "attached"
    }


def test_blosc_is_decoded_into_the_result_and_its_output_cut_by_a_copy(tmp_path: Path, python: str) -> None:
    report = trace(
        tmp_path,
        """
        z = zarr.open_array(store, mode="w", shape=a.shape, chunks=a.shape, dtype="f4", compressor=compressor)
        z[...] = a
        out = z[...]
        """,
        before=ARRAY
        + "store = zarr.DirectoryStore(tmp + '/a')\n"
        + "compressor = numcodecs.Blosc(cname='lz4', clevel=5, shuffle=numcodecs.Blosc.SHUFFLE)",
        after=SAME,
        python=python,
    )
    write, read = only(report, "write"), only(report, "read")
    assert [kind for kind, *_ in copies(write)] == ["encode", "copy"]
    assert {layer for _, _, layer, _ in copies(write)} == {"numcodecs"}
    assert [(kind, nbytes, layer) for kind, nbytes, layer, _ in copies(read)] == [("decode", SIZE, "numcodecs")]


def test_chunks_are_decoded_and_then_scattered(tmp_path: Path, python: str) -> None:
    report = trace(
        tmp_path,
        """
        z = zarr.open_array(store, mode="w", shape=a.shape, chunks=(501, 502), dtype="f4", compressor=numcodecs.Zstd(1))
        z[...] = a
        out = z[...]
        """,
        before=ARRAY + "store = zarr.DirectoryStore(tmp + '/a')",
        after=SAME,
        python=python,
    )
    read = only(report, "read")
    by_kind = {kind: nbytes for kind, nbytes, *_ in copies(read)}
    assert by_kind["scatter"] == SIZE
    assert by_kind["decode"] >= SIZE
    assert set(by_kind) == {"decode", "scatter"}


@pytest.mark.parametrize("store", ["FSMap", "FSStore"])
def test_a_store_of_fsspec_turns_the_array_into_bytes(tmp_path: Path, python: str, store: str) -> None:
    made = {
        "FSMap": "fsspec.get_mapper('file://' + tmp + '/m', auto_mkdir=True)",
        "FSStore": "zarr.storage.FSStore('file://' + tmp + '/m', auto_mkdir=True)",
    }
    report = trace(
        tmp_path,
        """
        z = zarr.open_array(store, mode="w", shape=a.shape, chunks=a.shape, dtype="f4", compressor=None)
        z[...] = a
        """,
        before=ARRAY + f"import fsspec; store = {made[store]}",
        python=python,
    )
    write = only(report, "write")
    assert write.store == "FSStore(LocalFileSystem)"
    assert copies(write) == [("copy", SIZE, "fsspec", "maybe_convert")]
    assert write.flushed_bytes == SIZE
