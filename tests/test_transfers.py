"""What the recorder writes of moves that are known beforehand."""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import movers
from copytrace.errors import CopytraceError
from copytrace.transfers import Recording, read
from movers import CALLS, COPIES, FETCHES, FLUSHES, LINKAGES, VECTORS, Memory, Step, copy, nothing_recorded, record  # noqa: F401

pytest.importorskip("copytrace._transfers", reason="the native hook is not installed")

BLOCK = 1 << 16


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 20)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("call", COPIES)
def test_a_copy_is_one_row_with_its_ends_and_its_caller(
    tmp_path: Path, memory: Memory, linkage: str, call: str
) -> None:
    step = copy(memory.source + 3, memory.destination + 5, 8191, call)
    found = record(tmp_path, lambda: movers.run([step], linkage))
    name = "hidden_copy" if call == "hidden" else f"moves_{call}"
    thread = threading.get_ident()
    assert found.moves == [(thread, "copy", memory.source + 3, memory.destination + 5, 8191, name)]
    assert memory.right[5 : 5 + 8191].tolist() == memory.left[3 : 3 + 8191].tolist()
    assert (found.small, found.lost) == (Counter(), 0)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("call", FETCHES)
def test_a_fetch_names_its_descriptor_and_each_piece_that_was_filled(
    tmp_path: Path, memory: Memory, linkage: str, call: str
) -> None:
    with Channel(call) as channel:
        channel.fill(10_007)
        step = Step(CALLS.index(call), channel.reader, None, memory.destination, 20_000, 7 if call in VECTORS else 1)
        made: list[movers.Program] = []
        found = record(tmp_path / "spool", lambda: made.append(movers.run([step], linkage)))
        assert made[0].steps[0].result == 10_007
        wanted = movers.all_expected(made[0])
        assert len(wanted) == (4 if call in VECTORS else 1)
        assert sum(move.nbytes for move in wanted) == 10_007
        assert found.moves == wanted


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("call", FLUSHES)
def test_a_flush_names_its_descriptor_and_each_piece_that_was_taken(
    tmp_path: Path, memory: Memory, linkage: str, call: str
) -> None:
    with Channel(call) as channel:
        step = Step(CALLS.index(call), channel.writer, memory.source, None, 9_999, 5 if call in VECTORS else 1)
        made: list[movers.Program] = []
        found = record(tmp_path / "spool", lambda: made.append(movers.run([step], linkage)))
        assert made[0].steps[0].result == 9_999
        assert len(found.moves) == (5 if call in VECTORS else 1)
        assert found.moves == movers.all_expected(made[0])
        assert channel.drain(9_999) == memory.left[:9_999].tobytes()


@pytest.mark.parametrize("linkage", LINKAGES)
def test_a_stream_fetches_and_flushes_what_libc_passes_by_itself(tmp_path: Path, memory: Memory, linkage: str) -> None:
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with tempfile.TemporaryFile(buffering=0) as file:
        descriptor = os.dup(file.fileno())
        stream = libc.fdopen(descriptor, b"r+")
        steps = [
            Step(CALLS.index("fwrite"), -1, memory.source, None, 100_003, offset=stream),
            Step(CALLS.index("fwrite"), -1, memory.source, None, 0, offset=stream),
        ]
        found = record(tmp_path / "flush", lambda: movers.run(steps, linkage), min_bytes=4096)
        thread = threading.get_ident()
        assert found.moves == [(thread, "flush", memory.source, descriptor, 100_003, "moves_fwrite")]
        libc.rewind(ctypes.c_void_p(stream))
        step = Step(CALLS.index("fread"), -1, None, memory.destination, 200_000, offset=stream)
        found = record(tmp_path / "fetch", lambda: movers.run([step], linkage), min_bytes=4096)
        assert found.moves == [(thread, "fetch", descriptor, memory.destination, 100_003, "moves_fread")]
        libc.fclose(ctypes.c_void_p(stream))
    assert memory.right[:100_003].tolist() == memory.left[:100_003].tolist()


class Channel:
    """Something that ``call`` can read from and write to: a socket pair for the socket calls, else a file."""

    def __init__(self, call: str) -> None:
        self.sockets = socket.socketpair() if call.startswith(("recv", "send")) else None
        if self.sockets:
            for end in self.sockets:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            self.reader, self.writer = (end.fileno() for end in self.sockets)
        else:
            self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            self.reader = self.writer = self.file.fileno()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.sockets or (self.file,):
            end.close()

    def fill(self, size: int) -> None:
        os.write(self.writer, bytes(size))
        if not self.sockets:
            os.lseek(self.reader, 0, os.SEEK_SET)

    def drain(self, size: int) -> bytes:
        return self.sockets[0].recv(size, socket.MSG_WAITALL) if self.sockets else os.pread(self.reader, size, 0)


