"""Thread pools that carry a span's work, and the primitives of CPython and numpy told by ``sys.monitoring``."""

from __future__ import annotations

import asyncio
import io
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copytrace.probes import Probe, Site, attach_all
from copytrace.probes.primitives import SMALLEST
from copytrace.probes.python import PROBE, Carrier, Primitives
from copytrace.recorder import parent_span, recorder, thread_state
from probed import calls
from spooled import recording

N = 1013


@pytest.fixture(autouse=True)
def _nothing_open() -> Iterator[None]:
    yield
    assert thread_state().current == 0
    assert thread_state().pending == []
    assert not thread_state().busy


def primitives() -> Probe:
    return Probe(name="python", library="python", module="sys", switches=(Primitives(),))


def carrier(*sites: Site) -> Probe:
    return Probe(name="python", library="python", module="sys", switches=(Carrier(),), sites=sites)


class TestCarrier:
    def test_work_of_a_pool_belongs_to_the_span_that_submitted_it(self, tmp_path: Path) -> None:
        moments: list[tuple[int, int]] = []

        def work() -> int:
            calls.function(b"x")
            moments.append((recorder.stamp(), threading.get_ident()))
            return 5

        with ThreadPoolExecutor(2) as pool:
            pool.submit(int).result()
            with recording(tmp_path, carrier(Site(target="probed.calls:function", kind="copy"))) as recorded:
                with recorder.operation("a"):
                    assert pool.submit(work).result() == 5
                pool.submit(work).result()
                with recorder.operation("b"):
                    assert list(pool.map(lambda _: work(), range(2))) == [5, 5]
        first, second = recorded.named("copytrace.operation")
        assert [span.parent for span in recorded.named("probed.calls.function")] == [first.id, 0, second.id, second.id]
        assert [recorded.innermost_at(*moment) for moment in moments] == [first.id, 0, second.id, second.id]

    def test_nothing_else_of_the_context_goes_along(self, tmp_path: Path) -> None:
        import contextvars

        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
        with ThreadPoolExecutor(1) as pool, recording(tmp_path, carrier()), recorder.operation("a"):
            variable.set("set")
            assert pool.submit(variable.get).result() == "unset"
            assert pool.submit(parent_span.get).result() == parent_span.get() != 0
        assert variable.get() == "set"

    def test_worker_is_clean_afterwards(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(1) as pool, recording(tmp_path, carrier()):
            with recorder.operation("a"):
                pool.submit(int).result()
            assert pool.submit(parent_span.get).result() == 0
            assert pool.submit(lambda: thread_state().current).result() == 0

    def test_errors_and_arguments_are_those_of_the_original(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(1) as pool, recording(tmp_path, carrier()), recorder.operation("a"):
            with pytest.raises(KeyError, match="bad"):
                pool.submit(calls.fails, "bad").result()
            assert pool.submit(int, "11", base=2).result() == 3
            assert pool.submit(dict, fn=1, span=2, function=3).result() == {"fn": 1, "span": 2, "function": 3}
            with pytest.raises(TypeError):
                pool.submit()  # type: ignore[call-arg]

    def test_subclass_that_overrides_submit(self, tmp_path: Path) -> None:
        class Counting(ThreadPoolExecutor):
            count = 0

            def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
                self.count += 1
                return super().submit(fn, *args, **kwargs)

        with Counting(1) as pool, recording(tmp_path, carrier()) as recorded:
            with recorder.operation("a"):
                carried = pool.submit(parent_span.get).result()
            assert pool.count == 1
        assert carried == recorded.spans[0].id

    def test_submitted_in_a_session_and_run_after_it(self, tmp_path: Path) -> None:
        gate = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            with recording(tmp_path, carrier()), recorder.operation("a"):
                pool.submit(gate.wait)
                late = pool.submit(parent_span.get)
            gate.set()
            assert late.result() == 0

    def test_argument_is_not_kept_alive(self, tmp_path: Path) -> None:
        import weakref

        class Large:
            pass

        with ThreadPoolExecutor(1) as pool, recording(tmp_path, carrier()), recorder.operation("a"):
            made = [Large()]
            watch = weakref.ref(made[0])
            # The pool itself holds arguments until the work is done; ours must hold no others.
            most = 5 if calls.python_lets_go() else 6
            assert pool.submit(sys.getrefcount, made.pop()).result() <= most
            assert watch() is None

    def test_to_thread(self, tmp_path: Path) -> None:
        async def main() -> int:
            return await asyncio.to_thread(lambda: thread_state().current)

        with (
            recording(tmp_path, carrier(Site(target="probed.calls:plain", kind="copy"))) as recorded,
            recorder.operation("a"),
        ):
            assert asyncio.run(main()) == parent_span.get()
        assert recorded.named("copytrace.operation")

    def test_original_is_back(self) -> None:
        original = vars(ThreadPoolExecutor)["submit"]
        attachment = attach_all()
        assert vars(ThreadPoolExecutor)["submit"] is not original
        attachment.detach()
        assert vars(ThreadPoolExecutor)["submit"] is original


def _file(data: bytes, directory: Path) -> mmap.mmap:
    path = directory / "mapped"
    path.write_bytes(data)
    with path.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


STRIDED = np.arange(2 * N, dtype="<i4")[::2]
FLAT = np.arange(N, dtype="<i4")
BYTES = b"z" * N

PROGRAMS: dict[str, tuple[str, str, Callable[[Path], Any], list[int]]] = {
    "ndarray.tobytes": ("numpy.ndarray.tobytes", "copy", lambda _: FLAT.tobytes(), [4 * N]),
    "ndarray.copy": ("numpy.ndarray.copy", "copy", lambda _: FLAT.copy(), [4 * N]),
    "ndarray.astype": ("numpy.ndarray.astype", "convert", lambda _: FLAT.astype("<f8"), [4 * N]),
    "ndarray.byteswap": ("numpy.ndarray.byteswap", "convert", lambda _: FLAT.byteswap(), [4 * N]),
    "ndarray.flatten": ("numpy.ndarray.flatten", "gather", lambda _: STRIDED.flatten(), [4 * N]),
    "ndarray.ravel": ("numpy.ndarray.ravel", "gather", lambda _: STRIDED.ravel(), [4 * N]),
    "ndarray.take": ("numpy.ndarray.take", "gather", lambda _: FLAT.take([1, 2]), [4 * N]),
    "memoryview.tobytes": ("memoryview.tobytes", "copy", lambda _: memoryview(BYTES).tobytes(), [N]),
    "bytes.join": ("bytes.join", "join", lambda _: b"".join([BYTES, BYTES]), []),
    "BytesIO.read": ("BytesIO.read", "copy", lambda _: io.BytesIO(BYTES).read(), []),
    "BytesIO.getvalue": ("BytesIO.getvalue", "copy", lambda _: io.BytesIO(BYTES).getvalue(), []),
    "BytesIO.getbuffer": ("BytesIO.getbuffer", "copy", lambda _: io.BytesIO(BYTES).getbuffer().nbytes, []),
    "BytesIO.readinto": ("BytesIO.readinto", "copy", lambda _: io.BytesIO(BYTES).readinto(bytearray(N)), []),
    "mmap.read": ("mmap.read", "copy", lambda directory: _file(BYTES, directory).read(), [N]),
    "bytes": ("bytes", "copy", lambda _: bytes(memoryview(BYTES)), [N]),
    "bytearray": ("bytearray", "copy", lambda _: bytearray(BYTES), [N]),
    "numpy.array": ("numpy.array", "copy", lambda _: np.array(FLAT), [4 * N]),
    "numpy.ascontiguousarray": ("numpy.ascontiguousarray", "gather", lambda _: np.ascontiguousarray(STRIDED), [4 * N]),
    "numpy.asfortranarray": (
        "numpy.asfortranarray",
        "gather",
        lambda _: np.asfortranarray(STRIDED.reshape(1, -1)[:, ::3]),
        [4 * 338],
    ),
    "numpy.concatenate": ("numpy.concatenate", "join", lambda _: np.concatenate([FLAT, FLAT]), [4 * N, 4 * N]),
}


class TestPrimitives:
    @pytest.mark.parametrize("program", list(PROGRAMS))
    def test_is_told_once_with_its_caller(self, tmp_path: Path, program: str) -> None:
        name, kind, run, inputs = PROGRAMS[program]
        run(tmp_path)
        with recording(tmp_path / "spool", primitives()) as recorded:
            run(tmp_path)
        told = recorded.named(name)
        assert len(told) == 1, recorded.names
        assert (told[0].kind, told[0].library, told[0].error) == (kind, "python", False)
        assert sorted(told[0].inputs) == sorted(inputs)
        assert told[0].exit == told[0].enter + 1
        attributes = told[0].attributes
        assert attributes["caller"].endswith("<lambda>")
        assert Path(attributes["file"]).name == Path(__file__).name
        line = Path(__file__).read_text().splitlines()[attributes["line"] - 1]
        assert program.rpartition(".")[2] in line

    def test_copyto_has_a_destination(self, tmp_path: Path) -> None:
        target = np.zeros(N)
        with recording(tmp_path, primitives()) as recorded:
            np.copyto(target, 1.0)
        span = recorded.one("numpy.copyto")
        assert (span.kind, span.inputs, span.destinations) == ("scatter", [], [8 * N])
        assert span.seen[0].address == target.ctypes.data

    def test_marks_bracket_the_primitive(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()) as recorded, recorder.operation("a"):
            FLAT.tobytes()
        outer, inner = recorded.spans
        assert inner.parent == outer.id
        assert [span for _, _, span in recorded.marks] == [outer.id, inner.id, outer.id, 0]

    @pytest.mark.parametrize(("size", "told"), [(SMALLEST - 1, 0), (SMALLEST, 1)])
    def test_threshold(self, tmp_path: Path, size: int, told: int) -> None:
        data = np.zeros(size, "u1")
        with recording(tmp_path, primitives()) as recorded:
            data.tobytes()
            bytes(data)
        assert len(recorded.spans) == 2 * told

    def test_what_copies_nothing_is_not_told(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()) as recorded:
            FLAT.ravel()
            FLAT.reshape(-1, 1)
            np.frombuffer(BYTES, "u1")
            memoryview(BYTES).cast("B")
            bytes(1000)
            bytes([1, 2, 3])
            np.array([1.0] * 1000)
            bytearray(1000)
            " ".join(["a", "b"])
        assert recorded.spans == []

    def test_bytes_of_bytes_is_the_same_object(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()) as recorded:
            assert bytes(BYTES) is BYTES
        assert recorded.spans == []

    def test_bound_method_that_was_stored(self, tmp_path: Path) -> None:
        stored = FLAT.tobytes
        with recording(tmp_path, primitives()) as recorded:
            stored()
        assert recorded.one("numpy.ndarray.tobytes").inputs == [4 * N]

    def test_same_place_again_and_again(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()) as recorded:
            for _ in range(5):
                FLAT.tobytes()
        assert len(recorded.named("numpy.ndarray.tobytes")) == 5

    def test_small_then_large_at_one_place(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()) as recorded:
            for size in (1, 5000):
                np.zeros(size, "u1").tobytes()
        assert recorded.one("numpy.ndarray.tobytes").inputs == [5000]

    def test_in_the_next_session_too(self, tmp_path: Path) -> None:
        def work() -> bytes:
            return FLAT.tobytes()

        for name in "abc":
            with recording(tmp_path / name, primitives()) as recorded:
                work()
            assert len(recorded.spans) == 1
            work()

    def test_place_that_was_left_alone_is_watched_again(self, tmp_path: Path) -> None:
        def work(value: Any) -> Any:
            return value.copy()

        with recording(tmp_path / "a", primitives()) as recorded:
            work({})
            work(FLAT)
        assert recorded.spans == []
        with recording(tmp_path / "b", primitives()) as recorded:
            work(FLAT)
        assert len(recorded.spans) == 1

    def test_errors_pass_and_are_noted(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()) as recorded, pytest.raises(TypeError):
            FLAT.astype("no such type")
        assert recorded.one("numpy.ndarray.astype").error

    def test_numpys_python_functions_are_told_by_what_they_call(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()) as recorded:
            np.copy(FLAT)
        span = recorded.one("numpy.array")
        assert span.attributes["caller"].endswith("test_numpys_python_functions_are_told_by_what_they_call")

    def test_threads(self, tmp_path: Path) -> None:
        together = threading.Barrier(3)

        def work() -> None:
            together.wait(10)
            for _ in range(50):
                FLAT.tobytes()

        with recording(tmp_path, primitives()) as recorded:
            started = [threading.Thread(target=work) for _ in range(3)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
        assert len(recorded.spans) == 150
        assert len({span.thread for span in recorded.spans}) == 3

    def test_beside_a_profiler_and_a_tracer(self, tmp_path: Path) -> None:
        profiled: list[str] = []
        sys.setprofile(
            lambda _frame, event, argument: (
                profiled.append(getattr(argument, "__name__", event)) if event == "c_call" else None
            )
        )
        try:
            with recording(tmp_path, primitives()) as recorded:
                FLAT.tobytes()
        finally:
            sys.setprofile(None)
        assert "tobytes" in profiled
        assert len(recorded.named("numpy.ndarray.tobytes")) == 1


class TestToolIds:
    def test_takes_another_when_one_is_taken(self, tmp_path: Path) -> None:
        sys.monitoring.use_tool_id(4, "somebody")
        try:
            with recording(tmp_path, primitives()) as recorded:
                assert sys.monitoring.get_tool(3) == "copytrace"
                FLAT.tobytes()
            assert sys.monitoring.get_tool(4) == "somebody"
        finally:
            sys.monitoring.free_tool_id(4)
        assert len(recorded.spans) == 1
        assert sys.monitoring.get_tool(3) is None

    def test_goes_without_when_all_are_taken(self, tmp_path: Path) -> None:
        taken = [4, 3, 5, 2]
        for tool in taken:
            sys.monitoring.use_tool_id(tool, f"tool {tool}")
        try:
            with recording(tmp_path, PROBE) as recorded:
                FLAT.tobytes()
                assert recorded.attachment is not None
                (found,) = recorded.attachment.statuses()
        finally:
            for tool in taken:
                sys.monitoring.free_tool_id(tool)
        assert recorded.spans == []
        assert found.status == "partial"
        assert found.reason.startswith("no id of sys.monitoring is free (tool 4, tool 3, tool 5, tool 2)")

    def test_is_free_and_silent_afterwards(self, tmp_path: Path) -> None:
        with recording(tmp_path, primitives()):
            assert sys.monitoring.get_tool(4) == "copytrace"
        assert sys.monitoring.get_tool(4) is None

    def test_never_sets_a_profile_or_trace_function(self, tmp_path: Path) -> None:
        before = (sys.getprofile(), sys.gettrace())
        with recording(tmp_path, PROBE):
            assert (sys.getprofile(), sys.gettrace()) == before


def test_status_of_the_probe(tmp_path: Path) -> None:
    with recording(tmp_path, PROBE) as recorded:
        assert recorded.attachment is not None
        (found,) = recorded.attachment.statuses()
    assert (found.status, found.version) == ("attached", sys.version.split()[0])
    assert [site["name"] for site in found.sites] == ["concurrent.futures.ThreadPoolExecutor.submit", "sys.monitoring"]
