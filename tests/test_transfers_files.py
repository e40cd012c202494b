"""What the recorder leaves on disk, how much, and what is read of it when space, time or the extension ran out."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import movers
from copytrace.errors import CopytraceError
from copytrace.model import MARK_ADDRESS, MARK_BASE, MARK_COUNT, MARK_PERIOD
from copytrace.transfers import Recorded, Recording, read
from movers import Memory, copy, nothing_recorded  # noqa: F401

pytest.importorskip("copytrace._transfers", reason="the native hook is not installed")


@pytest.fixture
def memory() -> Memory:
    movers.load()
    return Memory(1 << 20)


def disk(spool: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in spool.iterdir())


def resident_files() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


def test_a_million_moves_take_little_disk_memory_and_time(tmp_path: Path, memory: Memory) -> None:
    recording = Recording(tmp_path)
    recording.start()
    before = resident_files()
    movers.repeat(copy(memory.source, memory.destination, 4096), 1_000_000)
    most = disk(tmp_path)
    grown = resident_files() - before
    recording.stop()
    started = time.thread_time()
    transfers, _ = read(tmp_path)
    seconds = time.thread_time() - started
    assert len(transfers.rows) >= 1_000_000
    assert transfers.lost == 0
    assert disk(tmp_path) < 52 << 20
    assert most < 60 << 20
    assert grown < 16 << 20
    assert seconds < 2.0


def test_files_are_trimmed_to_what_was_written(tmp_path: Path, memory: Memory) -> None:
    movers.record(tmp_path, lambda: movers.run([copy(memory.source, memory.destination, 9_000)]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "counters.bin",
        "moves-00000.bin",
        "objects.tsv",
        "recording.json",
    ]
    assert (tmp_path / "moves-00000.bin").stat().st_size == 48 * movers.counters(tmp_path)[0]


def test_rows_go_on_over_many_segments(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "_row_bits", 7)
    lists = [[copy(memory.source, memory.destination, 100 + n)] * 700 for n in range(8)]
    made: list[movers.Program] = []
    found = movers.record(tmp_path, lambda: made.extend(movers.run_threads(lists)))
    assert found.lost == 0
    assert Counter(found.moves) == Counter(move for ran in made for move in movers.all_expected(ran))
    assert len(list(tmp_path.glob("moves-*.bin"))) >= 5600 // 128


def test_what_finds_no_segment_is_counted(tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "_row_bits", 7)
    monkeypatch.setattr(Recording, "_segments", 3)
    recording = Recording(tmp_path)
    recording.start()
    recording.mark(1)
    movers.repeat(copy(memory.source, memory.destination, 8_000), 1_000)
    last = [recording.mark(n) for n in (2, 3)]
    recording.stop()
    found = movers.recorded(tmp_path)
    kept = len(found.moves)
    assert 370 <= kept <= 3 * 128 - 2
    assert found.lost == 1_000 - kept + (last[0] - 1_002), "moves of ours and of Python"
    assert last[1] > last[0] > 1_000
    assert found.marks["span"].tolist() == [1]
    assert movers.counters(tmp_path)[4] == 2


def test_a_full_disk_loses_moves_but_no_marks_once_there_is_room(tmp_path: Path) -> None:
    """The limit on the size of a file stands for the full disk."""
    script = f"""
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import movers
        from copytrace.transfers import Recording
        movers.load()
        memory = movers.Memory(1 << 16)
        Recording._row_bits = 9
        recording = Recording(Path({str(tmp_path / "spool")!r}), min_bytes=8000)
        recording.start()
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        step = movers.copy(memory.source, memory.destination, 8000)
        movers.repeat(step, 5000)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        for n in range(300):
            recording.mark(n)
        movers.repeat(step, 7)
        recording.stop()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    found = movers.recorded(tmp_path / "spool")
    assert found.marks["span"].tolist() == list(range(300))
    assert len(found.moves) + found.lost >= 5_007
    assert 3 * 512 - 10 <= len(found.moves) <= 3 * 512 + 10
    assert all(move.nbytes == 8000 for move in found.moves)


def test_a_spool_that_cannot_grow_is_an_error_in_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CopytraceError, match="spool: cannot be written: File too large"):
            Recording(tmp_path / "spool").start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    movers.record(tmp_path / "next", lambda: None)