def test_nothing_is_kept_of_what_moves_nothing(tmp_path: Path, memory: Memory) -> None:
    with tempfile.TemporaryFile() as empty:
        steps = [
            copy(memory.source, memory.destination, 0),
            copy(memory.source, memory.source, 9_001),
            copy(memory.source, memory.source, 9_001, "memmove"),
            copy(memory.source, memory.source, 11, "mempcpy"),
            Step(CALLS.index("read"), empty.fileno(), None, memory.destination, 9_001),
            Step(CALLS.index("read"), empty.fileno(), None, memory.destination, 0),
            Step(CALLS.index("read"), -1, None, memory.destination, 9_001),
            Step(CALLS.index("readv"), -1, None, memory.destination, 9_001, 3),
            Step(CALLS.index("recvmsg"), -1, None, memory.destination, 9_001, 3),
            Step(CALLS.index("write"), empty.fileno(), memory.source, None, 0),
            Step(CALLS.index("sendmsg"), -1, memory.source, None, 9_001, 3),
        ]
        made: list[movers.Program] = []
        found = record(tmp_path / "spool", lambda: made.append(movers.run(steps)))
        assert [step.result for step in made[0].steps[4 : len(steps)]] == [0, 0, -1, -1, -1, 0, -1]
    assert (found.moves, found.small) == ([], Counter())


def test_both_sides_of_the_threshold(tmp_path: Path, memory: Memory) -> None:
    sizes = [1, 4095, 4096, 4097, 4095, 17]
    steps = [copy(memory.source, memory.destination, size) for size in sizes]
    found = record(tmp_path, lambda: movers.run(steps), min_bytes=4096)
    assert [move.nbytes for move in found.moves] == [4096, 4097]
    assert found.small == {"moves_memcpy": 1 + 4095 + 4095 + 17}
    assert found.small_moves == {"moves_memcpy": 4}


def test_small_pieces_of_a_vector_are_summed_and_large_ones_kept(tmp_path: Path, memory: Memory) -> None:
    with Channel("readv") as channel:
        channel.fill(3 * 1000 + 1001)
        step = Step(CALLS.index("readv"), channel.reader, None, memory.destination, 4001, 4)
        found = record(tmp_path / "spool", lambda: movers.run([step]), min_bytes=1001)
    assert found.moves == [
        (threading.get_ident(), "fetch", channel.reader, memory.destination + 3000, 1001, "moves_readv")
    ]
    assert (found.small, found.small_moves) == ({"moves_readv": 3000}, {"moves_readv": 3})


def test_small_moves_of_many_threads_are_all_counted(tmp_path: Path, memory: Memory) -> None:
    calls = ("memcpy", "memmove", "mempcpy")
    lists = [[copy(memory.source, memory.destination + 64 * n, 1 + n, calls[n % 3])] * 500 for n in range(24)]
    found = record(tmp_path, lambda: movers.run_threads(lists), min_bytes=4096)
    assert found.moves == []
    assert found.small_moves == {f"moves_{call}": 8 * 500 for call in calls}
    assert found.small == {f"moves_{call}": 500 * sum(range(1 + k, 25, 3)) for k, call in enumerate(calls)}


def test_native_threads_are_told_apart(tmp_path: Path, memory: Memory) -> None:
    lists = [[copy(memory.source + n, memory.destination, 5_000 + n)] * 200 for n in range(16)]
    made: list[list[movers.Program]] = []
    found = record(tmp_path, lambda: made.append(movers.run_threads(lists)))
    for ran in made[0]:
        own = [move for move in found.moves if move.nbytes == ran.steps[0].size]
        assert own == movers.all_expected(ran)
    assert len(found.moves) == 16 * 200


def test_a_thread_that_was_running_before_is_recorded(tmp_path: Path) -> None:
    def wait_for_both() -> None:
        until = time.monotonic() + 60
        while len({move.thread for move in movers.recorded(tmp_path, ended=False).moves}) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)

    library = movers.load()
    assert library.moves_start_workers(2) == 0
    found = record(tmp_path, wait_for_both, min_bytes=4096)
    library.moves_stop_workers()
    threads = {move.thread for move in found.moves}
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert {move.caller for move in found.moves} == {"moves_memcpy"}


