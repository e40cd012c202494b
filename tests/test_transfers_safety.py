"""The recorder leaves the process as it found it: slots, protections, children, late threads, unloaded libraries."""

from __future__ import annotations

import _ctypes
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import movers
from copytrace.transfers import Recording, read
from movers import LINKAGES, Memory, copy, nothing_recorded  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

hook = pytest.importorskip("copytrace._transfers", reason="the native hook is not installed")


@pytest.fixture
def memory() -> Memory:
    for linkage in LINKAGES:
        space = Memory(1 << 16)
        movers.run([copy(space.source, space.destination, 1, call) for call in movers.COPIES], linkage)
    return space


@pytest.fixture
def recording(tmp_path: Path, memory: Memory) -> Iterator[Recording]:  # noqa: ARG001
    made = Recording(tmp_path / "spool", min_bytes=1)
    yield made
    made.stop()


def protections() -> list[tuple[int, int, str, str]]:
    """start, end, protection and file of what is mapped of files, pieces with one protection joined."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [
        (*(int(end, 16) for end in line[0].split("-")), line[1], line[5]) for line in lines if line[-1].startswith("/")
    ]
    joined: list[tuple[int, int, str, str]] = []
    for start, end, protection, path in found:
        if joined and joined[-1][1:] == (start, protection, path):
            start = joined.pop()[0]
        joined.append((start, end, protection, path))
    return joined


def mapped_files() -> set[str]:
    return {path for *_, path in protections()}


def slots_of(linkage: str) -> dict[tuple[str, int], int]:
    return {
        (symbol, address): value for path, symbol, address, value in hook.slots() if path == str(movers.build(linkage))
    }


# --- slots and protections -------------------------------------------------------------------------------------------


def test_fifty_recordings_leave_slots_protections_and_mappings_as_they_were(tmp_path: Path, memory: Memory) -> None:
    movers.record(tmp_path / "first", lambda: None)
    slots, pages, size = hook.slots(), protections(), _virtual_size()
    for n in range(50):
        recording = Recording(tmp_path / str(n), min_bytes=1)
        recording.start()
        patched = hook.slots()
        movers.run([copy(memory.source, memory.destination, 100 + n)])
        recording.stop()
        assert hook.slots() == slots
        assert protections() == pages
        assert all(now[:3] == before[:3] and now[3] != before[3] for now, before in zip(patched, slots, strict=True))
        assert len(movers.recorded(tmp_path / str(n)).moves) == 1
    assert _virtual_size() - size < 16 << 20


def _virtual_size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("linkage", LINKAGES)
def test_every_call_of_a_library_is_hooked(recording: Recording, linkage: str) -> None:
    before = slots_of(linkage)
    named = {symbol for symbol, _ in before}
    assert {"memcpy", "memmove", "mempcpy", "__memcpy_chk", "read", "readv", "recvmsg", "write", "sendmsg"} <= named
    recording.start()
    during = slots_of(linkage)
    recording.stop()
    assert slots_of(linkage) == before
    assert all(during[key] != before[key] for key in before)


def test_own_objects_libc_and_memray_have_no_slots() -> None:
    import memray  # noqa: F401

    names = {os.path.basename(path) for path, *_ in hook.slots()}
    assert not [
        name for name in names if name.startswith(("libc.so", "ld-linux", "_memray", "_transfers", "linux-vdso"))
    ]
    assert not [path for path, *_ in hook.slots() if "/memray.libs/" in path]
    assert any(name.startswith("_multiarray_umath") for name in names)


def _write_slot(address: int, value: int) -> None:
    ctypes.c_size_t.from_address(address).value = value


def test_another_tools_hook_is_left_alone(recording: Recording) -> None:
    """One that was there before, and one that came in between."""
    before = slots_of("lazy")
    first = next(key for key in before if key[0] == "pwritev2")
    second = next(key for key in before if key[0] == "sendto")
    foreign = ctypes.cast(movers.load("now").moves_run, ctypes.c_void_p).value
    assert foreign
    try:
        _write_slot(first[1], foreign)
        recording.start()
        assert slots_of("lazy")[first] == foreign
        assert slots_of("lazy")[second] != before[second]
        _write_slot(second[1], foreign)
        recording.stop()
        assert (slots_of("lazy")[first], slots_of("lazy")[second]) == (foreign, foreign)
    finally:
        for key in (first, second):
            _write_slot(key[1], before[key])
    assert slots_of("lazy") == before


# --- libraries that come and go --------------------------------------------------------------------------------------


def test_a_library_loaded_meanwhile_is_hooked_at_the_next_mark(
    tmp_path: Path, recording: Recording, memory: Memory
) -> None:
    for linkage in LINKAGES:
        movers.build(linkage, "_late")
    recording.start()
    late = {linkage: ctypes.CDLL(str(movers.build(linkage, "_late"))) for linkage in LINKAGES}
    step = copy(memory.source, memory.destination, 777)
    late["now"].moves_memmove(ctypes.byref(step))
    recording.mark(1)
    for library in late.values():
        library.moves_memmove(ctypes.byref(step))
    recording.stop()
    found = movers.recorded(tmp_path / "spool")
    assert [(move.nbytes, move.caller) for move in found.moves] == [(777, "moves_memmove")] * 3
    transfers, _ = read(tmp_path / "spool")
    assert {frame.file for frame in transfers.callers} >= {f"moves_{linkage}_late.so" for linkage in LINKAGES}
    for library in late.values():
        _ctypes.dlclose(library._handle)


def test_a_library_unloaded_meanwhile_does_no_harm(tmp_path: Path, recording: Recording, memory: Memory) -> None:
    path = str(movers.build("now", "_gone"))
    gone = ctypes.CDLL(path)
    before = [row for row in hook.slots() if row[0] != path]
    step = copy(memory.source, memory.destination, 555)
    recording.start()
    gone.moves_memcpy(ctypes.byref(step))
    _ctypes.dlclose(gone._handle)
    assert path not in mapped_files()
    recording.stop()
    assert hook.slots() == before
    assert [move.caller for move in movers.recorded(tmp_path / "spool").moves] == ["moves_memcpy"]


def test_a_library_loaded_again_is_hooked_again(tmp_path: Path, recording: Recording, memory: Memory) -> None:
    """Several libraries in turn at one address: each caller is named as it was then."""
    paths = [str(movers.build("now", f"_turn{n}")) for n in range(3)]
    recording.start()
    bases = []
    for n, path in enumerate(paths * 2):
        library = ctypes.CDLL(path)
        bases.append(ctypes.cast(library.moves_memcpy, ctypes.c_void_p).value)
        recording.mark(n)
        library.moves_memcpy(ctypes.byref(copy(memory.source, memory.destination, 1000 + n)))
        _ctypes.dlclose(library._handle)
    recording.stop()
    assert len(set(bases)) < len(bases), "the loader uses an address again"
    transfers, _ = read(tmp_path / "spool")
    files = {
        int(row["nbytes"]): transfers.callers[row["caller"]] for row in transfers.rows if 1000 <= row["nbytes"] < 1006
    }
    assert {size: (frame.function, frame.file) for size, frame in files.items()} == {
        1000 + n: ("moves_memcpy", os.path.basename(path)) for n, path in enumerate(paths * 2)
    }


# --- children --------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], int]) -> int:
    """The exit status of a forked child that runs ``work``; 99 when it raised."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_writes_nothing_and_the_parent_goes_on(
    tmp_path: Path, recording: Recording, memory: Memory
) -> None:
    spool = tmp_path / "spool"
    recording.start()
    movers.run([copy(memory.source, memory.destination, 100)])
    recording.mark(1)
    slots = hook.slots()

    def work() -> int:
        movers.run([copy(memory.source, memory.destination, 200)] * 1000)
        first = recording.mark(2)
        recording.set_markers(True)
        recording.mark(3)
        assert hook.slots() == slots, "hooks stay and pass through"
        assert not any(str(spool) in path for path in mapped_files())
        recording.stop()
        own = Recording(tmp_path / "child", min_bytes=1)
        own.start()
        movers.run([copy(memory.source, memory.destination, 300)])
        own.stop()
        sizes = [move.nbytes for move in movers.recorded(tmp_path / "child").moves]
        return 42 if (first, sizes) == (0, [300]) else 1

    assert in_child(work) == 42
    movers.run([copy(memory.source, memory.destination, 400)])
    recording.stop()
    found = movers.recorded(spool)
    assert [move.nbytes for move in found.moves] == [100, 400]
    assert found.marks["span"].tolist() == [1]


