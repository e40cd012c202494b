"""Recording one of so many outermost calls, with the extension and without."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

import copytrace
from copytrace import recorder as module
from copytrace.errors import CopytraceError
from copytrace.model import MUTED
from copytrace.recorder import parent_span, recorder

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 100_003


def array(chunks: int = 1) -> zarr.Array[Any]:
    made = zarr.create_array(
        MemoryStore(), shape=(SIZE * chunks,), chunks=(SIZE,), dtype="u1", compressors=None, fill_value=0
    )
    made[...] = 7
    return made


def note(session: copytrace.session) -> str:
    (found,) = [note for note in session.report.coverage.notes if note.startswith("sampled")]
    return found


@pytest.mark.parametrize(("sample", "calls", "recorded"), [(1, 7, 7), (2, 7, 4), (3, 7, 3), (7, 7, 1), (100, 7, 1)])
def test_one_of_so_many_calls_is_recorded_with_all_that_it_calls(sample: int, calls: int, recorded: int) -> None:
    z = array(3)
    with copytrace.session(memray=False, sample=sample) as s:
        for _ in range(calls):
            assert (z[...] == 7).all()
    (path,) = s.report.paths
    assert (path.operations, path.chunks) == (recorded, 3 * recorded)
    assert path.payload_bytes == path.copied_bytes == 3 * SIZE * recorded
    if sample > 1:
        assert note(s) == f"sampled: of {calls} outermost calls {recorded} were recorded (one of {sample})"
    assert parent_span.get() == 0


def test_with_memory_nothing_of_what_is_left_out_is_on_a_path() -> None:
    z = array()
    with copytrace.session(sample=4) as s:
        kept = [z[...] for _ in range(8)]
    assert len(kept) == 8
    (path,) = s.report.paths
    assert (path.operations, path.copied_bytes) == (2, 2 * SIZE)
    assert sum(buffer.bytes for buffer in path.buffers if buffer.role == "result") < 2.1 * SIZE


def test_primitives_inside_what_is_left_out_are_not_recorded() -> None:
    class Careless(MemoryStore):
        async def set(self, key: str, value: Any, byte_range: Any = None) -> None:
            await super().set(key, value.from_bytes(value.as_numpy_array().tobytes()), byte_range)

    z = zarr.create_array(Careless(), shape=(SIZE,), chunks=(SIZE,), dtype="u1", compressors=None, fill_value=0)
    with copytrace.session(memray=False, sample=3) as s:
        for number in range(1, 7):
            z[...] = number
    steps = [step for path in s.report.paths for step in path.steps if step.primitive == "numpy.ndarray.tobytes"]
    assert sum(step.count for step in steps) == 2


def test_what_is_named_by_hand_is_recorded_unless_it_is_inside_of_what_is_left_out() -> None:
    z = array()
    with copytrace.session(memray=False, sample=5) as s:
        for _ in range(4):
            with copytrace.operation("ours", payload_bytes=SIZE):
                z[...]
    (path,) = [path for path in s.report.paths if "ours" in path.label]
    assert path.operations == 4


def test_tasks_and_threads_are_left_out_with_the_call_that_started_them() -> None:
    source = array(4)

    async def read() -> list[Any]:
        return await asyncio.gather(*(source.async_array.getitem(Ellipsis) for _ in range(6)))

    with copytrace.session(memray=False, sample=3) as s:
        results = asyncio.run(read())
    assert all((np.asarray(one) == 7).all() for one in results)
    assert sum(path.operations for path in s.report.paths) == 2
    assert sum(path.payload_bytes for path in s.report.paths) == 2 * 4 * SIZE

    with copytrace.session(memray=False, sample=3) as s, ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: source[...].sum(), range(9)))
    assert sum(path.operations for path in s.report.paths) == 3


def test_a_task_that_was_left_out_is_recorded_by_the_next_session() -> None:
    z = array()

    async def main() -> copytrace.session:
        go = asyncio.Event()

        async def later() -> None:
            await go.wait()
            await z.async_array.getitem(Ellipsis)

        with copytrace.session(memray=False, sample=2):
            await z.async_array.getitem(Ellipsis)
            parent_span.set(MUTED | recorder.next_span())
            task = asyncio.create_task(later())
            parent_span.set(0)
        with copytrace.session(memray=False) as s:
            go.set()
            await task
        return s

    assert sum(path.operations for path in asyncio.run(main()).report.paths) == 1


def test_errors_inside_of_what_is_left_out_are_those_of_the_program() -> None:
    z = array()
    with copytrace.session(memray=False, sample=2) as s:
        z[...]
        with pytest.raises(IndexError):
            z[SIZE + 1]
        z[...]
    assert sum(path.operations for path in s.report.paths) == 2
    assert parent_span.get() == 0


def test_an_inner_session_samples_as_the_outer_one() -> None:
    z = array()
    with copytrace.session(memray=False, sample=2) as outer, copytrace.session(memray=False) as inner:
        for _ in range(4):
            z[...]
    assert inner.report.paths[0].operations == outer.report.paths[0].operations == 2
    assert "one of 2 calls was recorded, as the session around this one does" in inner.report.coverage.notes


@pytest.mark.parametrize("sample", [0, -3])
def test_less_than_one_is_refused(sample: int) -> None:
    with pytest.raises(CopytraceError, match=f"sample: {sample}; give 1"):
        copytrace.session(sample=sample)


@pytest.mark.skipif(module.native is None, reason="the extension is not built: everything else ran in Python")
def test_without_the_extension_it_is_the_same(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; sys.modules['copytrace._spans'] = None\n"
        "import json, copytrace, zarr\n"
        "from copytrace.recorder import native\n"
        "from zarr.storage import MemoryStore\n"
        f"z = zarr.create_array(MemoryStore(), shape=({SIZE},), chunks=({SIZE},), dtype='u1', compressors=None)\n"
        "z[...] = 7\n"
        "with copytrace.session(memray=False, sample=3) as s:\n"
        "    for _ in range(7): z[...]\n"
        "path, = s.report.paths\n"
        "print(json.dumps([native is None, path.operations, path.copied_bytes, list(s.report.coverage.notes)]))\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    bare, operations, copied, notes = json.loads(done.stdout)
    assert (bare, operations, copied) == (True, 3, 3 * SIZE)
    assert "sampled: of 7 outermost calls 3 were recorded (one of 3)" in notes


def test_on_the_command_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import zarr\nfrom zarr.storage import MemoryStore\n"
        f"z = zarr.create_array(MemoryStore(), shape=({SIZE},), chunks=({SIZE},), dtype='u1', compressors=None)\n"
        "z[...] = 7\nfor _ in range(11): z[...]\n"
    )
    command = [sys.executable, "-m", "copytrace", "run", "-q", "--no-memray", "--sample", "4", "program.py"]
    subprocess.run(command, check=True, cwd=tmp_path)
    report = copytrace.load(tmp_path / "program.copytrace").report
    (read,) = [path for path in report.paths if path.direction == "read"]
    assert read.operations in (2, 3)
    assert any(note.startswith("sampled: of ") for note in report.coverage.notes)