def test_a_start_that_fails_at_the_end_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        with pytest.raises(CopytraceError, match="spool: cannot be written: No space left on device"):
            Recording(tmp_path / "spool").start()
    movers.record(tmp_path / "next", lambda: None)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spool(tmp_path: Path, memory: Memory) -> Path:
    movers.record(
        tmp_path / "spool", lambda: movers.run([copy(memory.source, memory.destination, 9_000 + n) for n in range(100)])
    )
    return tmp_path / "spool"


def test_a_directory_without_a_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(CopytraceError, match="holds no recording"):
        read(tmp_path)
    with pytest.raises(CopytraceError, match="holds no recording"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("recording.json", b""),
        ("recording.json", b"{}"),
        ("recording.json", b"[1]"),
        ("recording.json", b"\xff\xfe"),
        ("counters.bin", b""),
        ("counters.bin", b"\xff" * 500),
        ("objects.tsv", b"1\t2\n"),
        ("objects.tsv", b"a\tb\tc\td\te\tf\tg\n"),
    ],
)
def test_a_damaged_file_is_named(spool: Path, name: str, content: bytes) -> None:
    (spool / name).write_bytes(content)
    with pytest.raises(CopytraceError, match=f"{name}: damaged") as caught:
        read(spool)
    assert "\n" not in str(caught.value)


def test_a_missing_counters_file_is_damage_and_missing_objects_leave_callers_unknown(spool: Path) -> None:
    (spool / "objects.tsv").unlink()
    transfers, _ = read(spool)
    assert {frame.function for frame in transfers.callers} == {"[unknown]"}
    (spool / "counters.bin").unlink()
    with pytest.raises(CopytraceError, match=r"counters\.bin: damaged"):
        read(spool)


def test_rows_that_were_cut_or_never_finished_are_left_out(spool: Path) -> None:
    path = spool / "moves-00000.bin"
    rows = np.fromfile(path, "<u8").reshape(-1, 6)
    whole, _ = read(spool)
    victim = len(rows) - 5
    rows[victim, 0] = 0
    path.write_bytes(rows.tobytes()[:-50])
    less, _ = read(spool)
    gone = {victim, len(rows) - 1, len(rows) - 2}
    assert less.rows["sequence"].tolist() == [n for n in whole.rows["sequence"].tolist() if n not in gone]


def test_files_that_are_renamed_and_removed_while_they_are_read(spool: Path) -> None:
    """As a followed process does that goes on: a segment is a draft at first, and those not used are removed."""
    whole, marks = read(spool)
    assert len(whole.rows) > 0
    last, draft, spare = (spool / f"moves-{name}.bin" for name in ("00000", "00000.00003", "00001"))
    last.rename(draft)
    spare.write_bytes(bytes(4800))
    other = spool / "moves-00000.00004.bin"
    other.write_bytes(bytes(4800))
    recorded = Recorded(spool)
    found = recorded.between(0, 1 << 63, small=True)
    assert (found[0].rows.tolist(), found[1].tolist()) == (whole.rows.tolist(), marks.tolist())
    draft.rename(last)
    spare.unlink()
    other.unlink()
    found = recorded.between(0, 1 << 63, small=True)
    assert (found[0].rows.tolist(), found[1].tolist()) == (whole.rows.tolist(), marks.tolist())
    assert len(recorded.marks()) == len(marks)


def test_a_row_in_the_wrong_place_is_left_out(spool: Path) -> None:
    path = spool / "moves-00000.bin"
    rows = np.fromfile(path, "<u8").reshape(-1, 6)
    rows[5, 0] = 2**40
    path.write_bytes(rows.tobytes())
    transfers, _ = read(spool)
    assert transfers.rows["sequence"].max() == len(rows) - 1


def test_a_library_that_changed_gives_offsets_for_names(tmp_path: Path, memory: Memory) -> None:
    library = movers.build("now", "_changed")
    moves = ctypes.CDLL(str(library))
    movers.record(
        tmp_path / "spool", lambda: moves.moves_memcpy(ctypes.byref(copy(memory.source, memory.destination, 9_000)))
    )
    assert [move.caller for move in movers.recorded(tmp_path / "spool").moves] == ["moves_memcpy"]
    library.with_suffix(".new").write_bytes(library.read_bytes() + b"\0")
    library.with_suffix(".new").replace(library)
    callers = [move.caller for move in movers.recorded(tmp_path / "spool").moves]
    assert len(callers) == 1
    assert callers[0].startswith("+0x")


