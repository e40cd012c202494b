"""Stand-ins: what is called goes on as without them, and the marks say which span is innermost at each moment."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import pickle
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copytrace.probes import Probe, Site
from copytrace.recorder import parent_span, recorder, thread_state
from probed import calls
from spooled import Recorded, recording

NAMES = [
    name for name, value in vars(calls).items() if callable(value) and not isinstance(value, type) and name != "twice"
]
METHODS = ["Base.method", "Base.made", "Base.still", "Base.__getitem__"]


def probe(**options: Any) -> Probe:
    sites = tuple(
        Site(target=f"probed.calls:{name}", kind="request", inputs=("data",), output=True, **options)
        for name in (*NAMES, *METHODS)
    )
    return Probe(name="probed", library="probed", sites=sites)


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    calls.log.clear()
    yield
    assert thread_state().current == 0
    assert thread_state().base is None
    assert thread_state().pending == []
    assert not thread_state().busy
    assert parent_span.get() == 0


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    with recording(tmp_path, probe()) as session:
        yield session


class TestPlainFunctions:
    def test_span_with_input_and_output(self, tmp_path: Path) -> None:
        data = b"x" * 1009
        with recording(tmp_path, probe()) as recorded:
            assert calls.function(data, 5, scale=2) == data * 2
        span = recorded.one("probed.calls.function")
        assert (span.inputs, span.outputs, span.error, span.parent) == ([1009], [2018], False, 0)
        assert span.thread == threading.get_ident()
        assert 0 < span.started <= span.ended
        assert [mark[2] for mark in recorded.marks] == [span.id, 0]
        assert (span.enter, span.exit) == (1, 2)

    def test_exception_is_the_same_with_one_frame_more(self, tmp_path: Path) -> None:
        error = KeyError("mine")
        with recording(tmp_path, probe()) as recorded, pytest.raises(KeyError) as caught:
            calls.fails(error)
        assert caught.value.args == (error,)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.filename for frame in frames].count("copytrace") == 1
        assert len(frames) == 3
        assert recorded.one("probed.calls.fails").error

    @pytest.mark.usefixtures("recorded")
    def test_arguments_are_checked_by_the_original(self) -> None:
        with pytest.raises(TypeError, match=r"function\(\) got an unexpected keyword argument 'nonsense'"):
            calls.function(b"", nonsense=1)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            calls.function()

    def test_argument_by_name(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            calls.Base().method(extra=1, data=b"y" * 11)
        assert recorded.one("probed.calls.Base.method").inputs == [11]

    @pytest.mark.usefixtures("recorded")
    @pytest.mark.parametrize("named", [False, True])
    def test_argument_is_not_kept_alive(self, named: bool) -> None:
        class Large:
            pass

        def call() -> bool:
            made = [Large()]
            watch = weakref.ref(made[0])
            return calls.lets_go(data=made.pop(), watch=watch) if named else calls.lets_go(made.pop(), watch)

        assert call() == calls.python_lets_go()

    @pytest.mark.usefixtures("recorded")
    def test_result_is_not_kept_alive(self) -> None:
        made = calls.function(np.ones(1000))
        watch = weakref.ref(made)
        del made
        assert watch() is None

    def test_nested_calls_have_parents(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded, recorder.operation("outer"):
            calls.decorated(b"1")
            calls.function(b"2")
        outer = recorded.one("copytrace.operation")
        assert recorded.one("probed.calls.decorated").parent == outer.id
        assert recorded.one("probed.calls.function").parent == outer.id

    def test_two_threads(self, tmp_path: Path) -> None:
        barrier = threading.Barrier(2)

        def work() -> None:
            barrier.wait(10)
            for _ in range(500):
                calls.function(b"abc")

        with recording(tmp_path, probe()) as recorded:
            started = [threading.Thread(target=work) for _ in range(2)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
        spans = recorded.named("probed.calls.function")
        assert len(spans) == 1000
        assert {span.parent for span in spans} == {0}
        for span in spans:
            assert recorded.innermost_at(span.enter, span.thread) == span.id
            assert recorded.innermost_at(span.exit, span.thread) == 0


class TestFormsOfMethods:
    def test_all_are_called_as_before(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            base, derived = calls.Base(), calls.Derived()
            assert base.method(b"1") == b"1"
            assert calls.Base.method(base, b"1") == b"1"
            assert derived.method(b"1") == b"1"
            assert derived.inherited(b"1") == b"1"
            assert calls.Base.made(b"1") == (calls.Base, b"1")
            assert calls.Derived.made(b"1") == (calls.Derived, b"1")
            assert derived.made(b"1") == (calls.Derived, b"1")
            assert calls.Base.still(b"1") == b"1"
            assert base.still(b"1") == b"1"
            assert base[3:4] == slice(3, 4)
        assert recorded.names == [
            *["probed.calls.Base.method"] * 3,
            *["probed.calls.Base.made"] * 3,
            *["probed.calls.Base.still"] * 2,
            "probed.calls.Base.__getitem__",
        ]
        assert all(span.inputs == [1] for span in recorded.spans[:8])

    def test_signatures_names_and_docstrings(self, tmp_path: Path) -> None:
        looks = {
            "function": lambda: calls.function,
            "method": lambda: calls.Base.method,
            "bound": lambda: calls.Base().method,
            "classmethod": lambda: calls.Base.made,
            "staticmethod": lambda: calls.Base.still,
            "coroutine": lambda: calls.waits,
            "decorated": lambda: calls.decorated,
        }

        def of(value: Any) -> tuple[Any, ...]:
            return (
                inspect.signature(value),
                value.__name__,
                value.__qualname__,
                value.__module__,
                value.__doc__,
                inspect.iscoroutinefunction(value),
                inspect.ismethod(value),
                inspect.getsource(value),
            )

        before = {name: of(look()) for name, look in looks.items()}
        with recording(tmp_path, probe()):
            assert {name: of(look()) for name, look in looks.items()} == before

    @pytest.mark.usefixtures("recorded")
    def test_pickling(self) -> None:
        instance = calls.Base(5)
        assert pickle.loads(pickle.dumps(instance)) == instance
        assert pickle.loads(pickle.dumps(instance.method))(b"1") == b"1"
        assert pickle.loads(pickle.dumps(calls.Base.made))(b"1") == (calls.Base, b"1")
        assert pickle.loads(pickle.dumps(calls.function)) is calls.function


class TestCoroutines:
    def test_span_ends_with_the_coroutine(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            assert asyncio.run(calls.outer(b"x" * 7)) == b"x" * 7
        outer, waits, plain = recorded.spans
        assert [span.name.rsplit(".", 1)[1] for span in recorded.spans] == ["outer", "waits", "plain"]
        assert waits.parent == plain.parent == outer.id
        assert outer.enter < waits.enter < waits.exit < plain.enter < plain.exit < outer.exit
        assert (outer.inputs, outer.outputs) == ([7], [7])

    def test_marks_of_one_suspension(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            asyncio.run(calls.outer(b"x"))
        outer, waits, plain = (span.id for span in recorded.spans)
        assert [span for _, _, span in recorded.marks] == [outer, waits, 0, waits, outer, plain, outer, 0]

    def test_two_tasks_on_one_loop_interleave(self, tmp_path: Path) -> None:
        moments: list[tuple[int, int, str]] = []

        async def task(name: str, gate: asyncio.Event) -> None:
            with_before = recorder.stamp()
            moments.append((with_before, threading.get_ident(), name + " outside"))
            await calls.outer(name.encode(), gate)

        async def main() -> None:
            gates = {name: asyncio.Event() for name in "ab"}
            running = [asyncio.create_task(task(name, gates[name])) for name in "ab"]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            moments.append((recorder.stamp(), threading.get_ident(), "loop"))
            gates["b"].set()
            await running[1]
            moments.append((recorder.stamp(), threading.get_ident(), "loop"))
            gates["a"].set()
            await running[0]

        with recording(tmp_path, probe()) as recorded:
            asyncio.run(main())
        for sequence, thread, _ in moments:
            assert recorded.innermost_at(sequence, thread) == 0
        first, second = recorded.named("probed.calls.outer")
        assert first.enter < second.enter < second.exit < first.exit
        inner = {span.parent: span for span in recorded.named("probed.calls.waits")}
        owner = {first.id: first.id, second.id: second.id, inner[first.id].id: first.id, inner[second.id].id: second.id}
        owner |= {span.id: span.parent for span in recorded.named("probed.calls.plain")}
        # Between the loop's own moments only spans of the task that was let go on are innermost.
        after_b = moments[-1][0]
        before_b = moments[-2][0]
        assert {owner[span] for sequence, _, span in recorded.marks if before_b < sequence < after_b and span} == {
            second.id
        }
        assert {owner[span] for sequence, _, span in recorded.marks if sequence > after_b and span} == {first.id}

    def test_only_the_innermost_of_a_chain_marks_a_suspension(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            asyncio.run(calls.outer(b"x"))
        suspended = [number for number, (_, _, span) in enumerate(recorded.marks) if span == 0]
        assert len(suspended) == 2

    def test_exception_is_the_same_with_one_frame_more(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded, pytest.raises(KeyError) as caught:
            asyncio.run(calls.fails_later("mine"))
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert [frame.filename for frame in frames].count("copytrace") == 1
        assert recorded.one("probed.calls.fails_later").error

    def test_thrown_exceptions_leave_one_frame(self, tmp_path: Path) -> None:
        async def main() -> None:
            gate = asyncio.Event()
            task = asyncio.create_task(calls.outer(b"1", gate))
            await asyncio.sleep(0)
            task.cancel()
            await task

        with recording(tmp_path, probe()), pytest.raises(asyncio.CancelledError) as caught:
            asyncio.run(main())
        ours = [
            frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == "copytrace"
        ]
        assert ours == ["probed.calls.outer", "probed.calls.waits"]

    def test_cancellation_runs_what_tidies_up(self, tmp_path: Path) -> None:
        async def main() -> None:
            task = asyncio.create_task(calls.tidies_up(b"1"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()

        with recording(tmp_path, probe()) as recorded:
            asyncio.run(main())
        assert calls.log == ["cancelled", "tidied up"]
        assert recorded.one("probed.calls.tidies_up").error

    def test_timeout(self, tmp_path: Path) -> None:
        async def main() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(calls.tidies_up(b"1"), 0.01)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await calls.tidies_up(b"1")

        with recording(tmp_path, probe()) as recorded:
            asyncio.run(main())
        assert [span.error for span in recorded.spans] == [True, True]

    def test_cancellation_that_is_swallowed(self, tmp_path: Path) -> None:
        async def main() -> bytes:
            task = asyncio.create_task(calls.resists(b"kept"))
            await asyncio.sleep(0)
            task.cancel()
            return await task

        with recording(tmp_path, probe()) as recorded:
            assert asyncio.run(main()) == b"kept"
        assert not recorded.one("probed.calls.resists").error

    @pytest.mark.usefixtures("recorded")
    def test_is_a_real_coroutine(self) -> None:
        made = calls.waits(b"1")
        assert inspect.iscoroutine(made)
        assert asyncio.iscoroutine(made)
        assert isinstance(made, types.CoroutineType)
        made.close()

    def test_driven_by_hand(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            made = calls.waits(b"1")
            assert made.send(None) is None
            assert thread_state().current == 0
            assert parent_span.get() == 0
            with pytest.raises(StopIteration) as stopped:
                made.send(None)
            assert stopped.value.value == b"1"
            del stopped
            thrown = calls.waits(b"1")
            thrown.send(None)
            with pytest.raises(ZeroDivisionError):
                thrown.throw(ZeroDivisionError)
            closed = calls.waits(b"1")
            closed.send(None)
            closed.close()
            never = calls.waits(b"1")
            never.close()
        assert [span.error for span in recorded.spans] == [False, True, True]

    @pytest.mark.usefixtures("recorded")
    def test_never_awaited_warns_as_before(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls.waits(b"1")
            gc.collect()
        assert [str(warning.message) for warning in caught] == ["coroutine 'waits' was never awaited"]

    @pytest.mark.usefixtures("recorded")
    def test_argument_is_not_kept_alive(self) -> None:
        class Large:
            pass

        async def call() -> bool:
            made = [Large()]
            watch = weakref.ref(made[0])
            return await calls.lets_go_async(made.pop(), watch)

        assert asyncio.run(call())

    @pytest.mark.usefixtures("recorded")
    def test_no_cycle_keeps_an_exceptions_frames(self) -> None:
        class Large:
            pass

        watches = []

        async def main() -> None:
            held = Large()
            watches.append(weakref.ref(held))
            gate = asyncio.Event()
            task = asyncio.create_task(calls.outer(held, gate))
            del held
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        gc.disable()
        try:
            asyncio.run(main())
            assert watches[0]() is None
        finally:
            gc.enable()

    def test_context_of_tasks_is_their_own(self, tmp_path: Path) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

        async def task(name: str) -> str:
            variable.set(name)
            await calls.outer(name.encode())
            return variable.get()

        async def main() -> list[str]:
            return await asyncio.gather(task("a"), task("b"))

        with recording(tmp_path, probe()):
            assert asyncio.run(main()) == ["a", "b"]

    def test_parent_goes_along_into_threads_and_other_loops(self, tmp_path: Path) -> None:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            with recording(tmp_path, probe()) as recorded, recorder.operation("outside"):
                asyncio.run_coroutine_threadsafe(calls.waits(b"1"), loop).result(10)

                async def main() -> None:
                    await asyncio.to_thread(calls.function, b"2")

                asyncio.run(main())
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        operation = recorded.one("copytrace.operation")
        waits, function = recorded.one("probed.calls.waits"), recorded.one("probed.calls.function")
        assert waits.parent == function.parent == operation.id
        assert waits.thread == thread.ident
        assert len({waits.thread, function.thread, operation.thread}) == 3

    def test_session_that_ends_in_between(self, tmp_path: Path) -> None:
        made = []
        with recording(tmp_path / "a", probe()) as recorded:
            waiting, unstarted = calls.waits(b"1"), calls.waits(b"2")
            waiting.send(None)
            made += [waiting, unstarted]
        assert recorded.spans == []
        with pytest.raises(StopIteration):
            made[0].send(None)
        made[1].send(None)
        with pytest.raises(StopIteration) as stopped:
            made[1].send(None)
        assert stopped.value.value == b"2"


class TestGenerators:
    def test_generator(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            made = calls.numbers(3)
            assert next(made) == b"\x00" * 100
            assert thread_state().current == 0
            assert made.send("hello") == b"\x01" * 100
            assert list(made) == [b"\x02" * 100]
        span = recorded.one("probed.calls.numbers")
        assert calls.log == ["hello", "numbers closed"]
        assert (span.outputs, span.error) == ([100, 100, 100], False)
        assert [mark[2] for mark in recorded.marks] == [span.id, 0] * 4

    @pytest.mark.usefixtures("recorded")
    def test_value_of_a_generator(self) -> None:
        def whole() -> Iterator[bytes]:
            assert (yield from calls.numbers(1)) == "done"

        assert len(list(whole())) == 1

    def test_thrown_into_and_closed_early(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            made = calls.numbers(3)
            next(made)
            assert made.throw(ValueError("bad")) == b"caught" * 100
            made.close()
            assert calls.log == ["thrown bad", "numbers closed"]
        assert not recorded.one("probed.calls.numbers").error

    def test_async_generator(self, tmp_path: Path) -> None:
        async def main() -> list[bytes]:
            return [item async for item in calls.stream(3)]

        with recording(tmp_path, probe()) as recorded:
            assert len(asyncio.run(main())) == 3
        span = recorded.one("probed.calls.stream")
        assert calls.log == ["stream closed"]
        assert (span.outputs, span.error) == ([100, 100, 100], False)

    def test_async_generator_closed_early(self, tmp_path: Path) -> None:
        async def main() -> None:
            made = calls.stream(3)
            assert inspect.isasyncgen(made)
            async for _item in made:
                break
            await made.aclose()
            assert calls.log == ["stream closed"]

        with recording(tmp_path, probe()) as recorded:
            asyncio.run(main())
        assert not recorded.one("probed.calls.stream").error

    def test_consumer_of_a_stream_is_not_in_its_span(self, tmp_path: Path) -> None:
        async def main() -> None:
            async for _item in calls.stream(2):
                await calls.plain(b"1")

        with recording(tmp_path, probe()) as recorded:
            asyncio.run(main())
        assert {span.parent for span in recorded.named("probed.calls.plain")} == {0}


class TestWhatReturnsAwaitables:
    @pytest.mark.parametrize("name", ["delegates", "future", "later"])
    @pytest.mark.parametrize("await_by", ["await", "gather", "wait_for"])
    def test_span_ends_when_it_is_done(self, tmp_path: Path, name: str, await_by: str) -> None:
        async def main() -> Any:
            made = getattr(calls, f"{name}_natively")(b"x" * 13)
            assert thread_state().current == 0
            if await_by == "gather":
                return (await asyncio.gather(made))[0]
            if await_by == "wait_for":
                return await asyncio.wait_for(made, 10)
            return await made

        with recording(tmp_path, probe()) as recorded:
            assert asyncio.run(main()) == b"x" * 13
        (span,) = recorded.named(f"probed.calls.{name}_natively")
        assert (span.outputs, span.error) == ([13], False)
        assert span.exit > span.enter + 1

    @pytest.mark.usefixtures("recorded")
    def test_future_is_the_identical_one(self) -> None:
        async def main() -> None:
            future = calls.future_natively(b"1")
            assert type(future) is type(asyncio.get_running_loop().create_future())
            assert asyncio.ensure_future(future) is future
            assert await future == b"1"
            assert await future == b"1"

        asyncio.run(main())

    def test_coroutine_can_be_made_a_task(self, tmp_path: Path) -> None:
        async def main() -> Any:
            return await asyncio.create_task(calls.delegates_natively(b"12"))

        with recording(tmp_path, probe()) as recorded:
            assert asyncio.run(main()) == b"12"
        assert recorded.one("probed.calls.delegates_natively").outputs == [2]

    def test_failed_and_cancelled_futures(self, tmp_path: Path) -> None:
        async def main() -> None:
            with pytest.raises(KeyError):
                await calls.failing_future_natively("bad")
            cancelled = calls.future_natively(b"1")
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled

        with recording(tmp_path, probe()) as recorded:
            asyncio.run(main())
        assert [span.error for span in recorded.spans if span.name.endswith("_natively")] == [True, True]

    @pytest.mark.usefixtures("recorded")
    def test_exception_that_nobody_fetched_is_still_told(self) -> None:
        told: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
            calls.failing_future_natively("bad")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gc.collect()

        asyncio.run(main())
        assert [context["message"] for context in told] == ["Future exception was never retrieved"]

    def test_what_returns_at_once(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            assert calls.natively(b"1") == b"11"
            with pytest.raises(KeyError):
                calls.fails_natively("bad")
        assert [span.error for span in recorded.spans if "natively" in span.name] == [False, True]


class TestContainment:
    @pytest.mark.parametrize("part", ["describe", "payload", "inputs"])
    def test_errors_of_a_probe_stay_inside(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
        def broken(_call: Any) -> Any:
            raise RuntimeError("of the probe")

        options = {part: (broken,) if part == "inputs" else broken}
        site = Site(target="probed.calls:function", kind="request", **options)
        monkeypatch.delenv("COPYTRACE_STRICT")
        with contextlib.suppress(AssertionError), recording(tmp_path, Probe(name="p", library="probed", sites=(site,))):
            assert calls.function(b"1") == b"11"
            failed = (recorder.failures, recorder.first_failure)
        assert failed == (1, "probed.calls.function: RuntimeError: of the probe")

    def test_what_a_probe_calls_is_not_recorded(self, tmp_path: Path) -> None:
        def describe(_call: Any) -> dict[str, str]:
            return {"label": calls.Base().method("called by the probe")}

        sites = (
            Site(target="probed.calls:function", kind="request", describe=describe),
            Site(target="probed.calls:Base.method", kind="request"),
        )
        with recording(tmp_path, Probe(name="probed", library="probed", sites=sites)) as recorded:
            calls.function(b"1")
        assert recorded.names == ["probed.calls.function"]
        assert recorded.spans[0].attributes == {"label": "called by the probe"}

    def test_calls_that_need_not_be_recorded(self, tmp_path: Path) -> None:
        site = Site(target="probed.calls:function", kind="gather", unless=lambda args, _kwargs: len(args[0]) < 3)
        with recording(tmp_path, Probe(name="probed", library="probed", sites=(site,))) as recorded:
            calls.function(b"12")
            calls.function(b"123")
        assert len(recorded.spans) == 1

    def test_captured_while_patched_and_called_afterwards(self, tmp_path: Path) -> None:
        with recording(tmp_path, probe()) as recorded:
            captured = [
                calls.function,
                calls.Base().method,
                calls.Base.made,
                calls.waits,
                calls.numbers,
                calls.natively,
            ]
        captured[0](b"1")
        captured[1](b"1")
        captured[2](b"1")
        assert asyncio.run(captured[3](b"1")) == b"1"
        assert type(captured[4](2)) is types.GeneratorType
        captured[5](b"1")
        assert recorded.spans == []
        with recording(tmp_path / "again", probe()) as again:
            captured[0](b"1")
        assert again.names == ["probed.calls.function"]

    def test_stack_shows_the_site_in_a_file_called_copytrace(self, tmp_path: Path) -> None:
        frames: list[tuple[str, str]] = []

        class Looks(bytes):
            def __mul__(self, _other: Any) -> Any:
                frame: types.FrameType | None = sys._getframe()
                while frame is not None:
                    frames.append((frame.f_code.co_filename, frame.f_code.co_qualname))
                    frame = frame.f_back
                return b""

        with recording(tmp_path, probe()):
            calls.function(Looks())
        assert frames.count(("copytrace", "probed.calls.function")) == 1


def test_functools_partial_stands_for_compiled_functions() -> None:
    assert type(calls.natively) is functools.partial
