"""Known copies: the table, and which of its entries a step gets at which versions."""

from __future__ import annotations

import re
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from copytrace.matrix.environments import cache_directory, environment
from copytrace.matrix.server import KEY, REGION, SECRET, make_bucket, s3_server
from copytrace.model import Path, SiteRef, Step
from copytrace.remedies import REMEDIES, Remedy, remedy
from remedy_programs import KNOWN, SIZE, Known
from stacks import trace

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    import copytrace


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


def _path(direction: str, *codecs: str) -> Path:
    return Path(
        label="",
        direction=direction,
        api="",
        store="",
        codecs=codecs,
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
        ("obstore-multipart", "write", _step("copy", "obstore", "+0x204830"), "obstore", "0.6.0", "0.11.1"),
        (
            *("zarr-local-write", "write"),
            _step("copy", "zarr.storage", "zarr.storage._local._put", "zarr.storage._local.LocalStore.set"),
            *("zarr", "3.0.6", "3.0.7"),
        ),
        (
            *("zarr-shard-append", "write", _step("join", "zarr.buffer", "zarr.core.buffer.cpu.Buffer.__add__")),
            *("zarr", "3.1.3", "3.1.4"),
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


def test_which_thread_a_scatter_gets_depends_on_what_was_before_it() -> None:
    step = _step("scatter", "zarr.buffer", "zarr.core.buffer.cpu.NDBuffer.__setitem__")
    found = [remedy(step, _path("read", *codecs), {"zarr": "3.4.2"}) for codecs in (("bytes",), ("bytes", "zstd"))]
    assert [known.reported for known in found if known] == ["zarr-python#3429", "zarr-python#2904"]


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


# --- with the libraries themselves ------------------------------------------------------------------------------------


def _told(report: copytrace.Report, name: str) -> set[int]:
    """Bytes of each step that has the remedy of that name."""
    (known,) = [known for known in REMEDIES if known.name == name]
    return {step.bytes for path in report.paths for step in path.steps if step.remedy == known.text}


def _copies(report: copytrace.Report, name: str) -> list[Step]:
    """Steps that the remedy is about, whatever the versions."""
    (known,) = [known for known in REMEDIES if known.name == name]
    return [
        step
        for path in report.paths
        for step in path.steps
        if remedy(step, path, {known.package: _affected(known)}) is known
    ]


def _affected(known: Remedy) -> str:
    return known.versions.split(",", 1)[0].lstrip("<>=!") if known.versions.startswith(">=") else "0.0.1"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server(cache_directory()) as url:
        make_bucket(url, "bucket")
        yield url


def _trace(known: Known, requirements: tuple[str, ...], tmp_path: pathlib.Path, url: str) -> copytrace.Report:
    python = environment(requirements, cache=cache_directory()) / "python"
    tmp_path.mkdir()
    before = known.before
    if known.s3:
        name = "-".join((known.name, *requirements))
        before = before.format(key=KEY, secret=SECRET, region=REGION, url=url, name=name)
    return trace(tmp_path, known.inside, before=before, python=str(python))


def test_every_entry_is_tried_with_the_libraries_themselves() -> None:
    assert {known.name for known in KNOWN} == {known.name for known in REMEDIES}
    for known in REMEDIES:
        tried = [one for one in KNOWN if one.name == known.name]
        if known.fixed_in:
            assert all(f"{known.package}=={known.fixed_in}" in one.mended for one in tried)


def _id(known: Known) -> str:
    return f"{known.name}-{known.affected[-1]}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
@pytest.mark.parametrize("known", KNOWN, ids=_id)
def test_an_entry_is_told_at_an_affected_version_and_its_copy_gone_where_it_is_mended(
    known: Known, tmp_path: pathlib.Path, server: str
) -> None:
    report = _trace(known, known.affected, tmp_path / "affected", server)
    told = _told(report, known.name)
    assert any(nbytes >= 0.85 * SIZE for nbytes in told), told
    if known.mended:
        mended = _trace(known, known.mended, tmp_path / "mended", server)
        assert _told(mended, known.name) == set()
        assert _copies(mended, known.name) == []


@pytest.mark.parametrize(
    "known", [one for one in KNOWN if one.name in ("zarr-scatter", "zarr-scatter-decoded")], ids=_id
)
def test_entries_that_are_open_upstream_are_told_with_what_is_installed_here(
    known: Known, tmp_path: pathlib.Path
) -> None:
    report = trace(tmp_path, known.inside, before=known.before, python=sys.executable)
    assert _told(report, known.name) == {SIZE}
