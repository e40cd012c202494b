"""Known copies: the table, and which of its entries a step gets at which versions."""

from __future__ import annotations

import re

import pytest

from copytrace.model import Path, SiteRef, Step
from copytrace.remedies import REMEDIES, Remedy, remedy


def _step(kind: str, layer: str, function: str, *called_from: str) -> Step:
    return Step(
        kind=kind,
        source=None,
        destination=None,
        layer=layer,
        project=layer.split(".", 1)[0],
        site=SiteRef(function),
        primitive="",
        called_from=tuple(map(SiteRef, called_from)),
        count=1,
        bytes=1000,
        ratio=1.0,
        at_peak_bytes=0,
        held_ms=None,
        evidence="transfer",
    )


def _path(direction: str) -> Path:
    return Path(
        label="",
        direction=direction,
        api="",
        store="",
        codecs=(),
        operations=1,
        chunks=1,
        errors=0,
        payload_bytes=1000,
        copied_bytes=0,
        copies=0.0,
        extra_at_peak_bytes=0,
        extra_at_peak=0.0,
        best_achievable=0,
        avoidable=0.0,
        fetched_bytes=0,
        flushed_bytes=0,
        read_amplification=None,
        decode_amplification=None,
        unattributed_bytes=0,
        explained=None,
        buffers=(),
        steps=(),
    )


PULL = "<_obstore::put::PullSource as std::io::Read>::read"
TO_BYTES = "zarr.core.buffer.core.Buffer.to_bytes"


@pytest.mark.parametrize(
    ("name", "direction", "step", "package", "affected", "mended"),
    [
        ("obstore-multipart", "write", _step("copy", "obstore", PULL), "obstore", "0.11.0", "0.11.1"),
        (
            *("obstore-multipart", "write", _step("copy", "obstore", "_obstore::put::put_multipart_inner")),
            *("obstore", "0.6.0", "0.12.1"),
        ),
        (
            *("zarr-local-write", "write"),
            _step("copy", "zarr.storage", TO_BYTES, "zarr.storage._local._put", "zarr.storage._local.LocalStore.set"),
            *("zarr", "3.0.6", "3.0.7"),
        ),
        (
            *("zarr-obstore-write", "write"),
            _step("copy", "zarr.storage", TO_BYTES, "zarr.storage._obstore.ObjectStore.set"),
            *("zarr", "3.0.7", "3.0.8"),
        ),
        (
            "numcodecs-slice",
            "write",
            _step("copy", "numcodecs", "numcodecs.blosc.compress"),
            "numcodecs",
            "0.15.1",
            "0.16.0",
        ),
        (
            *("icechunk-write", "write", _step("copy", "icechunk", TO_BYTES, "icechunk.store.IcechunkStore.set")),
            *("icechunk", "2.1.2", "2.2.0"),
        ),
        (
            *("aiohttp-getbuffer", "write", _step("copy", "aiohttp", "aiohttp.payload.BytesIOPayload.__init__")),
            *("aiohttp", "3.14.5", "3.11.16"),
        ),
    ],
)
def test_a_copy_is_known_at_an_affected_version_and_not_at_another(
    name: str, direction: str, step: Step, package: str, affected: str, mended: str
) -> None:
    found = remedy(step, _path(direction), {package: affected})
    assert found is not None
    assert found.name == name
    assert remedy(step, _path(direction), {package: mended}) is None
    assert remedy(step, _path(direction), {}) is None
    other = {"write": "read", "read": "write"}[direction]
    if found.direction:
        assert remedy(step, _path(other), {package: affected}) is None


@pytest.mark.parametrize(
    ("name", "direction", "step", "packages"),
    [
        (
            *("zarr-fsspec-write", "write"),
            _step("copy", "zarr.storage", TO_BYTES, "zarr.storage._fsspec.FsspecStore.set"),
            {"zarr": "3.3.0", "s3fs": "2026.9.0"},
        ),
        (
            "fsspec-maybe-convert",
            "write",
            _step("copy", "fsspec", "fsspec.mapping.maybe_convert"),
            {"fsspec": "2026.9.0"},
        ),
        (
            "zarr-scatter",
            "read",
            _step("scatter", "zarr.buffer", "zarr.core.buffer.cpu.NDBuffer.__setitem__"),
            {"zarr": "3.4.2"},
        ),
        (
            "icechunk-read",
            "read",
            _step("join", "icechunk", "icechunk::asset_manager::async_reader_to_bytes"),
            {"icechunk": "2.3.0"},
        ),
        (
            "zarrista-write",
            "write",
            _step("copy", "zarrs", "zarrs::array::Array::store_chunk_opt"),
            {"zarrista": "0.1.0"},
        ),
        (
            "aiohttp-stream-read",
            "read",
            _step("join", "aiohttp", "aiohttp.streams.StreamReader.read"),
            {"aiohttp": "3.14.5"},
        ),
    ],
)
def test_a_copy_that_is_not_mended_yet_is_known(
    name: str, direction: str, step: Step, packages: dict[str, str]
) -> None:
    found = remedy(step, _path(direction), packages)
    assert found is not None
    assert (found.name, found.fixed_in) == (name, "")


def test_other_copies_are_not_known() -> None:
    packages = {known.package: "99" for known in REMEDIES}
    assert remedy(_step("copy", "user", "__main__.main"), _path("write"), packages) is None
    assert remedy(_step("encode", "numcodecs", "numcodecs.zstd.Zstd.encode"), _path("write"), packages) is None
    assert remedy(_step("copy", "zarr.storage", TO_BYTES, "mine.Store.set"), _path("write"), packages) is None


@pytest.mark.parametrize("known", REMEDIES, ids=lambda known: known.name)
def test_an_entry_is_one_line_with_a_thread_that_can_be_opened(known: Remedy) -> None:
    assert "\n" not in known.text
    assert len(known.text) <= 160
    assert bool(known.url) == bool(known.reported)
    if known.reported:
        assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/issues/\d+", known.url)
        assert f"({known.reported})" in known.text
    if known.fixed_in:
        assert known.text.startswith(f"fixed in {known.package} {known.fixed_in}")


def test_names_are_unique() -> None:
    assert len({known.name for known in REMEDIES}) == len(REMEDIES)


def test_the_line_for_obstore() -> None:
    found = remedy(_step("copy", "obstore", PULL), _path("write"), {"obstore": "0.11.0"})
    assert found is not None
    assert found.text == (
        "fixed in obstore 0.11.1 (obstore#771): "
        "upgrade obstore; a buffer is then uploaded from where it lies, not copied into parts first"
    )
