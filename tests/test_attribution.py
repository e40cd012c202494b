"""The flow graph of traces written by hand: exact bytes, kinds, layers, roles and evidence."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

import reportdata
from copytrace import paths
from copytrace.attribution import attribute
from copytrace.model import DESTINATION, INPUT, OUTPUT, Frame, Path, SiteInfo, Step
from copytrace.naming import by_stack
from handmade import MAIN, Story

READ = SiteInfo("zarr.core.array.Array.__getitem__", "zarr", "operation", "read")
WRITE = SiteInfo("zarr.core.array.Array.__setitem__", "zarr", "operation", "write")
GET = SiteInfo("zarr.storage._local.LocalStore.get", "zarr", "request", "read")
SET = SiteInfo("zarr.storage._local.LocalStore.set", "zarr", "request", "write")
SCATTER = SiteInfo("zarr.core.buffer.cpu.NDBuffer.__setitem__", "zarr", "scatter", primitive="ndarray.__setitem__")
TO_BYTES = SiteInfo("zarr.core.buffer.core.Buffer.to_bytes", "zarr", "copy", primitive="ndarray.tobytes")
ENCODE = SiteInfo("numcodecs.zstd.Zstd.encode", "numcodecs", "encode")
DECODE = SiteInfo("numcodecs.zstd.Zstd.decode", "numcodecs", "decode")
JOIN = SiteInfo("zarr.core.buffer.cpu.Buffer.combine", "zarr", "join")

NUMPY = Frame("_aligned_contig_to_contig", "_multiarray_umath.cpython-312-x86_64-linux-gnu.so", 0, native=True)
PYTHON = Frame("PyBytes_FromStringAndSize", "libpython3.12.so.1.0", 0, native=True)
LIBZSTD = Frame("ZSTD_decompressBlock", "zstd.cpython-312-x86_64-linux-gnu.so", 0, native=True)
OBSTORE = Frame("_obstore::put::put_multipart_inner", "_obstore.abi3.so", 0, native=True, layer="obstore")
EMPTY = Frame("zarr.core.buffer.cpu.NDBuffer.empty", "zarr/core/buffer/cpu.py", 166, layer="zarr.buffer")
READ_BYTES = Frame("pathlib.Path.read_bytes", "pathlib.py", 1029)
LOCAL_GET = Frame("zarr.storage._local._get", "zarr/storage/_local.py", 30, layer="zarr.storage")
TO_BYTES_FRAME = Frame("zarr.core.buffer.core.Buffer.to_bytes", "zarr/core/buffer/core.py", 291, layer="zarr.buffer")
FSSPEC_SET = Frame("zarr.storage._fsspec.FsspecStore.set", "zarr/storage/_fsspec.py", 300, layer="zarr.storage")
FLAKY_SET = Frame("flaky.Flaky.set", "flaky.py", 12, layer="user")

SIZE = 1_000_003
SOURCE, BLOCK, RESULT, OTHER = 0x10_0000_0000, 0x20_0000_0000, 0x30_0000_0000, 0x40_0000_0000


def only_path(story: Story) -> Path:
    report = attribute(story.trace())
    assert len(report.paths) == 1
    return report.paths[0]


def copies(path: Path) -> list[Step]:
    return [step for step in path.steps if step.kind not in ("fetch", "flush")]


def raw_read(story: Story, *, block: int = BLOCK, with_move: bool = True) -> None:
    """A read: the file into a block, the block scattered into the result."""
    operation = story.enter(READ, payload=SIZE, api="zarr.Array", store="LocalStore", codecs=("bytes",))
    result = story.allocate(RESULT, SIZE, EMPTY)
    request = story.enter(GET, key="c/0")
    fetched = story.allocate(block, SIZE + 33, READ_BYTES, LOCAL_GET)
    if with_move:
        story.move("fetch", 5, block + 32, SIZE, PYTHON)
    story.see(request, OUTPUT, block + 32, SIZE)
    story.leave(request)
    scatter = story.enter(SCATTER)
    story.see(scatter, INPUT, block + 32, SIZE)
    story.see(scatter, DESTINATION, RESULT, SIZE)
    if with_move:
        story.move("copy", block + 32, RESULT, SIZE, NUMPY)
    story.leave(scatter)
    story.free(fetched)
    story.see(operation, OUTPUT, RESULT, SIZE)
    story.leave(operation)
    story.free(result)


def test_an_empty_session_reports_nothing() -> None:
    report = attribute(Story().trace())
    assert report.paths == ()
    assert report.layers == ()
    assert report.coverage.unattributed_bytes == 0


def test_a_raw_read_is_one_fetch_and_one_scatter() -> None:
    story = Story()
    raw_read(story)
    path = only_path(story)
    assert path.label == "read . zarr.Array . LocalStore . bytes"
    assert [(s.kind, s.bytes, s.count, s.layer, s.evidence) for s in path.steps] == [
        ("fetch", SIZE, 1, "zarr.storage", "transfer"),
        ("scatter", SIZE, 1, "zarr.buffer", "transfer"),
    ]
    assert path.steps[0].site.function == "zarr.storage._local._get"
    assert path.steps[0].primitive == "pathlib.Path.read_bytes"
    assert path.steps[1].site.function == "zarr.core.buffer.cpu.NDBuffer.__setitem__"
    assert (path.copies, path.best_achievable, path.avoidable) == (1.0, 0, 1.0)
    assert path.extra_at_peak_bytes == SIZE + 33
    assert path.fetched_bytes == SIZE
    assert path.read_amplification == 1.0
    assert path.explained == 1.0
    roles = {buffer.id: buffer.role for buffer in path.buffers}
    assert roles[path.steps[0].destination or ""] == "extra"
    assert path.steps[1].source == path.steps[0].destination
    assert roles[path.steps[1].destination or ""] == "result"


def test_without_the_hook_the_same_read_says_the_same_with_weaker_evidence() -> None:
    story = Story(recorded=False)
    raw_read(story, with_move=False)
    path = only_path(story)
    assert [(s.kind, s.bytes, s.layer, s.evidence) for s in path.steps] == [
        ("fetch", SIZE, "zarr.storage", "call"),
        ("scatter", SIZE, "zarr.buffer", "call"),
    ]
    assert path.explained is None
    assert (path.copies, path.extra_at_peak_bytes) == (1.0, SIZE + 33)


def test_an_address_that_is_used_again_is_looked_up_at_the_moment_of_the_move() -> None:
    story = Story()
    for _ in range(3):
        raw_read(story)
    path = only_path(story)
    assert path.operations == 3
    assert [(s.kind, s.bytes, s.count) for s in path.steps] == [("fetch", 3 * SIZE, 3), ("scatter", 3 * SIZE, 3)]
    assert path.extra_at_peak_bytes == SIZE + 33
    assert path.extra_at_peak == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(("caller", "layer"), [(FSSPEC_SET, "zarr.storage"), (FLAKY_SET, "user")])
def test_to_bytes_is_the_order_of_its_caller(caller: Frame, layer: str) -> None:
    story = Story()
    operation = story.enter(WRITE, payload=SIZE, api="zarr.Array", store="FsspecStore", codecs=("bytes",))
    story.see(operation, INPUT, SOURCE, SIZE)
    request = story.enter(SET, key="c/0")
    copy = story.enter(TO_BYTES)
    story.see(copy, INPUT, SOURCE, SIZE)
    block = story.allocate(BLOCK, SIZE + 33, PYTHON, TO_BYTES_FRAME, caller)
    story.move("copy", SOURCE, BLOCK + 32, SIZE, PYTHON)
    story.see(copy, OUTPUT, BLOCK + 32, SIZE)
    story.leave(copy)
    story.move("flush", BLOCK + 32, 4, SIZE, PYTHON)
    story.leave(request)
    story.free(block)
    story.leave(operation)
    path = only_path(story)
    (step,) = copies(path)
    assert (step.kind, step.bytes, step.layer, step.evidence) == ("copy", SIZE, layer, "transfer")
    assert (step.site.function, step.site.line) == ("zarr.core.buffer.core.Buffer.to_bytes", 291)
    assert caller.function in [site.function for site in step.called_from]
    assert path.flushed_bytes == SIZE
    assert path.copies == 1.0


def test_an_output_that_shares_its_input_is_a_view() -> None:
    story = Story()
    operation = story.enter(WRITE, payload=SIZE, api="zarr.Array", store="LocalStore", codecs=("bytes",))
    story.see(operation, INPUT, SOURCE, SIZE)
    copy = story.enter(TO_BYTES)
    story.see(copy, INPUT, SOURCE, SIZE)
    story.see(copy, OUTPUT, SOURCE + 16, SIZE - 16)
    story.leave(copy)
    story.leave(operation)
    assert copies(only_path(story)) == []


def test_moves_inside_a_codec_belong_to_it_and_a_trim_by_the_interpreter_is_a_copy_of_its_own() -> None:
    half = SIZE // 2
    story = Story()
    encode = story.enter(ENCODE, codec="zstd")
    story.see(encode, INPUT, SOURCE, SIZE)
    bound = story.allocate(BLOCK, SIZE + 4096, PYTHON)
    story.move("copy", SOURCE, BLOCK, half, LIBZSTD)
    story.allocate(OTHER, half, PYTHON)
    story.move("copy", BLOCK, OTHER, half, PYTHON)
    story.free(bound)
    story.see(encode, OUTPUT, OTHER, half)
    story.leave(encode)
    path = only_path(story)
    assert path.direction == "encode"
    assert path.codecs == ("zstd",)
    assert sorted((s.kind, s.bytes, s.project) for s in path.steps) == [
        ("copy", half, "numcodecs"),
        ("encode", half, "numcodecs"),
    ]
    assert path.avoidable == pytest.approx(half / SIZE, abs=1e-6)


def test_a_trim_that_is_the_same_object_is_no_copy() -> None:
    story = Story()
    encode = story.enter(ENCODE)
    story.see(encode, INPUT, SOURCE, SIZE)
    story.allocate(BLOCK, SIZE + 4096, PYTHON)
    story.move("copy", SOURCE, BLOCK, SIZE, LIBZSTD)
    story.see(encode, OUTPUT, BLOCK, SIZE)
    story.leave(encode)
    assert [(s.kind, s.bytes) for s in copies(only_path(story))] == [("encode", SIZE)]


def test_native_threads_belong_to_the_operation_whose_buffers_they_touch() -> None:
    """Two writes at once: each part goes from one source through two families of scratch blocks."""
    story = Story()
    worker, parts = 900, 4
    part = 5_242_880
    first = story.enter(
        WRITE, thread=1, payload=parts * part, api="zarr.Array", store="ObjectStore(LocalStore)", codecs=("bytes",)
    )
    story.see(first, INPUT, SOURCE, parts * part)
    second = story.enter(
        WRITE, thread=2, payload=parts * part, api="zarr.Array", store="ObjectStore(S3Store)", codecs=("bytes",)
    )
    story.see(second, INPUT, OTHER, parts * part)
    for source in (SOURCE, OTHER):
        for index in range(parts):
            one = story.allocate(BLOCK, part, OBSTORE, thread=worker)
            two = story.allocate(RESULT, part, OBSTORE, thread=worker)
            story.move("copy", source + index * part, BLOCK, part, OBSTORE, thread=worker)
            story.move("copy", BLOCK, RESULT, part, OBSTORE, thread=worker)
            story.move("flush", RESULT, 9, part, OBSTORE, thread=worker)
            story.free(one)
            story.free(two)
            story._mark(MAIN)
    story.leave(first, thread=1)
    story.leave(second, thread=2)
    report = attribute(story.trace())
    assert [path.store for path in report.paths] == ["ObjectStore(LocalStore)", "ObjectStore(S3Store)"]
    for path in report.paths:
        assert path.copies == 2.0
        assert {step.layer for step in copies(path)} == {"obstore"}
        assert {step.site.function for step in copies(path)} == {"_obstore::put::put_multipart_inner"}
        assert path.flushed_bytes == parts * part
        assert path.extra_at_peak_bytes == 2 * part


def test_a_realloc_that_moves_is_a_copy_and_one_that_does_not_is_the_same_buffer() -> None:
    story = Story()
    operation = story.enter(SiteInfo("copytrace.operation", "", "operation"), payload=SIZE, label="ingest")
    story.see(operation, INPUT, SOURCE, SIZE)
    row = story.allocate(BLOCK, SIZE, FLAKY_SET)
    story.move("copy", SOURCE, BLOCK, SIZE, PYTHON)
    story.free(row)
    row = story.allocate(BLOCK, SIZE - 1, FLAKY_SET, previous=row)
    story.free(row)
    row = story.allocate(OTHER, 2 * SIZE, FLAKY_SET, previous=row, moved=True)
    story.leave(operation)
    path = only_path(story)
    assert path.label == "ingest"
    assert sorted((s.bytes, s.primitive, s.layer) for s in copies(path)) == [
        (SIZE - 1, "realloc", "user"),
        (SIZE, "PyBytes_FromStringAndSize", "user"),
    ]
    assert [buffer.pieces for buffer in path.buffers if buffer.role == "extra"] == [2]


def test_metadata_is_on_no_path() -> None:
    story = Story()
    request = story.enter(GET, key="a/zarr.json", store="LocalStore")
    story.allocate(BLOCK, 5000, READ_BYTES, LOCAL_GET)
    story.move("fetch", 5, BLOCK, 4999, PYTHON)
    story.see(request, OUTPUT, BLOCK, 4999)
    story.leave(request)
    assert attribute(story.trace()).paths == ()


def test_what_leads_nowhere_near_the_payload_is_left_off_the_path_and_counted() -> None:
    story = Story()
    operation = story.enter(READ, payload=SIZE, api="zarr.Array", store="LocalStore", codecs=("bytes",))
    story.allocate(BLOCK, 9000, Frame("json.loads", "json/__init__.py", 1))
    story.allocate(OTHER, 9000, Frame("json.loads", "json/__init__.py", 1))
    story.move("copy", BLOCK, OTHER, 8192, PYTHON)
    story.leave(operation)
    report = attribute(story.trace())
    assert copies(report.paths[0]) == []
    assert (report.coverage.off_path_bytes, report.coverage.off_path_moves) == (8192, 1)


def test_zero_payload_has_no_ratio() -> None:
    story = Story()
    story.leave(story.enter(READ, api="zarr.Array", store="LocalStore", codecs=("bytes",)))
    path = only_path(story)
    assert (path.copies, path.extra_at_peak, path.avoidable, path.read_amplification) == (None, None, None, None)


def test_a_nested_mover_is_counted_once() -> None:
    inner = SiteInfo("ndarray.tobytes", "numpy", "copy", primitive="ndarray.tobytes")
    story = Story()
    operation = story.enter(WRITE, payload=SIZE, api="zarr.Array", store="FsspecStore", codecs=("bytes",))
    outer = story.enter(TO_BYTES)
    story.see(outer, INPUT, SOURCE, SIZE)
    nested = story.enter(inner, caller="zarr.core.buffer.core.Buffer.to_bytes")
    story.see(nested, INPUT, SOURCE, SIZE)
    story.allocate(BLOCK, SIZE + 33, PYTHON, TO_BYTES_FRAME, FSSPEC_SET)
    story.move("copy", SOURCE, BLOCK + 32, SIZE, PYTHON)
    story.see(nested, OUTPUT, BLOCK + 32, SIZE)
    story.leave(nested)
    story.see(outer, OUTPUT, BLOCK + 32, SIZE)
    story.leave(outer)
    story.leave(operation)
    assert [(s.kind, s.bytes) for s in copies(only_path(story))] == [("copy", SIZE)]


@pytest.mark.parametrize(("nbytes", "paths"), [(0, 0), (1, 1)])
def test_a_codec_that_was_called_with_nothing_is_no_path(nbytes: int, paths: int) -> None:
    story = Story()
    alone = story.enter(ENCODE)
    story.see(alone, INPUT, SOURCE, nbytes)
    story.see(alone, OUTPUT, BLOCK, 1)
    story.leave(alone)
    assert len(attribute(story.trace()).paths) == paths


def test_a_join_counts_its_pieces() -> None:
    story = Story()
    operation = story.enter(WRITE, payload=SIZE, api="zarr.Array", store="LocalStore", codecs=("sharding(bytes)",))
    story.see(operation, INPUT, SOURCE, SIZE)
    join = story.enter(JOIN)
    piece = SIZE // 4
    for index in range(4):
        story.see(join, INPUT, SOURCE + index * piece, piece)
    story.allocate(
        BLOCK,
        4 * piece,
        Frame("zarr.core.buffer.cpu.Buffer.combine", "zarr/core/buffer/cpu.py", 116, layer="zarr.buffer"),
    )
    for index in range(4):
        story.move("copy", SOURCE + index * piece, BLOCK + index * piece, piece, NUMPY)
    story.see(join, OUTPUT, BLOCK, 4 * piece)
    story.leave(join)
    story.leave(operation)
    (step,) = copies(only_path(story))
    assert (step.kind, step.count, step.bytes, step.evidence) == ("join", 4, 4 * piece, "transfer")


LOOP = 91
SOCKET = Frame("sock_recv", "_socket.cpython-312-x86_64-linux-gnu.so", 0, native=True)
READY = Frame("asyncio.selector_events._SelectorSocketTransport._read_ready", "asyncio/selector_events.py", 1003)
DATA_RECEIVED = Frame(
    "aiohttp.client_proto.ResponseHandler.data_received", "aiohttp/client_proto.py", 300, False, "aiohttp"
)
STREAM_READ = Frame("aiohttp.streams.StreamReader.read", "aiohttp/streams.py", 452, layer="aiohttp")
BODY_READ = Frame("aiobotocore.response.AioStreamingBody.read", "aiobotocore/response.py", 143, layer="botocore")
STREAM_WRITE = Frame("aiohttp.payload.BytesIOPayload.write_with_length", "aiohttp/payload.py", 894, layer="aiohttp")
BYTES_JOIN = SiteInfo("bytes.join", "python", "join", primitive="bytes.join")
BYTESIO_READ = SiteInfo("BytesIO.read", "python", "copy", primitive="BytesIO.read")


def _called_by(frame: Frame) -> dict[str, object]:
    return {"caller": frame.function, "file": frame.file, "line": frame.line, "layer": frame.layer}


def test_pieces_that_an_event_loop_received_are_followed_from_the_join_back_to_the_socket() -> None:
    story, piece = Story(), 65_537
    operation = story.enter(READ, payload=3 * piece, api="zarr.Array", store="FsspecStore", codecs=("bytes",))
    held = []
    for number in range(3):
        received = story.allocate(OTHER, piece + 33, READY, thread=LOOP)
        story.move("fetch", 7, OTHER + 32, piece, SOCKET, thread=LOOP)
        part = BLOCK + number * (1 << 20)
        held.append(story.allocate(part, piece + 33, PYTHON, DATA_RECEIVED, READY, thread=LOOP))
        story.move("copy", OTHER + 32, part + 32, piece, PYTHON, thread=LOOP)
        story.free(received)
    join = story.enter(BYTES_JOIN, **_called_by(STREAM_READ))
    story.allocate(RESULT, 3 * piece + 33, PYTHON, STREAM_READ, BODY_READ)
    for number in range(3):
        story.move("copy", BLOCK + number * (1 << 20) + 32, RESULT + 32 + number * piece, piece, PYTHON)
    story.leave(join)
    for row in held:
        story.free(row)
    story.see(operation, OUTPUT, RESULT + 32, 3 * piece)
    story.leave(operation)
    path = only_path(story)
    assert [(s.kind, s.bytes, s.count, s.layer, s.site.function) for s in path.steps] == [
        ("fetch", 3 * piece, 3, "aiohttp", READY.function),
        ("copy", 3 * piece, 3, "aiohttp", DATA_RECEIVED.function),
        ("join", 3 * piece, 3, "aiohttp", STREAM_READ.function),
    ]
    assert path.steps[1].source == path.steps[0].destination
    assert path.steps[2].source == path.steps[1].destination
    assert [frame.function for frame in path.steps[2].called_from] == [BODY_READ.function]
    assert path.extra_at_peak_bytes == 3 * (piece + 33)


def test_a_body_read_in_pieces_has_its_source_and_what_the_loop_sends_of_it_is_flushed() -> None:
    story, piece = Story(), 65_537
    operation = story.enter(WRITE, payload=2 * piece, api="zarr.Array", store="FsspecStore", codecs=("bytes",))
    request = story.enter(SET, key="c/0")
    story.see(request, INPUT, SOURCE, 2 * piece)
    parts = []
    for number in range(2):
        reading = story.enter(BYTESIO_READ, **_called_by(STREAM_WRITE))
        part = BLOCK + number * (1 << 20)
        parts.append(story.allocate(part, piece + 33, PYTHON, STREAM_WRITE))
        story.move("copy", SOURCE + number * piece, part + 32, piece, PYTHON)
        story.leave(reading)
        story.move("flush", part + 32, 7, piece, SOCKET, thread=LOOP)
        story.free(parts[-1])
    story.leave(request)
    story.leave(operation)
    story.move("flush", SOURCE, 7, piece, SOCKET, thread=LOOP)
    path = only_path(story)
    assert [(s.kind, s.bytes, s.count, s.layer) for s in path.steps] == [
        ("copy", 2 * piece, 2, "aiohttp"),
        ("flush", 2 * piece, 2, "aiohttp"),
    ]
    assert {b.id: b.role for b in path.buffers}[path.steps[0].source or ""] == "source"
    assert path.steps[1].source == path.steps[0].destination


ZARRISTA_WRITE = SiteInfo("zarrista.Array.store_array_subset", "zarrista", "operation", "write")
ZARRISTA_READ = SiteInfo("zarrista.Array.retrieve_chunk", "zarrista", "operation", "read")
ZARRISTA = Frame("FilesystemStore::set", "_zarrista.abi3.so", 0, native=True, layer="zarrista")
LITERALS = Frame("ZSTD_decompressSequences_bmi2", "_zarrista.abi3.so", 0, native=True, layer="zarrista")
ENCODED_BY = Frame("zarrs::array::codec::zstd::ZstdCodec::encode", "", 0, native=True, layer="zarrs")
DECODED_BY = Frame("zarrs::array::codec::zstd::ZstdCodec::decode", "", 0, native=True, layer="zarrs")
FETCHED_BY = Frame("zarrs_filesystem::store::get_partial_many", "", 0, native=True)
WORKER = 501


def test_what_a_codec_in_native_code_filled_is_one_encode_of_the_bytes_that_left_it() -> None:
    story, encoded = Story(), 700_001
    operation = story.enter(
        ZARRISTA_WRITE, payload=SIZE, api="zarrista.Array", store="FilesystemStore", codecs=("bytes", "zstd")
    )
    story.see(operation, INPUT, SOURCE, SIZE)
    story.allocate(BLOCK, SIZE + 4096, ENCODED_BY, thread=WORKER)
    story.allocate(OTHER, 1_300_000, Frame("ZSTD_createCCtx", "", 0, native=True), thread=WORKER)
    for piece in range(3):
        story.move("copy", SOURCE + piece * 8192, OTHER + piece * 8192, 8192, LITERALS, thread=WORKER)
    story.move("flush", BLOCK, 7, encoded, ZARRISTA, thread=WORKER)
    story.leave(operation)
    path = only_path(story)
    assert [(s.kind, s.bytes, s.layer, s.site.function, s.evidence) for s in path.steps] == [
        ("encode", encoded, "zarrs", ENCODED_BY.function, "native"),
        ("flush", encoded, "zarrista", ZARRISTA.function, "transfer"),
    ]
    roles = {b.id: b.role for b in path.buffers}
    assert roles[path.steps[0].source or ""] == "source"
    assert path.steps[0].destination == path.steps[1].source
    assert (path.best_achievable, path.avoidable) == (1, 0.0)


def decode(story: Story, encoded: int, *, at: int = 0, thread: int = MAIN, pieces: int = 5) -> int:
    """A read that native code decodes, still open: fetched to ``BLOCK``, decoded to ``RESULT``, both moved by ``at``.
    The hook sees ``pieces`` of it move from one to the other.
    """
    operation = story.enter(
        ZARRISTA_READ, thread=thread, payload=SIZE, api="zarrista.Array", store="FilesystemStore", codecs=("zstd",)
    )
    story.allocate(BLOCK + at, encoded, FETCHED_BY, ZARRISTA, thread=WORKER)
    story.move("fetch", 7, BLOCK + at, encoded, ZARRISTA, thread=WORKER)
    story.allocate(RESULT + at, SIZE, DECODED_BY, thread=WORKER)
    for piece in range(pieces):
        source, into = BLOCK + at + piece * 8192, RESULT + at + piece * 8192
        story.move("copy", source, into, 8192, LITERALS, thread=WORKER)
    story.see(operation, OUTPUT, RESULT + at, SIZE)
    return operation


def test_a_decode_in_native_code_takes_the_place_of_what_was_seen_inside_it() -> None:
    story, encoded = Story(), 700_001
    story.leave(decode(story, encoded))
    path = only_path(story)
    assert [(s.kind, s.bytes, s.layer) for s in path.steps] == [
        ("fetch", encoded, "zarrista"),
        ("decode", SIZE, "zarrs"),
    ]
    assert path.steps[1].source == path.steps[0].destination
    assert path.copies == 1.0


def test_what_only_time_ties_to_a_read_is_of_no_read_where_two_are_open() -> None:
    story, encoded = Story(), 700_001
    first = decode(story, encoded, pieces=0)
    second = decode(story, encoded, at=1 << 30, thread=2, pieces=0)
    story.leave(first)
    story.leave(second, thread=2)
    story.leave(decode(story, encoded, at=2 << 30, pieces=0))
    path = only_path(story)
    assert [(s.kind, s.bytes, s.count) for s in path.steps] == [
        ("decode", 2 * SIZE, 2),
        ("fetch", encoded, 1),
        ("decode", SIZE, 1),
    ]


def test_each_of_many_reads_is_decoded_in_native_code_by_itself() -> None:
    story, encoded, reads = Story(), 700_001, 4000
    for number in range(reads):
        story.leave(decode(story, encoded, at=number << 30))
    began = time.process_time()
    path = only_path(story)
    assert time.process_time() - began < 15, "all blocks, edges and reads are looked through for each read"
    assert [(s.kind, s.bytes, s.count) for s in path.steps] == [
        ("fetch", reads * encoded, reads),
        ("decode", reads * SIZE, reads),
    ]


def test_without_compression_a_block_that_nothing_filled_is_no_decode() -> None:
    story = Story()
    operation = story.enter(
        ZARRISTA_READ, payload=SIZE, api="zarrista.Array", store="FilesystemStore", codecs=("bytes",)
    )
    story.allocate(BLOCK, SIZE, DECODED_BY, thread=WORKER)
    story.see(operation, OUTPUT, BLOCK, SIZE)
    story.leave(operation)
    assert only_path(story).steps == ()


def test_a_codec_that_a_scatter_calls_is_a_step_of_its_own() -> None:
    process = SiteInfo("zarr.core.Array._process_chunk", "zarr", "scatter", "read", primitive="ndarray.__setitem__")
    story, encoded = Story(), 700_001
    operation = story.enter(READ, payload=SIZE, api="zarr.Array", store="DirectoryStore", codecs=("zstd",))
    story.allocate(RESULT, SIZE, EMPTY)
    fetched = story.allocate(BLOCK, encoded, READ_BYTES, LOCAL_GET)
    story.move("fetch", 7, BLOCK, encoded, PYTHON)
    scatter = story.enter(process)
    story.see(scatter, INPUT, BLOCK, encoded)
    story.see(scatter, DESTINATION, RESULT, SIZE)
    decode = story.enter(DECODE)
    story.see(decode, INPUT, BLOCK, encoded)
    decoded = story.allocate(OTHER, SIZE, PYTHON)
    story.see(decode, OUTPUT, OTHER, SIZE)
    story.leave(decode)
    story.move("copy", OTHER, RESULT, SIZE, NUMPY)
    story.leave(scatter)
    story.free(fetched)
    story.free(decoded)
    story.see(operation, OUTPUT, RESULT, SIZE)
    story.leave(operation)
    path = only_path(story)
    assert [(s.kind, s.bytes, s.evidence) for s in path.steps] == [
        ("fetch", encoded, "transfer"),
        ("decode", SIZE, "pointer"),
        ("scatter", SIZE, "transfer"),
    ]
    assert path.steps[2].source == path.steps[1].destination
    assert path.copies == 2.0


def test_a_primitive_at_work_on_something_else_is_on_no_path() -> None:
    join = SiteInfo("bytes.join", "python", "join", primitive="bytes.join")
    story = Story()
    operation = story.enter(WRITE, payload=SIZE, api="zarr.Array", store="FsspecStore", codecs=("bytes",))
    story.see(operation, INPUT, SOURCE, SIZE)
    headers = story.enter(
        join, caller="aiohttp.http_writer.write_headers", file="aiohttp/http_writer.py", line=9, layer="aiohttp"
    )
    story.allocate(BLOCK, 9_033, PYTHON)
    story.move("copy", OTHER, BLOCK + 32, 9_000, PYTHON)
    story.leave(headers)
    story.move("flush", SOURCE, 4, SIZE, PYTHON)
    story.leave(operation)
    assert copies(only_path(story)) == []


def test_the_timeline_follows_what_the_largest_operation_holds() -> None:
    story = Story()
    raw_read(story)
    timeline = only_path(story).timeline
    assert timeline is not None
    assert timeline.payload_bytes == SIZE
    assert timeline.layers == ("zarr.storage",)
    assert timeline.live == ((SIZE + 33, 0),)
    begun, ended = timeline.milliseconds
    assert 0 <= begun < ended


def test_reads_one_after_another_hold_what_one_holds_and_a_store_in_memory_holds_all() -> None:
    story = Story()
    for number in range(4):
        operation = story.enter(WRITE, payload=SIZE, api="zarr.Array", store="MemoryStore", codecs=("bytes",))
        story.see(operation, INPUT, SOURCE, SIZE)
        copy = story.enter(SiteInfo("zarr.storage._memory._copy_buffer", "zarr", "copy"))
        story.see(copy, INPUT, SOURCE, SIZE)
        story.allocate(BLOCK + number * 0x1000_0000, SIZE, LOCAL_GET)
        story.see(copy, OUTPUT, BLOCK + number * 0x1000_0000, SIZE)
        story.leave(copy)
        story.leave(operation)
    path = only_path(story)
    assert (path.operations, path.extra_at_peak_bytes, path.extra_at_peak) == (4, 4 * SIZE, 1.0)
    assert (path.copies, path.avoidable) == (1.0, 0.0)
    assert [step.required for step in copies(path)] == [True]


def test_what_an_event_loop_does_for_its_neighbours_is_answered_for_by_them() -> None:
    story = Story()
    operation = story.enter(WRITE, payload=SIZE, api="zarr.Array", store="FsspecStore", codecs=("bytes",))
    request = story.enter(SET, key="c/0")
    story.see(request, INPUT, SOURCE, SIZE)
    story.allocate(BLOCK, SIZE + 33, PYTHON, STREAM_WRITE)
    story.move("copy", SOURCE, BLOCK + 32, SIZE, PYTHON)
    story.allocate(OTHER, SIZE + 33, PYTHON, READY, thread=LOOP)
    story.move("copy", BLOCK + 32, OTHER + 32, SIZE, PYTHON, thread=LOOP)
    story.move("flush", OTHER + 32, 7, SIZE, SOCKET, thread=LOOP)
    story.leave(request)
    story.leave(operation)
    path = only_path(story)
    assert [(s.kind, s.layer, s.project) for s in path.steps] == [
        ("copy", "aiohttp", "aiohttp"),
        ("copy", "aiohttp", "aiohttp"),
        ("flush", "aiohttp", "aiohttp"),
    ]
    assert path.steps[1].site.function == READY.function
    assert [b.layer for b in path.buffers if b.role == "extra"] == ["aiohttp", "aiohttp"]
    assert path.unattributed_bytes == 0


MODEL = Frame("botocore.loaders.JSONFileLoader.load_file", "botocore/loaders.py", 1, layer="botocore")
CONNECT = Frame("aiohttp.connector.TCPConnector.connect", "aiohttp/connector.py", 1, layer="aiohttp")
IMPORT = Frame("importlib._bootstrap._load", "<frozen importlib._bootstrap>", 1)
ARENA = 1 << 20


def _set_up_and_read(story: Story, store: str, *blocks: tuple[int, Frame], freed: bool = False) -> Path:
    request = story.enter(GET, key="zarr.json", store=store)
    rows = [
        story.allocate(OTHER + number * 4 * ARENA, size, *stack)
        for number, (size, *stack) in enumerate(blocks)  # type: ignore[misc]
    ]
    story.leave(request)
    for row in rows if freed else ():
        story.free(row)
    raw_read(story)
    return only_path(story)


def test_what_a_store_set_up_for_metadata_and_keeps_is_a_temporary_of_its_paths() -> None:
    path = _set_up_and_read(Story(), "LocalStore", *[(ARENA, MODEL)] * 2)
    assert path.extra_at_peak_bytes == SIZE + 33 + 2 * ARENA
    kept = [(b.layer, b.site.function, b.peak_bytes, b.pieces) for b in path.buffers if b.role == "temporary"]
    assert kept == [("botocore", MODEL.function, 2 * ARENA, 2)]
    assert path.copies == 1.0


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_client_set_up_outside_a_request_is_that_of_paths_that_call_it(inside: bool) -> None:
    story = Story()
    call = SiteInfo("s3fs.core.S3FileSystem._call_s3", "s3fs", "context")
    span = story.enter(call)
    story.allocate(OTHER, 2 * ARENA, MODEL)
    story.leave(span)
    operation = story.enter(READ, payload=SIZE, api="zarr.Array", store="FSStore", codecs=("bytes",))
    if inside:
        story.leave(story.enter(call))
    story.allocate(BLOCK, SIZE, CONNECT)
    story.leave(operation)
    assert only_path(story).extra_at_peak_bytes == SIZE + (2 * ARENA if inside else 0)


@pytest.mark.parametrize(
    ("store", "blocks", "freed"),
    [
        ("LocalStore", [(ARENA, MODEL), (ARENA, CONNECT)], False),  # an arena each
        ("LocalStore", [(3 * ARENA, MODEL, IMPORT)], False),
        ("LocalStore", [(3 * ARENA,)], False),  # nobody is named
        ("LocalStore", [(3 * ARENA, MODEL)], True),
        ("MemoryStore", [(3 * ARENA, MODEL)], False),
    ],
)
def test_nothing_else_from_before_an_operation_is(store: str, blocks: list[tuple[int, Frame]], freed: bool) -> None:
    path = _set_up_and_read(Story(), store, *blocks, freed=freed)
    assert path.extra_at_peak_bytes == SIZE + 33


def test_temporaries_of_one_function_are_added_up_before_they_are_compared() -> None:
    story = Story()
    operation = story.enter(READ, payload=100 * SIZE, api="zarr.Array", store="LocalStore", codecs=("bytes",))
    for number in range(300):
        story.allocate(OTHER + number * 0x1_0000, 5000, CONNECT)
    story.leave(operation)
    path = only_path(story)
    assert [(b.role, b.site.function, b.pieces, b.peak_bytes) for b in path.buffers] == [
        ("temporary", CONNECT.function, 300, 1_500_000)
    ]


TAKE = Frame("unix_mmap_prim_aligned", "", 0, native=True)
ARROW = Frame("arrow::BaseMemoryPoolImpl::Allocate", "", 0, native=True)
WRITE_STREAM = Frame("pyarrow.lib.NativeFile.write", "", 0, native=True, layer="pyarrow")


def test_a_pool_that_an_allocator_takes_is_said_and_not_held() -> None:
    story = Story()
    operation = story.enter(READ, payload=SIZE, api="zarr.Array", store="LocalStore", codecs=("bytes",))
    story.allocate(RESULT, SIZE, EMPTY)
    story.allocate(OTHER, 1 << 30, TAKE, ARROW, WRITE_STREAM)
    story.move("copy", OTHER, RESULT, SIZE, PYTHON)
    story.see(operation, OUTPUT, RESULT, SIZE)
    story.leave(operation)
    report = attribute(story.trace())
    (path,) = report.paths
    assert path.extra_at_peak_bytes == 0
    assert [(b.role, b.layer, b.peak_bytes) for b in path.buffers] == [
        ("extra", "pyarrow", 0),
        ("result", "zarr.buffer", SIZE),
    ]
    assert report.coverage.notes == (
        "pyarrow took 1,073.7 MB by mmap as a pool: what it holds there at peak is not known",
    )


def test_what_an_import_allocates_or_copies_is_on_no_path() -> None:
    story = Story()
    operation = story.enter(SiteInfo("copytrace.operation", "copytrace", "operation", "read"), payload=SIZE)
    story.allocate(OTHER, 8 * SIZE, MODEL, IMPORT)
    copy = story.enter(SiteInfo("bytes", "python", "copy", primitive="bytes"))
    story.see(copy, INPUT, OTHER, SIZE)
    story.allocate(BLOCK, SIZE + 33, PYTHON, MODEL, IMPORT)
    story.see(copy, OUTPUT, BLOCK + 32, SIZE)
    story.leave(copy)
    story.leave(operation)
    path = only_path(story)
    assert (path.steps, path.extra_at_peak_bytes) == ((), 0)
    assert [buffer for buffer in path.buffers if buffer.role == "temporary"] == []


def test_an_encode_of_some_chunks_that_stands_apart_is_needed_all_the_same() -> None:
    """One step of a function may fall in two, where the source of some chunks was not found."""
    whole, part = (_transform("encode", "numcodecs.zstd.Zstd.encode", nbytes) for nbytes in (7_000_000, 500_000))
    assert _judgement([whole, part], ("bytes", "zstd")) == ([0, 0], 1)
    again = _transform("encode", "numcodecs.blosc.Blosc.encode", 7_500_000)
    assert _judgement([whole, again], ("bytes", "zstd", "blosc")) == ([0, 7_500_000], 1)


def test_the_checksum_of_a_shards_index_is_not_what_a_path_cannot_do_without() -> None:
    checksum, joined = _transform("encode", "Crc32cCodec._encode_sync", 260), _transform("join", "combine", 8_000_000)
    assert _judgement([checksum, joined], ("sharding(bytes)",)) == ([0, 8_000_000], 0)
    encoded = _transform("encode", "numcodecs.zstd.Zstd.encode", 80_000)
    assert _judgement([checksum, encoded], ("sharding(bytes+zstd)",)) == ([0, 0], 1)
    converted = _transform("convert", "ndarray.astype", 8_000_000)
    assert _judgement([checksum, converted], ("sharding(bytes)",)) == ([0, 0], 1)


def _transform(kind: str, function: str, nbytes: int) -> Step:
    return reportdata.step(kind, "b1", "b2", "numcodecs", reportdata.site(function), nbytes, 8_000_000)


def _judgement(steps: list[Step], codecs: tuple[str, ...]) -> tuple[list[int], int]:
    operation = cast(Any, SimpleNamespace(codecs=codecs, direction="read", store="LocalStore"))
    judged, best = paths._judge(steps, operation)
    return [step.avoidable_bytes for step in judged], best


C_LIBRARY, RUST_LIBRARY = "zstd.cpython-312-x86_64-linux-gnu.so", "_zarrista.abi3.so"
RUST_ENCODE = Frame("zarrs_codec::zstd::encode", RUST_LIBRARY, 0, native=True, layer="zarrs")


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        (
            [
                Frame("ZSTD_resetCCtx_internal", C_LIBRARY, 0, native=True, layer="numcodecs"),
                Frame("numcodecs.zstd.compress", C_LIBRARY, 0, native=True, layer="numcodecs"),
            ],
            ("numcodecs", "numcodecs.zstd.compress"),
        ),
        (
            [
                Frame("alloc::raw_vec::RawVecInner::try_allocate_in", RUST_LIBRARY, 0, native=True, layer="zarrista"),
                RUST_ENCODE,
            ],
            ("zarrs", "zarrs_codec::zstd::encode"),
        ),
        (
            [
                Frame("H5D__chunk_lock", "libhdf5-90e.so", 0, native=True, layer="hdf5"),
                Frame("h5py.h5d.DatasetID.write", "h5d.so", 0, native=True, layer="h5py"),
            ],
            ("hdf5", "H5D__chunk_lock"),
        ),
        (
            [
                Frame("compress_block", "plain.so", 0, native=True, layer="plain"),
                Frame("plain.api.save", "plain/api.py", 3, layer="plain"),
            ],
            ("plain", "compress_block"),
        ),
    ],
    ids=["bundled C", "a runtime's generic code", "another library's C", "C called from Python"],
)
def test_who_works_on_a_native_stack(stack: list[Frame], told: tuple[str, str]) -> None:
    name = by_stack(stack)
    assert name is not None
    assert (name.layer, name.frame.function) == told
