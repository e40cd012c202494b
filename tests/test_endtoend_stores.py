"""zarr operations through stores that copy at known lines, with the hook and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from zarr.storage import LocalStore, ObjectStore

import copytrace
from copytrace.native import readable
from copytrace.recorder import native
from copytrace.report import Report
from copytrace.transfers import _extension
from oracle.lines import Told, copies, line_of, only_path
from oracle.stores import CopiesBoth, Pieces, SlicesAndJoins, SmallPieces, raw_array

N = 300_007
HOOKED = _extension()[0] is not None

source = np.random.default_rng(11).integers(1, 255, N, dtype="u1")


@pytest.fixture(params=["hook", "no hook"])
def transfers(request: pytest.FixtureRequest) -> bool:
    if request.param == "hook" and not HOOKED:
        pytest.skip("needs the native hook")
    return bool(request.param == "hook")


def write_and_read(store: Any, transfers: bool, data: Any = source) -> Report:
    array = raw_array(store, len(data))
    with copytrace.session(transfers=transfers) as session:
        array[:] = data
        found = array[:]
    assert np.array_equal(found, data)
    report = session.report
    assert report.coverage.unattributed_bytes == 0
    assert report.coverage.lost_transfers == 0
    for path in report.paths:
        assert path.payload_bytes == len(data)
        assert path.copied_bytes == sum(one.bytes for one in copies(path.steps))
    return report


SCATTER = Told("scatter", N, 1, "zarr.buffer", "__setitem__", 0)


def kept(told: list[Told]) -> list[Told]:
    """Without the line of what has no line: a scatter into the result."""
    return [one._replace(line=0) if one.kind == "scatter" else one for one in told]


def test_copies_around_another_store(tmp_path: Path, transfers: bool) -> None:
    report = write_and_read(CopiesBoth(LocalStore(tmp_path)), transfers)
    write, read = only_path(report, "write"), only_path(report, "read")
    assert copies(write.steps) == [Told("copy", N, 1, "user", "set", line_of(CopiesBoth, "# set"))]
    assert kept(copies(read.steps)) == [Told("copy", N, 1, "user", "get", line_of(CopiesBoth, "# get")), SCATTER]
    assert (write.flushed_bytes, write.fetched_bytes, read.fetched_bytes, read.flushed_bytes) == (N, 0, N, 0)
    flush = next(step for step in write.steps if step.kind == "flush")
    fetch = next(step for step in read.steps if step.kind == "fetch")
    assert (flush.layer, fetch.layer) == ("zarr.storage", "zarr.storage")
    copy = next(step for step in write.steps if step.kind == "copy")
    assert flush.source == copy.destination
    assert (write.store, write.best_achievable, write.avoidable) == ("CopiesBoth(LocalStore)", 0, 1.0)
    assert 1.0 <= (write.extra_at_peak or 0) < 1.1
    assert 2.0 <= (read.extra_at_peak or 0) < 2.1
    assert copy.site.function.endswith("oracle.stores.CopiesBoth.set")
    assert copy.primitive == "bytes"


def test_slices_and_joins_in_a_store_that_owns_its_bytes(transfers: bool) -> None:
    report = write_and_read(SlicesAndJoins(), transfers)
    write, read = only_path(report, "write"), only_path(report, "read")
    lines = {name: line_of(SlicesAndJoins, f"# {name}") for name in ("kept", "assigned", "frozen")}
    told = copies(write.steps)
    assert {(one.kind, one.layer, one.function) for one in told[:-1]} == {("copy", "user", "set")}
    assert sum(one.bytes for one in told[:-1]) == 3 * N
    assert {one.line for one in told[:-1]} <= set(lines.values())
    assert told[-1]._replace(line=0) == Told("copy", N, 1, "zarr.storage", "_copy_buffer", 0)
    assert [step.required for step in write.steps] == [False] * (len(told) - 1) + [True]
    assert (write.copies, write.flushed_bytes, read.fetched_bytes) == (4.0, 0, 0)
    told = copies(read.steps)
    assert told[0]._replace(line=0) == Told("copy", N, 1, "user", "to_bytes", 0)
    halves = [one for one in told if one.kind == "copy" and one.function == "get"]
    assert abs(sum(one.bytes for one in halves) - N) == (0 if transfers else N - 200_039)
    join = next(one for one in told if one.kind == "join")
    line = line_of(SlicesAndJoins, "# joined")
    assert join == Told("join", N, 2 if transfers else 1, "user", "get", line)
    assert kept(told)[-1] == SCATTER


@pytest.mark.parametrize("kind", [Pieces, SmallPieces])
def test_copies_in_pieces(tmp_path: Path, kind: type[Pieces], transfers: bool) -> None:
    report = write_and_read(kind(LocalStore(tmp_path)), transfers)
    pieces = -(-N // kind.piece)
    joined = pieces if transfers and kind.piece >= 4096 else 1
    for direction in ("write", "read"):
        told = copies(only_path(report, direction).steps, "user")
        assert [one._replace(count=0) for one in told] == [
            Told("copy", N, 0, "user", "_again", line_of(Pieces, "# taken")),
            Told("join", N, 0, "user", "_again", line_of(Pieces, "# joined")),
        ]
        assert told[0].count == pieces
        assert abs(told[1].count - joined) <= 1


@pytest.mark.parametrize("chunks", [1, 7])
def test_each_chunk_is_counted(tmp_path: Path, chunks: int, transfers: bool) -> None:
    nbytes = chunks * 40_021
    data = source[:nbytes]
    array = raw_array(CopiesBoth(LocalStore(tmp_path)), nbytes, 40_021)
    with copytrace.session(transfers=transfers) as session:
        array[:] = data
        found = array[:]
    assert np.array_equal(found, data)
    for direction, layer in (("write", "zarr.storage"), ("read", "zarr.buffer")):
        path = only_path(session.report, direction)
        user = copies(path.steps, "user")
        assert [(one.kind, one.bytes, one.count) for one in user] == [("copy", nbytes, chunks)]
        assert path.chunks == chunks
        assert {one.layer for one in copies(path.steps)} <= {"user", layer, "zarr.buffer", "zarr.pipeline"}


# --- obstore's native threads -------------------------------------------------------------------------------------


LARGE = 12_000_007


def test_what_was_allocated_before_a_read_is_not_the_reads(transfers: bool) -> None:
    """obstore's MemoryStore joins the parts of an upload at its end; the read is handed that memory."""
    data = np.random.default_rng(5).integers(1, 255, LARGE, dtype="u1")
    report = write_and_read(ObjectStore(obstore.store.MemoryStore()), transfers, data)
    write, read = only_path(report, "write"), only_path(report, "read")
    assert kept(copies(read.steps)) == [SCATTER._replace(bytes=LARGE)]
    assert (read.fetched_bytes, write.flushed_bytes) == (0, 0)
    assert (read.extra_at_peak or 0) < 0.01
    assert {one.layer for one in copies(write.steps)} <= {"obstore"}


