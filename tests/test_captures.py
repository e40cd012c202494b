"""memray's capture files: read as memray itself reads them, and never more than is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import memray
import numpy as np
import pytest

from copytrace import captures, stacks
from copytrace.captures import Entry, mix, open_capture
from copytrace.stacks import named
from sanitize.run import FLAGS, available, compiler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from copytrace.captures import Capture

pytest.importorskip("copytrace._captures", reason="needs the extension")

PROGRAM = """
import json.tool, mmap, sys, threading
import memray
import numpy as np

def deep(depth, size):
    return bytearray(size) if not depth else deep(depth - 1, size)

class Called:
    def __call__(self):
        return sorted([3, 1, 2], key=lambda k: deep(k, 700 + k))

def work(number):
    kept = [deep(k % 17, 600 + 13 * k) for k in range(60 + number)]
    for k in range(2_000):
        bytearray(513 + 7 * k)
    kept.append(np.ones(5_003).astype("f4"))
    grown = bytearray()
    for _ in range(40):
        grown += b"x" * 1_013
    Called()()
    with mmap.mmap(-1, 1 << 16):
        del kept[::2]

destination = memray.FileDestination(sys.argv[1], compress_on_exit=sys.argv[3] == "compressed")
with memray.Tracker(destination=destination, native_traces=sys.argv[2] == "native"):
    import decimal, fractions, ctypes.util, sqlite3
    work(0)
    threads = [threading.Thread(target=work, args=(k,), name=f"worker {k}") for k in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deep(700, 4_001)
"""


def capture(path: Path, *, native: bool = True, compressed: bool = False) -> Path:
    words = ("native" if native else "python", "compressed" if compressed else "plain")
    subprocess.run([sys.executable, "-c", PROGRAM, path, *words], check=True, timeout=120)
    return path


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("captures") / "native.bin")


def rows(reader: Capture, batch: int = 1000) -> NDArray[np.int64]:
    taken = []
    while len(block := reader.take(batch)):
        taken.append(block)
    return np.concatenate([np.zeros((0, 5), np.int64), *taken])


def both(path: Path) -> tuple[Capture, Capture]:
    ours = open_capture(path)
    assert isinstance(ours, captures._Plain)
    return ours, captures._ByMemray(path)


@pytest.mark.parametrize("traces", ["native", "python"])
def test_the_same_records_and_python_frames_as_memray(traces: str, tmp_path: Path) -> None:
    ours, theirs = both(capture(tmp_path / "some.bin", native=traces == "native"))
    found, expected = rows(ours), rows(theirs)
    assert np.array_equal(found, expected)
    assert len(np.unique(found[:, 0])) >= 7
    assert set(found[:, 3]) >= {captures.FREE, captures.MALLOC, captures.REALLOC, captures.MUNMAP}
    stacks = int(found[:, 4].max())
    assert stacks > 100
    for number in range(1, stacks + 1):
        assert ours.stack(number, native=False) == theirs.stack(number, native=False)
        if traces == "python":
            assert ours.stack(number, native=True) == theirs.stack(number, native=True)


def test_native_frames_between_the_same_python_frames_as_memrays(native: Path) -> None:
    """memray names functions that the compiler put into others, too, and finds fewer where a library has no symbols."""
    ours, theirs = both(native)
    stacks = int(rows(ours)[:, 4].max())
    rows(theirs)
    mixed = 0
    libraries = set()
    for number in range(1, stacks + 1):
        python, found = ours.stack(number, native=True)
        expected = theirs.stack(number, native=True)[1]
        if expected != python and len(found) < 60 and len(expected) < 60:
            known = set(python)
            assert [e for e in found if e in known] == [e for e in expected if e in known]
            mixed += 1
        libraries |= {Path(library).name.split(".")[0] for _, _, _, library in found if library}
    assert mixed > 100
    assert {"_multiarray_umath", "mmap"} & libraries
    assert any(library.startswith(("libpython", "python")) for library in libraries)


def test_where_blocks_of_records_end_makes_no_difference(native: Path) -> None:
    whole = rows(open_capture(native))
    assert np.array_equal(rows(open_capture(native), 7), whole)


def test_a_capture_that_was_cut_off_is_read_up_to_there(native: Path, tmp_path: Path) -> None:
    data, whole = native.read_bytes(), rows(open_capture(native))
    lengths = [0]
    for share in (0.3, 0.5, 0.9):
        for zeros in (5000, 0):
            cut = tmp_path / "cut.bin"
            cut.write_bytes(data[: int(len(data) * share)] + bytes(zeros))
            found = rows(open_capture(cut))
            assert np.array_equal(found, whole[: len(found)])
        assert lengths[-1] < len(found) < len(whole)
        lengths.append(len(found))


def test_a_packed_capture_is_read_and_one_that_was_cut_off_is_damage(tmp_path: Path) -> None:
    packed = capture(tmp_path / "packed.bin", compressed=True)
    assert packed.read_bytes()[:4] == b"\x04\x22\x4d\x18"
    ours, theirs = both(packed)
    assert np.array_equal(rows(ours), rows(theirs))
    for at in (100, 20_000, packed.stat().st_size - 200):
        cut = tmp_path / "cut.bin"
        cut.write_bytes(packed.read_bytes()[:at])
        with pytest.raises((OSError, RuntimeError, ValueError)):
            rows(open_capture(cut))


def test_what_is_of_another_format_is_left_to_memray(native: Path, tmp_path: Path) -> None:
    data = native.read_bytes()
    for name, content in {
        "newer.bin": data[:7] + b"\x0e" + data[8:],
        "text.bin": b"no capture",
        "empty.bin": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises((OSError, RuntimeError, ValueError)):
            open_capture(tmp_path / name)
    with pytest.raises(OSError, match=r"missing\.bin"):
        open_capture(tmp_path / "missing.bin")


def test_allocations_that_do_not_add_up_are_damage(native: Path, tmp_path: Path) -> None:
    """The header counts them: a format that changed without a new number is noticed."""
    data = bytearray(native.read_bytes())
    count = memray.FileReader(native).metadata.total_allocations
    at = data.index(count.to_bytes(8, "little"))
    data[at : at + 8] = (count + 1).to_bytes(8, "little")
    (tmp_path / "one-more.bin").write_bytes(data)
    with pytest.raises(ValueError, match="not as many allocations"):
        rows(open_capture(tmp_path / "one-more.bin"))


def test_bad_arguments(native: Path) -> None:
    from copytrace._captures import Reader

    reader = Reader(os.fspath(native))
    with pytest.raises(ValueError, match="from 0 up"):
        reader.take(-1, 512)
    with pytest.raises(IndexError):
        reader.stack(1)
    with pytest.raises(TypeError):
        Reader()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no keywords"):
        Reader(path=os.fspath(native))  # type: ignore[call-arg]
    assert reader.take(0, 512) == b""


A, B, C = (("a", "a.py", 1, ""), ("b", "b.py", 2, ""), ("c", "c.py", 3, ""))
EVAL: Entry = ("_PyEval_EvalFrameDefault", "", 0, "libpython")
MALLOC, CALL, MAIN = (("malloc", "", 0, "libc"), ("call", "", 0, "libpython"), ("main", "", 0, "python"))


@pytest.mark.parametrize(
    ("python", "begins", "native", "kept", "expected"),
    [
        ([], [], [MALLOC, MAIN], -1, [MALLOC, MAIN]),
        ([A], [True], [MALLOC, EVAL, MAIN], -1, [MALLOC, A, MAIN]),
        ([A, B], [False, True], [MALLOC, EVAL, MAIN], -1, [MALLOC, A, B, MAIN]),
        ([A, B], [True, True], [MALLOC, EVAL, CALL, EVAL, MAIN], -1, [MALLOC, A, CALL, B, MAIN]),
        ([A, B, C], [True, False, True], [EVAL, CALL, EVAL, MAIN], -1, [A, CALL, B, C, MAIN]),
        ([A, B], [True, True], [MALLOC, EVAL, CALL, EVAL, MAIN], 1, [MALLOC, A]),
        ([A, B], [False, True], [MALLOC, EVAL, MAIN], 1, [MALLOC, A]),
        ([A], [True], [MALLOC, EVAL, CALL, EVAL, MAIN], -1, [MALLOC, EVAL, CALL, A, MAIN]),
        ([A, B], [True, True], [MALLOC, EVAL, MAIN], -1, [A, B]),
        ([A], [True], [MALLOC], -1, [A]),
    ],
    ids=["no Python", "one", "inlined call", "call through C", "both", "beneath the tracker", "kept inlined",
         "evaluation that began nothing yet", "stripped interpreter", "no interpreter"],
)  # fmt: skip
def test_python_frames_among_native_ones(
    python: list[Entry], begins: list[bool], native: list[Entry], kept: int, expected: list[Entry]
) -> None:
    assert mix(python, begins, native, kept) == expected


@pytest.mark.skipif(not available("address"), reason="the C compiler has no AddressSanitizer")
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizer is preloaded as Linux does it")
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_damaged_captures_under_a_sanitizer(form: str, tmp_path: Path) -> None:
    import sysconfig

    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        pytest.skip("Python's headers are not there")
    extension = tmp_path / "captures.so"
    source = Path(captures.__file__).with_name("_captures.c")
    build = ["-shared", "-fPIC", "-g", "-O1", "-std=gnu11", *FLAGS["address"], f"-I{include}", source, "-o", extension]
    subprocess.run([compiler(), *build], check=True, timeout=120)
    sample = capture(tmp_path / "some.bin", compressed=form == "packed")
    libraries = [
        subprocess.run(
            [compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    options = {"ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "PYTHONMALLOC": "malloc"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("captured.py"), extension, sample, "200"],
        env={**os.environ, **options, "LD_PRELOAD": " ".join(libraries)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tried, read, refused = map(int, done.stdout.split())
    assert tried == 200
    assert min(read, refused) > 20


def test_a_callback_that_a_capture_began_in_is_no_frame() -> None:
    """memray takes over the stack of each thread as it is then, and sees no callback of ``sys.monitoring`` return."""
    inner: Entry = ("dumps", json.__file__, 3, "")
    callback: Entry = ("_on_call", stacks.__file__.replace("stacks.py", "probes/primitives.py"), 5, "")
    user: Entry = ("work", "/somewhere/script.py", 7, "")
    assert [frame.function for frame in named(([callback, user], [callback, user]))] == ["script.work"]
    native: Entry = ("memcpy_of_theirs", "", 0, "/lib/libtheirs.so")
    python = [inner, callback, user]
    assert named((python, [native, *python])) == named(([user], [native, user]))
    own: Entry = ("rows", stacks.__file__, 9, "")
    assert named(([own, user], [own, user])) == stacks.OWN_STACK