def test_a_child_puts_the_slots_back_when_it_asks_to(recording: Recording) -> None:
    before = hook.slots()
    recording.start()

    def work() -> int:
        hook.stop()
        return 42 if hook.slots() == before else 1

    assert in_child(work) == 42
    recording.stop()
    assert hook.slots() == before


def test_a_child_without_fork_handlers_writes_nothing(tmp_path: Path, recording: Recording, memory: Memory) -> None:
    recording.start()
    step = copy(memory.source, memory.destination, 200)
    sequence = recording.sequence()
    assert movers.load().moves_in_raw_child(ctypes.byref(step), 1000) == 7
    recording.stop()
    found = movers.recorded(tmp_path / "spool")
    assert (found.moves, found.small) == ([], {})
    assert recording.sequence() - sequence < 100


def test_children_that_run_another_program_work(recording: Recording) -> None:
    recording.start()
    assert (
        subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True).stdout
        == "42\n"
    )
    assert os.system("exit 3") == 3 << 8


# --- threads and signals ---------------------------------------------------------------------------------------------


def test_a_thread_that_stays_inside_a_hook_outlives_the_recording(tmp_path: Path, memory: Memory) -> None:
    library = movers.load()
    low, high = next(
        (start, end) for start, end, access, path in protections() if "x" in access and path == hook.__file__
    )
    recording = Recording(tmp_path / "first")
    recording.start()
    library.moves_start_workers(1)
    assert library.moves_hold_worker(low, high) == 0
    recording.stop()
    second = Recording(tmp_path / "second")
    second.start()
    movers.run([copy(memory.source, memory.destination, 50_001)])
    library.moves_release_worker()
    movers.run([copy(memory.source, memory.destination, 50_002)])
    assert library.moves_stop_workers() > 0
    second.stop()
    main = threading.get_ident()
    assert [move.nbytes for move in movers.recorded(tmp_path / "second").moves if move.thread == main] == [
        50_001,
        50_002,
    ]
    first = movers.recorded(tmp_path / "first")
    assert all(4096 <= move.nbytes < 4096 + 8192 for move in first.moves)
    assert first.lost <= 1, "at most the row that the thread was writing"
    assert movers.recorded(tmp_path / "second").lost == 0


