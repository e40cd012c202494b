"""Two operations in flight at once: each copy on its own path with its own bytes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from zarr.storage import MemoryStore, ObjectStore, WrapperStore

import copytrace
from copytrace.model import COPY_KINDS
from copytrace.report import Report
from copytrace.transfers import _extension
from oracle.stores import is_chunk, raw_array

A, B = 300_007, 410_009
HOOKED = _extension()[0] is not None

bytes_of = {size: np.random.default_rng(size).integers(1, 255, size, dtype="u1") for size in (A, B)}


class Left(WrapperStore[Any]):
    """Copies what it is given once."""

    async def set(self, key: str, value: Any) -> None:
        if is_chunk(key):
            value = type(value).from_bytes(bytes(value.as_numpy_array()))
            await asyncio.sleep(0.01)
        await self._store.set(key, value)


class Right(WrapperStore[Any]):
    """Copies what it is given twice."""

    async def set(self, key: str, value: Any) -> None:
        if is_chunk(key):
            once = bytearray(value.as_numpy_array())
            await asyncio.sleep(0.01)
            value = type(value).from_bytes(bytes(once))
        await self._store.set(key, value)


def user_copies(report: Report) -> dict[str, tuple[int, int]]:
    """Path's store -> payload, bytes copied by the user's store."""
    return {
        path.store: (
            path.payload_bytes,
            sum(step.bytes for step in path.steps if step.kind in COPY_KINDS and step.layer == "user"),
        )
        for path in report.paths
    }


EXPECTED = {"Left(MemoryStore)": (A, A), "Right(MemoryStore)": (B, 2 * B)}


def two_arrays() -> tuple[Any, Any]:
    return raw_array(Left(MemoryStore()), A), raw_array(Right(MemoryStore()), B)


@pytest.fixture(params=[True, False], ids=["hook", "no hook"])
def transfers(request: pytest.FixtureRequest) -> bool:
    if request.param and not HOOKED:
        pytest.skip("needs the native hook")
    return bool(request.param)


def test_two_writes_on_one_event_loop(transfers: bool) -> None:
    left, right = two_arrays()

    async def both() -> None:
        await asyncio.gather(
            left.async_array.setitem(slice(None), bytes_of[A]), right.async_array.setitem(slice(None), bytes_of[B])
        )

    with copytrace.session(transfers=transfers) as session:
        asyncio.run(both())
    assert user_copies(session.report) == EXPECTED
    assert session.report.coverage.unattributed_bytes == 0


def test_two_reads_on_one_event_loop(transfers: bool) -> None:
    left, right = two_arrays()
    left[:], right[:] = bytes_of[A], bytes_of[B]

    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(left.async_array.getitem(slice(None)), right.async_array.getitem(slice(None)))

    with copytrace.session(transfers=transfers) as session:
        found = asyncio.run(both())
    assert np.array_equal(found[0], bytes_of[A])
    assert np.array_equal(found[1], bytes_of[B])
    assert {path.store: (path.payload_bytes, path.copied_bytes) for path in session.report.paths} == {
        "Left(MemoryStore)": (A, A),
        "Right(MemoryStore)": (B, B),
    }


def test_two_writes_on_threads_that_were_running_before(transfers: bool) -> None:
    left, right = two_arrays()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: threading.Barrier(1).wait(), range(2)))
        start = threading.Barrier(2)

        def write(array: Any, size: int) -> None:
            start.wait()
            array[:] = bytes_of[size]

        with copytrace.session(transfers=transfers) as session:
            list(pool.map(write, (left, right), (A, B)))
    assert user_copies(session.report) == EXPECTED


def test_many_operations_of_two_kinds_on_four_threads(transfers: bool) -> None:
    arrays = [(array, size) for _ in range(2) for array, size in zip(two_arrays(), (A, B), strict=True)]

    def write(array: Any, size: int) -> None:
        for _ in range(5):
            array[:] = bytes_of[size]

    with copytrace.session(transfers=transfers) as session:
        threads = [threading.Thread(target=write, args=each) for each in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wanted = {store: (10 * payload, 10 * copied) for store, (payload, copied) in EXPECTED.items()}
    assert user_copies(session.report) == wanted
    assert {path.store: path.operations for path in session.report.paths} == dict.fromkeys(wanted, 10)


def test_two_operations_named_by_hand_on_two_threads() -> None:
    """The interpreter changes threads in the middle: each block and each move still belongs to its own."""
    results: dict[str, list[bytes]] = {"left": [], "right": []}

    def work(name: str, size: int) -> None:
        with copytrace.operation(name, payload_bytes=size):
            view = memoryview(bytes_of[size])
            for _ in range(20):
                results[name].append(bytes(view))

    with copytrace.session() as session:
        threads = [threading.Thread(target=work, args=each) for each in (("left", A), ("right", B))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {path.api: (path.copied_bytes, path.steps[0].count) for path in session.report.paths} == {
        "left": (20 * A, 20),
        "right": (20 * B, 20),
    }
    assert all(len(path.steps) == 1 for path in session.report.paths)


def test_two_tasks_with_operations_named_by_hand() -> None:
    async def work(name: str, size: int) -> int:
        with copytrace.operation(name, payload_bytes=size):
            await asyncio.sleep(0)
            array = raw_array(Left(MemoryStore()), size)
            await array.async_array.setitem(slice(None), bytes_of[size])
            return size

    async def both() -> None:
        await asyncio.gather(work("left", A), work("right", B))

    with copytrace.session() as session:
        asyncio.run(both())
    told = {path.api: sum(s.bytes for s in path.steps if s.layer == "user") for path in session.report.paths}
    assert told == {"left": A, "right": B}


# --- native threads ------------------------------------------------------------------------------------------------


LARGE = (12_000_007, 17_000_023)
PARTS = version("obstore") == "0.11.0"


@pytest.mark.skipif(not HOOKED, reason="needs the native hook")
def test_two_uploads_by_native_threads_at_once(tmp_path: Path) -> None:
    """Nothing but the buffers tells whose a move of a tokio thread is."""
    data = [np.random.default_rng(size).integers(1, 255, size, dtype="u1") for size in LARGE]
    stores = [
        ObjectStore(obstore.store.LocalStore(tmp_path / "left", mkdir=True)),
        ObjectStore(obstore.store.MemoryStore()),
    ]
    arrays = [raw_array(store, len(each)) for store, each in zip(stores, data, strict=True)]

    async def write() -> None:
        await asyncio.gather(
            *(array.async_array.setitem(slice(None), each) for array, each in zip(arrays, data, strict=True))
        )

    async def read() -> list[Any]:
        return await asyncio.gather(*(array.async_array.getitem(slice(None)) for array in arrays))

    with copytrace.session() as session:
        asyncio.run(write())
        found = asyncio.run(read())
    assert all(np.array_equal(one, each) for one, each in zip(found, data, strict=True))
    told = {(path.direction, path.store): path for path in session.report.paths}
    assert {key: path.payload_bytes for key, path in told.items()} == {
        (direction, store): size
        for direction in ("write", "read")
        for store, size in zip(("ObjectStore(LocalStore)", "ObjectStore(MemoryStore)"), LARGE, strict=True)
    }
    local, memory = told["write", "ObjectStore(LocalStore)"], told["write", "ObjectStore(MemoryStore)"]
    assert (local.copies, memory.copies) == ((2.0, 3.0) if PARTS else (0.0, memory.copies))
    assert (local.flushed_bytes, memory.flushed_bytes) == (LARGE[0], 0)
    for path in session.report.paths:
        assert path.direction == "write" or [
            (step.kind, step.bytes) for step in path.steps if step.kind == "scatter"
        ] == [("scatter", path.payload_bytes)]
        assert path.direction == "write" or path.copies == 1.0
    assert told["read", "ObjectStore(LocalStore)"].fetched_bytes == LARGE[0]


@pytest.mark.skipif(not HOOKED, reason="needs the native hook")
def test_two_calls_of_obstore_at_once_from_two_threads(tmp_path: Path) -> None:
    stores = [obstore.store.LocalStore(tmp_path / name, mkdir=True) for name in ("left", "right")]
    blobs = [bytes(bytes_of[size]) for size in (A, B)]
    for store, blob in zip(stores, blobs, strict=True):
        obstore.put(store, "blob", blob)

    def read(index: int) -> bytes:
        with copytrace.operation(("left", "right")[index], payload_bytes=(A, B)[index]):
            return bytes(obstore.get_range(stores[index], "blob", start=0, end=(A, B)[index]))

    with copytrace.session() as session, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, range(2))) == blobs
    for path in session.report.paths:
        assert path.payload_bytes == {"left": A, "right": B}[path.api]
        assert path.fetched_bytes == path.payload_bytes
        assert [(step.kind, step.bytes, step.layer) for step in path.steps if step.kind in COPY_KINDS] == [
            ("copy", path.payload_bytes, "user")
        ]


@pytest.mark.parametrize("extension", [True, False], ids=["extension", "no extension"])
def test_captures_that_change_while_threads_copy(
    extension: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's own tracker, opened again and again: every block that was recorded is in the span that made it."""
    memray = pytest.importorskip("memray", reason="memray is not installed")
    if not extension:
        monkeypatch.setenv("COPYTRACE_NO_EXTENSION", "1")
    done = threading.Event()
    copied = dict.fromkeys(range(3), 0)

    def work(number: int) -> None:
        source = bytes_of[A][number:].tobytes()
        while not done.is_set():
            with copytrace.operation("work", payload_bytes=len(source)):
                bytearray(source)
            copied[number] += 1

    def wait_for_some() -> int:
        """How many operations have begun and ended meanwhile, several of each thread."""
        before = dict(copied)
        while any(copied[number] < before[number] + 9 for number in copied):
            assert all(thread.is_alive() for thread in threads)
            done.wait(0.001)
        return sum(copied.values()) - sum(before.values()) - len(threads)

    threads = [threading.Thread(target=work, args=(number,)) for number in copied]
    changes, whole = 10, 0
    with copytrace.session(native=False) as session:
        for thread in threads:
            thread.start()
        try:
            for number in range(changes // 2):
                with memray.Tracker(tmp_path / f"{number}.bin"):
                    whole += wait_for_some()
                whole += wait_for_some()
        finally:
            done.set()
            for thread in threads:
                thread.join()
    trace = session.trace
    payloads = {int(row["id"]): int(row["payload"]) for row in trace.spans if row["payload"]}
    operation_of = {int(row["id"]): int(row["parent"] or row["id"]) for row in trace.spans}
    assert len(payloads) == sum(copied.values())
    blocks = trace.allocations
    rows = np.flatnonzero((blocks.size >= A - 2) & (blocks.size <= A + 1) & np.isin(blocks.span, list(operation_of)))
    rows = rows[[operation_of[span] in payloads for span in blocks.span[rows].tolist()]]
    made = [payloads.pop(operation_of[span]) for span in blocks.span[rows].tolist()]
    assert [payload + 1 for payload in made] == blocks.size[rows].tolist(), "one each, of its own thread's size"
    assert len(made) >= whole
    (note,) = [note for note in session.report.coverage.notes if "one memray capture ended" in note] or ["0"]
    assert 2 * len(payloads) <= int(note.split()[0]) + 2 * len(threads) * changes, "two marks each, or cut by a change"
    if HOOKED and extension:
        (path,) = session.report.paths
        assert path.copied_bytes == path.payload_bytes
