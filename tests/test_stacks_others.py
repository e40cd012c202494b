"""Libraries beside the array stack: cramjam under fsspec, pyarrow's buffers, cubed above zarr."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from copytrace.matrix.environments import cache_directory, environment
from stacks import copies, functions, only, trace

if TYPE_CHECKING:
    from pathlib import Path

    from copytrace import Report

SIZE = 4_000_037
BYTES = f"a = np.random.default_rng(7).integers(0, 50, {SIZE}, dtype='u1')\n"


def _status(report: Report, probe: str) -> str:
    return {found.name: found.status for found in report.coverage.probes}[probe]


def test_a_codec_of_cramjam_is_an_encode_or_decode_of_its_own(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        "packed = cramjam.snappy.compress(a); out = cramjam.snappy.decompress(packed)",
        before=BYTES + "import cramjam",
        after="assert np.array_equal(np.frombuffer(out, 'u1'), a); open(tmp + '/size', 'w').write(str(len(packed)))",
    )
    packed = int((tmp_path / "size").read_text())
    assert copies(only(report, "encode")) == [("encode", packed, "cramjam", "compress")]
    assert copies(only(report, "decode")) == [("decode", SIZE, "cramjam", "decompress")]
    assert _status(report, "cramjam") == "attached"


def test_cramjam_under_a_compressed_file_of_fsspec_is_named_with_who_calls_it(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        with fs.open(tmp + "/x", "wb", compression="snappy") as file:
            file.write(raw)
        """,
        before=BYTES + "import fsspec; raw = a.tobytes(); fs = fsspec.filesystem('file')",
    )
    encode = only(report, "encode")
    ((kind, _, layer, function),) = copies(encode)
    assert (kind, layer, function) == ("encode", "cramjam", "compress")
    assert encode.payload_bytes == SIZE
    assert {"snappy.snappy.StreamCompressor.add_chunk", "fsspec.compression.SnappyFile._upload_chunk"} <= functions(
        encode
    )


def test_a_package_that_is_not_named_like_its_distribution_has_the_name_of_that(tmp_path: Path) -> None:
    report = trace(
        tmp_path,
        """
        with copytrace.operation("unpack", payload_bytes=a.nbytes):
            out = snappy.StreamDecompressor().decompress(packed)
        """,
        before=BYTES + "import snappy; packed = snappy.StreamCompressor().add_chunk(a.tobytes())",
        after="assert out == a.tobytes()",
    )
    (path,) = report.paths
    assert ("copy", SIZE, "python-snappy", "flush") in copies(path)


@pytest.fixture(scope="module")
def arrow() -> str:
    return str(environment(("pyarrow==26.0.1", "numpy<3"), cache=cache_directory()) / "python")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_pyarrow_is_named_by_function_and_its_pool_is_said(tmp_path: Path, arrow: str) -> None:
    report = trace(
        tmp_path,
        """
        with copytrace.operation("write", payload_bytes=a.nbytes):
            sink = pa.BufferOutputStream()
            sink.write(pa.py_buffer(a))
            out = pa.py_buffer(a).to_pybytes()
        """,
        before=BYTES + "import pyarrow as pa",
        after="assert out == a.tobytes()",
        python=arrow,
    )
    (path,) = report.paths
    assert sorted(copies(path)) == [("copy", SIZE, "pyarrow", "Write"), ("copy", SIZE, "pyarrow", "to_pybytes")]
    assert {"arrow::io::BufferOutputStream::Write", "pyarrow.lib.Buffer.to_pybytes"} <= functions(path)
    assert path.extra_at_peak == pytest.approx(1.0, abs=0.05)
    assert [note for note in report.coverage.notes if note.startswith("pyarrow took 1,073.")], report.coverage.notes


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_cubed_is_among_the_callers(tmp_path: Path) -> None:
    python = str(environment(("cubed==0.28.0", "zarr==3.4.2"), cache=cache_directory()) / "python")
    report = trace(
        tmp_path,
        "out = xp.add(cubed.from_zarr(tmp + '/in.zarr', spec=spec), 1).compute()",
        before="""
import cubed, cubed.array_api as xp, zarr
a = np.random.default_rng(7).random((512, 1024))
zarr.create_array(tmp + "/in.zarr", shape=a.shape, chunks=(256, 512), dtype="f8", compressors=None)[...] = a
spec = cubed.Spec(tmp, allowed_mem="500MB")
""",
        after="assert np.array_equal(out, a + 1)",
        python=python,
    )
    raw = next(path for path in report.paths if path.direction == "read" and path.codecs == ("bytes",))
    assert copies(raw) == [("scatter", 512 * 1024 * 8, "zarr.buffer", "__setitem__")]
    assert [name for name in functions(raw) if name.startswith("cubed.")]
    written = only(report, "write")
    assert [buffer.layer for buffer in written.buffers if buffer.role == "source"] == ["cubed"]