def test_a_multipart_upload_is_told_with_the_hook_and_inferred_without_it(tmp_path: Path, transfers: bool) -> None:
    from importlib.metadata import version

    data = np.random.default_rng(5).integers(1, 255, LARGE, dtype="u1")
    store = ObjectStore(obstore.store.LocalStore(tmp_path / "a", mkdir=True))
    write = only_path(write_and_read(store, transfers, data), "write")
    parts = version("obstore") == "0.11.0"
    assert round((write.copied_bytes) / LARGE, 3) == (2.0 if parts else 0.0)
    assert write.flushed_bytes == LARGE
    assert {one.layer for one in copies(write.steps)} == ({"obstore"} if parts else set())
    if parts:
        assert any("put_multipart_inner" in step.site.function for step in write.steps)
        assert {step.evidence for step in write.steps if step.kind == "copy"} == {"transfer" if transfers else "native"}


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("object_store::local::read_range::h75453e505225c731", "object_store::local::read_range"),
        (
            "_obstore::put::put_multipart_inner::_$u7b$$u7b$closure$u7d$$u7d$::h7d895683dd2ff708",
            "_obstore::put::put_multipart_inner",
        ),
        (
            "_$LT$object_store..memory..InMemoryUpload$u20$as$u20$object_store..upload..MultipartUpload$GT$::complete"
            "::h1234567890abcdef",
            "<object_store::memory::InMemoryUpload as object_store::upload::MultipartUpload>::complete",
        ),
    ],
)
def test_rust_names_that_memray_took_for_cpp_are_read(symbol: str, name: str) -> None:
    assert readable(symbol) == name


@pytest.mark.skipif(native is None, reason="the extension is not built: rows are kept in Python")
@pytest.mark.parametrize("native_stacks", [True, False])
def test_the_rows_that_the_recorder_keeps_grow_in_no_span(native_stacks: bool, tmp_path: Path) -> None:
    array = raw_array(LocalStore(tmp_path), 1_009)
    with copytrace.session(native=native_stacks) as session:
        for _ in range(300):
            array[:] = np.ones(1_009, "u1")
    trace = session.trace
    blocks = trace.allocations
    assert trace.spans.nbytes > 64 << 10, "more rows than are held"
    assert int(blocks.size[blocks.span > 0].max()) < 20_000, "nothing else is that large"
    functions = {frame.function for stack in blocks.stacks for frame in stack}
    assert functions.isdisjoint({"append_to", "write_span", "write_seen"})
