"""Sessions in every order: nested, repeated, in threads, in coroutines, around code that raises."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from zarr.storage import LocalStore

import copytrace
from copytrace import trace
from copytrace.errors import CopytraceError
from copytrace.transfers import _extension
from oracle.snapshot import attributes, changes
from oracle.stores import raw_array

HOOKED = _extension()[0] is not None


def test_a_public_name_means_the_same_whatever_was_imported_before() -> None:
    program = """
import copytrace, importlib, pkgutil
first = {name: getattr(copytrace, name) for name in copytrace.__all__}
for module in pkgutil.walk_packages(copytrace.__path__, "copytrace."):
    if not module.name.endswith(("__main__", "_plugin")):
        importlib.import_module(module.name)
assert {name: getattr(copytrace, name) for name in copytrace.__all__} == first
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


N = 300_007
source = np.random.default_rng(3).integers(1, 255, N, dtype="u1")
blob = source.tobytes()


def copy_once(name: str = "once") -> bytes:
    with copytrace.operation(name, payload_bytes=N):
        return bytes(memoryview(source))


def told(session: copytrace.Session) -> dict[str, int]:
    """Name of an operation -> bytes copied."""
    return {path.api: path.copied_bytes for path in session.report.paths}


@pytest.fixture(autouse=True)
def all_is_restored() -> Iterator[None]:
    import zarr.storage  # noqa: F401

    before = attributes()
    yield
    assert changes(before, attributes()) == []


def test_the_inner_session_sees_its_part_and_the_outer_one_all() -> None:
    with copytrace.session() as outer:
        copy_once("before")
        with copytrace.session() as inner:
            copy_once("inside")
            with copytrace.session() as innermost:
                copy_once("deep")
            copy_once("inside")
        copy_once("after")
    assert told(innermost) == {"deep": N}
    assert told(inner) == {"inside": 2 * N, "deep": N}
    assert told(outer) == {"before": N, "inside": 2 * N, "deep": N, "after": N}


def test_an_inner_session_is_readable_while_the_outer_one_is_open() -> None:
    with copytrace.session() as outer:
        copy_once("before")
        with copytrace.session() as inner:
            copy_once("inside")
        assert told(inner) == {"inside": N}
        with pytest.raises(CopytraceError, match="still open"):
            _ = outer.report
    assert told(outer) == {"before": N, "inside": N}


def test_a_session_may_be_used_again() -> None:
    session = copytrace.session()
    for name in ("first", "second", "third"):
        with session:
            copy_once(name)
        assert told(session) == {name: N}


def test_a_session_that_is_open_cannot_be_entered() -> None:
    session = copytrace.session("mine")
    with session:
        with pytest.raises(CopytraceError, match="mine: already open"):
            session.__enter__()
        copy_once()
    assert told(session) == {"once": N}


def test_a_session_that_was_never_entered_says_so() -> None:
    with pytest.raises(CopytraceError, match="never entered"):
        _ = copytrace.session("mine").report


def test_what_the_block_raises_comes_out_and_the_report_is_there() -> None:
    error = ValueError("boom")
    session = copytrace.session()

    def fail() -> None:
        with session:
            copy_once()
            with copytrace.operation("fails", payload_bytes=N):
                bytes(memoryview(source))
                raise error

    with pytest.raises(ValueError, match="boom") as raised:
        fail()
    assert raised.value is error
    assert told(session) == {"once": N, "fails": N}
    assert {path.api: path.errors for path in session.report.paths} == {"once": 0, "fails": 1}


def test_as_a_decorator() -> None:
    session = copytrace.session()

    @session
    def decorated(times: int, *, name: str) -> int:
        """Documented."""
        return sum(len(copy_once(name)) for _ in range(times))

    assert decorated(2, name="called") == 2 * N
    assert told(session) == {"called": 2 * N}
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Documented.")
    assert decorated(1, name="again") == N
    assert told(session) == {"again": N}


def test_as_a_decorator_of_a_coroutine_function() -> None:
    session = copytrace.session()

    @session
    async def decorated(name: str) -> int:
        await asyncio.sleep(0)
        found = len(copy_once(name))
        await asyncio.sleep(0)
        return found

    assert asyncio.iscoroutinefunction(decorated)
    assert asyncio.run(decorated("awaited")) == N
    assert told(session) == {"awaited": N}