# --- without the extension -------------------------------------------------------------------------------------------


@pytest.fixture(params=["switched off", "missing"])
def without_extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "switched off":
        monkeypatch.setenv("COPYTRACE_NO_EXTENSION", "1")
        return "switched off by COPYTRACE_NO_EXTENSION"
    import copytrace

    monkeypatch.delattr(copytrace, "_transfers", raising=False)
    monkeypatch.setitem(sys.modules, "copytrace._transfers", None)
    return "the native hook is not installed"


def test_without_the_extension_marks_go_on_and_the_reason_is_given(
    tmp_path: Path, memory: Memory, without_extension: str
) -> None:
    recording = Recording(tmp_path)
    recording.start()
    assert recording.reason.startswith(without_extension)
    assert [recording.mark(10 * n) for n in range(3)] == [1, 2, 3]
    movers.run([copy(memory.source, memory.destination, 9_000)])
    assert (recording.sequence(), recording.set_markers(False)) == (3, 3)
    assert read(tmp_path)[1]["span"].tolist() == [0, 10, 20]
    recording.mark(30)
    recording.stop()
    transfers, marks = read(tmp_path)
    assert (transfers.recorded, len(transfers.rows), transfers.reason) == (False, 0, recording.reason)
    assert marks["sequence"].tolist() == [1, 2, 3, 4]
    assert marks["span"].tolist() == [0, 10, 20, 30]
    assert set(marks["thread"].tolist()) == {threading.get_ident()}
    assert recording.mark(5) == 5


def test_without_the_extension_marks_of_many_threads_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COPYTRACE_NO_EXTENSION", "1")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    recording = Recording(tmp_path)
    recording.start()
    taken: dict[int, list[int]] = {}

    def work(number: int) -> None:
        taken[number] = [recording.mark(number) for _ in range(3_000)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    recording.stop()
    _, marks = read(tmp_path)
    assert marks["sequence"].tolist() == list(range(1, 18_001))
    for number, sequences in taken.items():
        assert marks["sequence"][marks["span"] == number].tolist() == sequences


def test_without_the_extension_a_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPYTRACE_NO_EXTENSION", "1")
    recording = Recording(tmp_path)
    recording.start()
    recording.mark(1)
    child = os.fork()
    if child == 0:
        for n in range(10_000):
            recording.mark(n)
        recording.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recording.mark(2)
    recording.stop()
    assert read(tmp_path)[1]["span"].tolist() == [1, 2]


# --- beside memray ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_markers_are_in_memrays_stream_in_the_order_of_marks(
    tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else of ours: neither segments nor tables."""
    import memray

    if not native:
        monkeypatch.setenv("COPYTRACE_NO_EXTENSION", "1")
    interval = sys.getswitchinterval()
    recording = Recording(tmp_path / "spool")
    with memray.Tracker(tmp_path / "capture.bin"):
        recording.start()
        for n in range(100):
            recording.mark(n)
        recording.set_markers(True)
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=lambda: [recording.mark(7) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        recording.set_markers(False)
        recording.mark(8)
        recording.stop()
    records = list(memray.FileReader(tmp_path / "capture.bin").get_allocation_records())
    if native:
        sizes = [record.size for record in records if record.address == MARK_ADDRESS]
        wanted = [1 + n % MARK_COUNT for n in range(100, 2_100)]
    else:
        sizes = [record.size for record in records if MARK_BASE <= record.size < MARK_BASE + MARK_PERIOD]
        wanted = [MARK_BASE + n % MARK_PERIOD for n in range(100, 2_100)]
    seen = iter(sizes)
    assert all(size in seen for size in wanted), "each after the one before"
    assert len(sizes) - len(wanted) <= 5, "Python itself seldom asks for such a size"
    largest = max(record.size for record in memray.FileReader(tmp_path / "capture.bin").get_allocation_records())
    assert largest < 1 << 20