def test_recursion(tmp_path: Path, memory: Memory) -> None:
    steps = [copy(memory.source, memory.destination, 4096 + n, COPIES[n % 8]) for n in range(300)]
    array = (Step * len(steps))(*steps)
    found = record(tmp_path, lambda: movers.load().moves_recurse(ctypes.byref(array), len(steps)))
    assert found.moves == [move for step in steps for move in movers.expected(step, threading.get_ident())]


def test_what_libc_moves_inside_itself_is_not_seen(tmp_path: Path) -> None:
    """memray's records tell of a realloc that moves its block."""
    library = movers.load()
    blocks = [library.moves_realloc(None, 50_003) for _ in range(64)]
    grown: list[int] = []
    found = record(tmp_path, lambda: grown.extend(library.moves_realloc(block, 90_001) for block in blocks))
    assert any(new != old for new, old in zip(grown, blocks, strict=True))
    assert (found.moves, found.small) == ([], Counter())
    for block in grown:
        library.moves_realloc(block, 0)


def test_errno_is_kept(tmp_path: Path, memory: Memory) -> None:
    library = movers.load()
    bad = Step(CALLS.index("read"), -1, None, memory.destination, 10)
    good = copy(memory.source, memory.destination, 5_000)
    seen: list[int] = []

    def work() -> None:
        seen.append(library.moves_errno_of_bad_read(ctypes.byref(bad)))
        seen.append(library.moves_errno_after_copy(ctypes.byref(good), 77))

    record(tmp_path, work)
    assert seen == [9, 77]


def test_a_signal_handler_may_copy(tmp_path: Path, memory: Memory) -> None:
    outer = copy(memory.source, memory.destination, 5_001)
    inner = copy(memory.source + 9_000, memory.destination + 9_000, 6_001, "memmove")
    library = movers.load()
    found = record(tmp_path, lambda: library.moves_with_signals(ctypes.byref(outer), ctypes.byref(inner), 200))
    assert [move.nbytes for move in found.moves] == [5_001, 6_001] * 200


def test_marks_and_moves_share_one_order(tmp_path: Path, memory: Memory) -> None:
    recording = Recording(tmp_path, min_bytes=1)
    recording.start()
    sequences = []
    for n in range(50):
        sequences.append(recording.mark(1000 + n))
        movers.run([copy(memory.source, memory.destination, 100 + n)])
        assert recording.set_markers(n % 2 == 0) == n + 1
    sequences.append(recording.mark(0))
    assert recording.sequence() == sequences[-1]
    recording.stop()
    transfers, marks = read(tmp_path)
    assert marks["sequence"].tolist() == sequences
    assert marks["span"].tolist() == [*range(1000, 1050), 0]
    assert set(marks["thread"].tolist()) == {threading.get_ident()}
    own = [n for n, frame in enumerate(transfers.callers) if frame.file.startswith("moves_")]
    rows = transfers.rows[np.isin(transfers.rows["caller"], own)]
    after = np.searchsorted(marks["sequence"], rows["sequence"]) - 1
    assert (rows["nbytes"] - 100).tolist() == after.tolist() == list(range(50))