def test_in_coroutines_that_overlap() -> None:
    sessions: dict[str, copytrace.Session] = {}

    async def work(name: str, turns: int) -> None:
        with copytrace.session(name) as sessions[name]:
            for _ in range(turns):
                await asyncio.sleep(0)
                copy_once(name)
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(work("left", 2), work("right", 5))

    asyncio.run(main())
    assert told(sessions["left"])["left"] == 2 * N
    assert told(sessions["right"])["right"] == 5 * N
    assert set(told(sessions["left"])) | set(told(sessions["right"])) == {"left", "right"}


def test_in_threads() -> None:
    sessions: dict[int, copytrace.Session] = {}

    def work(number: int) -> None:
        with copytrace.session() as sessions[number]:
            for _ in range(3):
                copy_once(str(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: told(session)[str(number)] for number, session in sessions.items()} == dict.fromkeys(
        range(4), 3 * N
    )


ORDERS = [
    steps
    for steps in itertools.permutations(["enter a", "leave a", "enter b", "leave b"])
    if steps.index("enter a") < steps.index("leave a") and steps.index("enter b") < steps.index("leave b")
]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_two_threads_enter_and_leave_in_every_order(order: tuple[str, ...]) -> None:
    assert len(ORDERS) == 6
    sessions = {name: copytrace.session(name) for name in "ab"}
    with ThreadPoolExecutor(1) as left, ThreadPoolExecutor(1) as right:
        pools = {"a": left, "b": right}
        seen: dict[str, set[str]] = {"a": set(), "b": set()}
        opened: set[str] = set()
        for number, step in enumerate(order):
            action, name = step.split()
            if action == "enter":
                pools[name].submit(sessions[name].__enter__).result()
                opened.add(name)
            else:
                pools[name].submit(sessions[name].__exit__, None, None, None).result()
                opened.discard(name)
            for who, pool in pools.items():
                pool.submit(copy_once, f"{who} {number}").result()
                for listening in opened:
                    seen[listening].add(f"{who} {number}")
    for name, session in sessions.items():
        assert told(session) == dict.fromkeys(seen[name], N)


def test_inside_an_operation_that_began_before() -> None:
    with copytrace.operation("around", payload_bytes=N):
        with copytrace.session() as session:
            copy_once("inside")
        copy_once("after")
    assert told(session) == {"inside": N}


def test_an_operation_that_ends_after_the_session_is_left_out_and_harms_nothing() -> None:
    operation = copytrace.operation("too long", payload_bytes=N)
    with copytrace.session() as first:
        operation.__enter__()
        copy_once("inside")
    with copytrace.session() as second:
        operation.__exit__(None, None, None)
        copy_once("later")
    assert told(first).get("inside") == N
    assert told(second) == {"later": N}


def test_a_zarr_array_from_before_is_traced_and_works_after(tmp_path: Path) -> None:
    array = raw_array(LocalStore(tmp_path), N)
    setter, getter = array.__setitem__, array.__getitem__
    with copytrace.session() as session:
        array[:] = source
        bound = array.__getitem__
    bound(slice(None))
    setter(slice(None), source)
    assert np.array_equal(getter(slice(None)), source)
    assert [path.direction for path in session.report.paths] == ["write"]
    with copytrace.session() as again:
        assert np.array_equal(getter(slice(None)), source)
    assert {path.direction for path in again.report.paths} == {"read"}


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(CopytraceError, match="min_bytes: -1 is negative"):
        copytrace.session(min_bytes=-1)
    with (
        pytest.raises(CopytraceError, match="payload_bytes: -1 is negative"),
        copytrace.operation("x", payload_bytes=-1),
    ):
        pass


@pytest.mark.parametrize("options", [{"memray": False}, {"transfers": False}, {"native": False}], ids=str)
def test_a_part_may_be_switched_off_and_the_report_says_so(options: dict[str, bool]) -> None:
    with copytrace.session(**options) as session:
        copy_once()
    coverage = session.report.coverage
    assert (coverage.memray, coverage.transfers, coverage.native) == (
        options.get("memray", True),
        options.get("transfers", HOOKED),
        options.get("native", True) and options.get("memray", True),
    )
    assert bool(coverage.notes) == (not coverage.memray or not coverage.transfers)
    assert told(session) == {"once": N if (HOOKED and coverage.transfers) or coverage.memray else 0}


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    array = raw_array(LocalStore(directory / "array"), 50_021)
    with copytrace.session("saved") as session:
        array[:] = source[:50_021]
        copy_once("by hand")
    session.save(directory / "a.copytrace")
    (directory / "report.json").write_text(session.report.to_json())
    return directory


def test_what_is_saved_is_what_is_loaded(saved: Path) -> None:
    loaded = copytrace.load(saved / "a.copytrace")
    assert loaded.report.to_json() == (saved / "report.json").read_text()
    again = saved / "again.copytrace"
    trace.save(loaded.trace, again, overwrite=True)
    second = copytrace.load(again).trace
    for name in ("spans", "seen", "marks"):
        assert np.array_equal(getattr(second, name), getattr(loaded.trace, name))
    assert second.transfers.callers == loaded.trace.transfers.callers
    assert second.allocations.stacks == loaded.trace.allocations.stacks
    assert second.environment == loaded.trace.environment
    assert (second.label, second.complete, second.min_bytes) == ("saved", True, 0)


def test_a_file_is_never_overwritten_unasked(saved: Path) -> None:
    session = copytrace.session()
    with session:
        pass
    with pytest.raises(CopytraceError, match="the file exists"):
        session.save(saved / "a.copytrace")


def one_line(path: Path) -> str:
    """The message with which a file is refused."""
    with pytest.raises(CopytraceError) as refused:
        _ = copytrace.load(path).report
    message = str(refused.value)
    assert "\n" not in message
    assert path.name in message
    return message


def read_or_refuse(path: Path) -> str | None:
    """The report in a file, None when it is refused in one line."""
    try:
        return copytrace.load(path).report.to_json()
    except CopytraceError as error:
        if "\n" in str(error):
            raise
        return None


def test_a_file_that_was_cut_short_anywhere_is_refused(saved: Path, tmp_path: Path) -> None:
    whole = (saved / "a.copytrace").read_bytes()
    path = tmp_path / "cut.copytrace"
    lengths = {*range(64), *range(64, len(whole), max(1, len(whole) // 150)), *range(len(whole) - 64, len(whole))}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        one_line(path)


def test_a_file_with_a_byte_flipped_is_refused_or_read_whole(saved: Path, tmp_path: Path) -> None:
    whole = bytearray((saved / "a.copytrace").read_bytes())
    path = tmp_path / "flipped.copytrace"
    chosen = np.random.default_rng(1).integers(0, len(whole), 250)
    refused = 0
    for place in chosen.tolist():
        whole[place] ^= 0xFF
        path.write_bytes(whole)
        whole[place] ^= 0xFF
        found = read_or_refuse(path)
        refused += found is None
        assert found in (None, (saved / "report.json").read_text())
    assert refused > 200


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"not a trace\n", b"\x7fELF", b"PK\x05\x06" + bytes(18), bytes(5000)], ids=repr
)
def test_a_foreign_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign.copytrace"
    path.write_bytes(content)
    one_line(path)


def test_a_zip_of_something_else_and_a_header_of_something_else_are_refused(tmp_path: Path) -> None:
    for number, header in enumerate(
        [
            None,
            "",
            "[]",
            "{}",
            '{"schema": "copytrace.trace/99"}',
            '{"schema": "other"}',
            '{"schema": "copytrace.trace/1"}',
        ]
    ):
        path = tmp_path / f"{number}.copytrace"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("trace.json" if header is not None else "other.txt", header or "")
        one_line(path)
    one_line(tmp_path / "absent.copytrace")
    (tmp_path / "directory").mkdir()
    one_line(tmp_path / "directory")


KILLED = """
import os, signal, sys
import numpy as np
import copytrace
source = np.arange(300_007, dtype="u1")
for _ in range(3):
    with copytrace.operation("before", payload_bytes=source.nbytes):
        kept = bytes(memoryview(source))
print("ready", flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(7)
"""


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_run_that_is_killed_leaves_what_can_be_read(how: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    command = [sys.executable, "-m", "copytrace"]
    died = subprocess.run(
        [*command, "run", "-o", "out.copytrace", "script.py", how],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert died.returncode == (-9 if how == "kill" else 7)
    assert died.stdout == "ready\n"
    assert not (tmp_path / "out.copytrace").exists()
    partial = tmp_path / "out.copytrace.partial"
    assert partial.is_dir()
    read = subprocess.run(
        [*command, "report", partial.name, "--format", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (read.returncode, read.stderr) == (0, "")
    assert '"the run did not end' in read.stdout
    assert "out.copytrace.partial" in one_line(tmp_path / "out.copytrace")
    for name in [path.name for path in partial.iterdir()]:
        path = partial / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        read_or_refuse(partial)
        path.write_bytes(whole)
