"""S3: a server in a process of its own on loopback, s3fs and obstore against it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from copytrace.matrix.server import KEY, REGION, SECRET, make_bucket, s3_server
from stacks import copies, functions, needs_the_hook, only, trace

if TYPE_CHECKING:
    from collections.abc import Iterator

SIDE = 2048
SIZE = SIDE * SIDE * 4
ARRAY = f"a = np.arange(1, {SIDE * SIDE + 1}, dtype='f4').reshape({SIDE}, {SIDE})\n"
SAME = "assert np.array_equal(out, a)"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = Path(sys.executable).with_name("moto_server")
    with s3_server(tmp_path_factory.mktemp("cache"), program=program) as url:
        make_bucket(url, "bucket")
        yield url


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = Path(sys.executable).with_name("moto_server")
    with s3_server(tmp_path_factory.mktemp("cache"), program=program, https=True) as url:
        make_bucket(url, "bucket")
        yield url


def _s3fs(url: str) -> str:
    verify = "" if url.startswith("http:") else ", verify=False"
    return f"""
import s3fs, zarr
from zarr.storage import FsspecStore
options = dict(key={KEY!r}, secret={SECRET!r}, endpoint_url={url!r}, client_kwargs=dict(region_name={REGION!r}{verify}))
store = FsspecStore.from_url("s3://bucket/a.zarr", storage_options=dict(**options, asynchronous=True))
"""


_WRITE = """
z = zarr.create_array(store, shape=a.shape, chunks=a.shape, dtype="f4", compressors=None, overwrite=True)
z[...] = a
"""
_ROUND_TRIP = _WRITE + "out = z[...]\n"


@needs_the_hook
def test_s3fs_over_http_copies_five_times_on_a_write_and_three_times_on_a_read(tmp_path: Path, server: str) -> None:
    report = trace(tmp_path, _ROUND_TRIP, before=ARRAY + _s3fs(server), after=SAME)
    write, read = only(report, "write"), only(report, "read")
    about = pytest.approx(SIZE, rel=0.01)
    assert copies(write) == [
        ("copy", about, "zarr.storage", "to_bytes"),
        ("copy", about, "botocore", "<lambda>"),
        ("copy", about, "botocore", "payload"),
        ("copy", about, "aiohttp", "__init__"),
        ("copy", about, "aiohttp", "write_with_length"),
    ]
    assert [(kind, nbytes, layer) for kind, nbytes, layer, _ in copies(read)] == [
        ("copy", about, "aiohttp"),
        ("join", about, "aiohttp"),
        ("scatter", SIZE, "zarr.buffer"),
    ]
    assert (write.copies, read.copies) == (pytest.approx(5.0, abs=0.02), pytest.approx(3.0, abs=0.02))
    assert (write.flushed_bytes, read.fetched_bytes) == (about, about)
    kept = [buffer for buffer in write.buffers if buffer.role == "temporary" and buffer.peak_bytes > 1 << 20]
    (model,) = [buffer for buffer in kept if buffer.site.function == "botocore.loaders.JSONFileLoader._load_file"]
    assert model.layer == "botocore"
    held = sum(buffer.peak_bytes for buffer in write.buffers if buffer.role == "temporary")
    assert model.peak_bytes > held / 2
    assert write.extra_at_peak_bytes == pytest.approx(2 * SIZE + held, rel=0.05)
    assert {"aiohttp.payload.BytesIOPayload.__init__", "aiohttp.payload.BytesIOPayload.write_with_length"} <= functions(
        write
    )
    named = functions(read)
    assert "aiohttp.streams.StreamReader.read" in named
    assert any(name.endswith("ResponseHandler.data_received") for name in named), named
    # Some runs have another step, of less than 1 % of the payload, from how the blocks happened to arrive.
    chain = [step for step in read.steps if step.kind != "fetch" and step.bytes * 100 >= read.payload_bytes]
    assert [step.source for step in chain[1:]] == [step.destination for step in chain[:-1]]
    assert {
        probe.name: probe.status for probe in report.coverage.probes if probe.name in ("s3fs", "fsspec", "aiohttp")
    } == {
        "s3fs": "attached",
        "fsspec": "attached",
        "aiohttp": "attached",
    }


@needs_the_hook
def test_s3fs_over_https_names_the_same_layers(tmp_path: Path, encrypted: str) -> None:
    before = "import warnings; warnings.simplefilter('ignore')\n" + ARRAY + _s3fs(encrypted)
    report = trace(tmp_path, _ROUND_TRIP, before=before, after=SAME)
    write, read = only(report, "write"), only(report, "read")
    assert {layer for _, _, layer, _ in copies(write)} >= {"zarr.storage", "botocore"}
    assert [layer for _, _, layer, _ in copies(read)][-2:] == ["aiohttp", "zarr.buffer"]


def test_obstore_over_http_copies_nothing_on_a_write(tmp_path: Path, server: str) -> None:
    before = f"""
import zarr, obstore.store
from zarr.storage import ObjectStore
login = dict(endpoint={server!r}, region={REGION!r}, access_key_id={KEY!r}, secret_access_key={SECRET!r})
how = dict(virtual_hosted_style_request=False, client_options=dict(allow_http=True))
store = ObjectStore(obstore.store.S3Store("bucket", prefix="o.zarr", **login, **how))
"""
    report = trace(tmp_path, _ROUND_TRIP, before=ARRAY + before, after=SAME)
    write, read = only(report, "write"), only(report, "read")
    assert write.store == read.store == "ObjectStore(S3Store)"
    assert ("scatter", SIZE, "zarr.buffer", "__setitem__") in copies(read)
    assert report.coverage.unattributed_bytes == 0
    assert os.path.basename(tmp_path) not in report.to_json()