def test_marks_of_many_threads_are_all_there(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.start()
    recording.set_markers(True)
    taken: dict[int, list[int]] = {}

    def work(number: int) -> None:
        taken[number] = [recording.mark(number) for _ in range(2_000)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recording.stop()
    _, marks = read(tmp_path)
    assert len(marks) == 16_000
    for number, sequences in taken.items():
        assert marks["sequence"][marks["span"] == number].tolist() == sequences


def test_without_moves_marks_are_numbered_alone(tmp_path: Path, memory: Memory) -> None:
    recording = Recording(tmp_path, moves=False)
    recording.start()
    assert [recording.mark(n) for n in range(5)] == [1, 2, 3, 4, 5]
    movers.run([copy(memory.source, memory.destination, 9_000)])
    recording.stop()
    transfers, marks = read(tmp_path)
    assert (transfers.recorded, transfers.reason, len(transfers.rows)) == (False, "switched off", 0)
    assert marks["span"].tolist() == [0, 1, 2, 3, 4]


def test_a_recording_can_be_read_while_it_runs(tmp_path: Path, memory: Memory) -> None:
    recording = Recording(tmp_path, min_bytes=1)
    recording.start()
    for n in range(1, 4):
        movers.run([copy(memory.source, memory.destination, 100 * n)])
        recording.mark(n)
        found = movers.recorded(tmp_path, ended=False)
        assert [move.nbytes for move in found.moves] == [100 * k for k in range(1, n + 1)]
        assert found.marks["span"].tolist() == list(range(1, n + 1))
    recording.stop()


def test_after_a_recording_nothing_is_written_and_marks_are_harmless(tmp_path: Path, memory: Memory) -> None:
    recording = Recording(tmp_path)
    recording.start()
    recording.mark(1)
    recording.stop()
    recording.stop()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    movers.run([copy(memory.source, memory.destination, 9_000)])
    recording.mark(2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_only_one_recording_at_a_time(tmp_path: Path) -> None:
    first = Recording(tmp_path / "first")
    first.start()
    with pytest.raises(RuntimeError, match="being recorded already"):
        Recording(tmp_path / "second").start()
    first.stop()
    third = Recording(tmp_path / "third")
    third.start()
    third.stop()


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_bytes: 0 is not positive"):
        Recording(tmp_path, min_bytes=0)
    (tmp_path / "file").touch()
    with pytest.raises(CopytraceError, match="file: cannot be written"):
        Recording(tmp_path / "file").start()
    recording = Recording(tmp_path / "used")
    recording.start()
    recording.stop()
    with pytest.raises(CopytraceError, match="used: holds another recording"):
        Recording(tmp_path / "used").start()


# --- random programs -------------------------------------------------------------------------------------------------

_SPACE = 1 << 15
_SIZES = st.one_of(st.integers(0, 64), st.integers(0, _SPACE), st.sampled_from([4095, 4096, 4097]))


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, int, int, int, int]:
    """call, source offset, destination offset, size, pieces"""
    call = draw(st.sampled_from([*COPIES, *FETCHES, *FLUSHES]))
    size = draw(_SIZES)
    offsets = [draw(st.integers(0, _SPACE - size)) for _ in range(2)]
    if call in ("memcpy", "mempcpy", "memcpy_chk", "mempcpy_chk", "hidden"):
        offsets[1] += _SPACE  # they may not overlap
    if draw(st.booleans()) and call in COPIES:
        offsets[1] = offsets[0]
    return call, *offsets, size, draw(st.integers(1, 9)) if call in VECTORS else 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lists=st.lists(st.lists(steps(), max_size=12), min_size=1, max_size=5),
    threshold=st.sampled_from([1, 64, 4096, 10_000]),
    linkage=st.sampled_from(list(LINKAGES)),
    native=st.booleans(),
)
def test_random_programs_are_recorded_exactly(
    lists: list[list[tuple[str, int, int, int, int]]], threshold: int, linkage: str, native: bool
) -> None:
    space = [np.zeros(2 * _SPACE, np.uint8) for _ in lists]
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(_SPACE // 2))
        ends = [socket.socketpair() for _ in lists]
        made = []
        for base, (reader, writer), wanted in zip((s.ctypes.data for s in space), ends, lists, strict=True):
            reader.setblocking(False)
            writer.setblocking(False)
            writer.send(bytes(20_001))
            made.append(
                [
                    Step(
                        CALLS.index(call),
                        (reader if call in FETCHES else writer).fileno()
                        if call.startswith(("recv", "send"))
                        else file.fileno(),
                        base + source,
                        base + destination,
                        size,
                        pieces,
                        source % 4096,
                    )
                    for call, source, destination, size, pieces in wanted
                ]
            )
        ran: list[movers.Program] = []
        found = record(
            Path(directory),
            lambda: ran.extend(
                movers.run_threads(made, linkage) if native else [movers.run(program, linkage) for program in made]
            ),
            min_bytes=threshold,
        )
        for pair in ends:
            for end in pair:
                end.close()
    wanted_moves = [movers.all_expected(program) for program in ran]
    kept = [[move for move in moves if move.nbytes >= threshold] for moves in wanted_moves]
    if native:
        assert Counter(found.moves) == Counter(move for moves in kept for move in moves)
        for thread in {program.thread for program in ran}:
            in_order = [
                move for program, moves in zip(ran, kept, strict=True) if program.thread == thread for move in moves
            ]
            assert [move for move in found.moves if move.thread == thread] == in_order
    else:
        assert found.moves == [move for moves in kept for move in moves]
    small = Counter[str]()
    for moves in wanted_moves:
        for move in moves:
            if move.nbytes < threshold:
                small[move.caller] += move.nbytes
    assert found.small == small
    assert found.lost == 0