@pytest.mark.parametrize("markers", [False, True])
def test_a_killed_process_leaves_what_it_recorded(tmp_path: Path, markers: bool) -> None:
    script = f"""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import movers
        from copytrace.transfers import Recording
        movers.load()
        memory = movers.Memory(1 << 16)
        recording = Recording(Path({str(tmp_path / "spool")!r}), min_bytes=1000)
        recording.start()
        recording.set_markers({markers})
        for n in range(3000):
            recording.mark(n)
            movers.run([movers.copy(memory.source, memory.destination, size) for size in (1000 + n, 3)])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == -signal.SIGKILL
    found = movers.recorded(tmp_path / "spool", ended=False)
    assert [move.nbytes for move in found.moves] == list(range(1000, 4000))
    assert {move.caller for move in found.moves} == {"moves_memcpy"}
    assert found.small == {"moves_memcpy": 9000}
    assert found.marks["span"].tolist() == list(range(3000))


# --- stress ----------------------------------------------------------------------------------------------------------


def test_stress(tmp_path: Path) -> None:
    """Sessions open and close while threads copy, libraries load and unload, and children are forked."""
    seconds = float(os.environ.get("COPYTRACE_STRESS_SECONDS", "5"))
    for linkage in LINKAGES:
        movers.build(linkage)
    libraries = [
        str(movers.build(linkage, f"_stress{n}"))
        for n, linkage in enumerate(itertools.islice(itertools.cycle(LINKAGES), 6))
    ]
    script = f"""
        import _ctypes, ctypes, os, shutil, sys, threading, time, warnings
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        warnings.simplefilter("ignore", DeprecationWarning)
        import movers
        from copytrace import _transfers as hook
        from copytrace.transfers import Recording, read
        from test_transfers_safety import protections

        libraries = {libraries!r}
        loaded = {{linkage: movers.load(linkage) for linkage in movers.LINKAGES}}
        memory = movers.Memory(1 << 16)
        for linkage in movers.LINKAGES:
            movers.run([movers.copy(memory.source, memory.destination, 1, call) for call in movers.COPIES], linkage)
        end = time.monotonic() + {seconds}
        counts = dict(sessions=0, loads=0, forks=0, moves=0)
        least = dict(sessions=10, loads=10, forks=5, moves=1000)

        def go_on():
            return time.monotonic() < end or any(counts[name] < least[name] for name in least)

        mark = [lambda span: 0]
        first = Recording(Path({str(tmp_path / "first")!r})); first.start(); first.stop()
        workers = loaded["now"]
        assert workers.moves_start_workers(8) == 0

        def load():
            step = movers.copy(memory.source + 9000, memory.destination + 9000, 8192)
            while go_on():
                for path in libraries:
                    time.sleep(0.001)
                    library = ctypes.CDLL(path)
                    mark[0](1)
                    library.moves_memmove(ctypes.byref(step))
                    _ctypes.dlclose(library._handle)
                    counts["loads"] += 1

        def fork():
            while go_on():
                child = os.fork()
                if child == 0:
                    movers.run([movers.copy(memory.source + 20000, memory.destination + 20000, 5000)])
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
                counts["forks"] += 1
                time.sleep(0.01)

        threads = [threading.Thread(target=work) for work in (load, fork)]
        for thread in threads:
            thread.start()
        while go_on():
            spool = Path({str(tmp_path)!r}) / str(counts["sessions"])
            recording = Recording(spool)
            recording.start()
            mark[0] = recording.mark
            recording.set_markers(counts["sessions"] % 2 == 0)
            for n in range(counts["sessions"] % 40):
                recording.mark(n)
                time.sleep(0.0002)
            recording.stop()
            movers.recorded(spool)
            transfers, _ = read(spool)
            counts["moves"] += len(transfers.rows)
            assert transfers.lost == 0, transfers.lost
            shutil.rmtree(spool)
            counts["sessions"] += 1
        for thread in threads:
            thread.join()
        assert workers.moves_stop_workers() > 0
        low, high = next((s, e) for s, e, access, path in protections() if "x" in access and path == hook.__file__)
        left = [row for row in hook.slots() if low <= row[3] < high]
        assert not left, left
        writable = [page for page in protections() if page[2].startswith("rwx")]
        assert not writable, writable
        print(counts)
    """
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=seconds + 240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
