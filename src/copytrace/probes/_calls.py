"""Stand-ins for the callables at probed sites: each opens a span, calls the original and closes the span.

A stand-in's frame is on the stack of every allocation made below it; its code is named after the site, in a file called
``copytrace``. No stand-in keeps an argument, a result or anything in between alive longer than the original would.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator
from functools import update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any

from copytrace.places import OWN_FILE
from copytrace.probes._span import Plan, Span
from copytrace.recorder import pack_span, parent_span, recorder, threads

if TYPE_CHECKING:
    from collections.abc import Callable

_NOTHING: tuple[Any, ...] = ()
_NO_NAMES: dict[str, Any] = {}


def stand_in(plan: Plan, original: Any) -> FunctionType:
    """A replacement for the callable ``original`` that takes the same arguments, ``self`` or ``cls`` among them."""
    made: Any
    if inspect.iscoroutinefunction(original):
        made = inspect.markcoroutinefunction(_awaited(plan, original))
    elif inspect.isasyncgenfunction(original):
        made = _stepping(plan, original, _with_span(plan, _as_it_was_called(_async_generator(plan.name), original)))
    elif inspect.isgeneratorfunction(original):
        made = _stepping(
            plan, original, _with_span(plan, _as_it_was_called(named(_steps_of_generator, plan.name), original))
        )
    elif type(original) is FunctionType and not hasattr(original, "__wrapped__"):
        made = named(_plain(plan, original), plan.name)
    else:
        made = named(_unknown(plan, original, _coroutine(plan.name)), plan.name)
    update_wrapper(made, original)
    assert isinstance(made, FunctionType)
    return made


def named(function: Any, name: str, *, coroutine: bool = False) -> FunctionType:
    """A copy of ``function`` whose frames say ``name`` in ``copytrace``.

    A generator function may become a coroutine function by it: one that yields to the event loop by itself, with no
    frame in between.
    """
    code = function.__code__
    flags = (code.co_flags & ~inspect.CO_GENERATOR) | inspect.CO_COROUTINE if coroutine else code.co_flags
    code = code.replace(co_name=name, co_qualname=name, co_filename=OWN_FILE, co_flags=flags)
    return FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def _plain(plan: Plan, original: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that returns when it is done: this is the frequent one, so nothing is called that need not be."""
    _, site, before, after, unless, copies = plan

    def call(*args: Any, **kwargs: Any) -> Any:
        mark, state = recorder.mark, threads.state
        if mark is None or state.busy or (unless is not None and unless(args, kwargs)):
            return original(*args, **kwargs)
        span, parent, previous, copying = recorder.next_span(), parent_span.get(), state.current, state.copying
        attributes, payload = before(span, args, kwargs) if before is not None else (0, 0)
        parent_span.set(span)
        state.current, state.copying = span, copies
        started, enter, error = time.perf_counter_ns(), mark(span), 1
        try:
            if kwargs:
                result = original(*(args, args := _NOTHING)[0], **(kwargs, kwargs := _NO_NAMES)[0])
            else:
                result = original(*(args, args := _NOTHING)[0])
            error = 0
        finally:
            state.current, state.copying = previous, copying
            parent_span.set(parent)
            if recorder.mark is mark:
                leave, ended = mark(previous), time.perf_counter_ns()
                row = pack_span(
                    span, parent, site, attributes, state.ident, enter, leave, started, ended, payload, error
                )
                recorder.close(row)
        if after is not None:
            after(span, result)
        return result

    return call


def _awaited(plan: Plan, original: Callable[..., Any]) -> FunctionType:
    """For a coroutine function: a :class:`Span` and :func:`_steps_of_coroutine` written out, since it is nearly as
    frequent.
    """
    _, site, before, after, _, _ = plan

    def steps(unstarted: _Unstarted, args: Any, kwargs: Any, caller: int) -> Generator[Any, Any, Any]:
        inner, mark, state = unstarted.take(), recorder.mark, threads.state
        if mark is None:
            return (yield from inner)
        around = parent_span.get()
        span, parent, thread = recorder.next_span(), around or caller, state.ident
        attributes, payload = before(span, args, kwargs) if before is not None else (0, 0)
        args = kwargs = sent = None
        thrown: list[BaseException] = []
        previous, base = state.current, state.base
        if base is None:
            state.base = previous
        parent_span.set(span)
        state.current = span
        started, enter, error = time.perf_counter_ns(), mark(span), 1
        try:
            while True:
                try:
                    waits_for = [inner.throw(thrown.pop()) if thrown else inner.send(sent)]
                except StopIteration as stop:
                    result = stop.value
                    break
                beneath = state.base or 0
                deeper = state.current == beneath
                if not deeper:
                    state.current = beneath
                    if recorder.mark is mark:
                        mark(beneath)
                state.base = base
                parent_span.set(around)
                try:
                    sent = yield waits_for.pop()
                except GeneratorExit:
                    state, around = threads.state, parent_span.get()
                    previous, base = state.current, state.base
                    inner.close()
                    raise
                except BaseException as exception:
                    thrown = [_without_own_frame(exception)]
                state, around = threads.state, parent_span.get()
                previous, base = state.current, state.base
                if base is None:
                    state.base = previous
                parent_span.set(span)
                state.current = span
                if not deeper and recorder.mark is mark:
                    mark(span)
            error = 0
        finally:
            state.current = previous
            state.base = base
            parent_span.set(around)
            if recorder.mark is mark:
                leave, ended = mark(previous), time.perf_counter_ns()
                row = pack_span(span, parent, site, attributes, thread, enter, leave, started, ended, payload, error)
                recorder.close(row)
        if after is not None:
            after(span, result)
        return result

    return _stepping(plan, original, _as_it_was_called(named(steps, plan.name, coroutine=True), original))


def _stepping(plan: Plan, original: Callable[..., Any], run: Callable[..., Any]) -> FunctionType:
    """For a function that returns something with steps, which ``run`` makes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        if recorder.mark is None or threads.state.busy:
            return inner
        return run(_Unstarted(inner), args, kwargs, parent_span.get())

    return named(call, plan.name)


class _Unstarted:
    """Holds a coroutine until its first step. One that is dropped or closed before that says so once, and not for the
    original too.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def take(self) -> Any:
        inner, self._inner = self._inner, None
        return inner

    def __del__(self) -> None:
        if inspect.iscoroutine(self._inner):
            self._inner.close()


def _with_span(plan: Plan, run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda unstarted, args, kwargs, _caller: run(unstarted, Span(plan, args, kwargs))


def _as_it_was_called(function: FunctionType, original: Any) -> FunctionType:
    """``function``, whose coroutines or generators go by the name of the original's."""
    function.__name__ = getattr(original, "__name__", function.__name__)
    function.__qualname__ = getattr(original, "__qualname__", function.__qualname__)
    return function


def _unknown(plan: Plan, original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """For a callable of which it is not known whether it returns a result or something to await, such as a function in
    Rust.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.mark is None or threads.state.busy:
            return original(*args, **kwargs)
        span = Span(plan, args, kwargs)
        span.resume()
        try:
            result = original(*(args, args := _NOTHING)[0], **(kwargs, kwargs := _NO_NAMES)[0])
        except BaseException:
            span.finish(1)
            raise
        if not hasattr(type(result), "__await__"):
            span.finish(0)
            span.result(result)
            return result
        span.pause()
        if hasattr(result, "add_done_callback"):
            result.add_done_callback(_Done(span))
            return result
        if isinstance(result, Coroutine):
            return run(_Unstarted(result), span)
        return _Followed(result, span, run)

    return call


def _without_own_frame[E: BaseException](error: E) -> E:
    """``error`` as it came, before the frame that caught it was put on its traceback."""
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _coroutine(name: str) -> FunctionType:
    return named(_steps_of_coroutine, name, coroutine=True)


def _steps_of_coroutine(unstarted: _Unstarted, span: Span, last: bool = True) -> Generator[Any, Any, Any]:
    """Take a coroutine, or what ``asend`` returns, through its steps, with all that is sent and thrown passed on as it
    is.

    ``last`` closes the span with the last step.
    """
    inner = unstarted.take()
    sent: list[Any] = [None]
    thrown: list[BaseException] = []
    error = 1
    try:
        while True:
            span.resume()
            try:
                waits_for = [inner.throw(thrown.pop()) if thrown else inner.send(sent.pop())]
            except StopIteration as stop:
                result = [stop.value]
                break
            except StopAsyncIteration:
                error, last = 0, True
                raise
            span.suspend()
            try:
                sent = [(yield waits_for.pop())]
            except GeneratorExit:
                span.resume()
                inner.close()
                raise
            except BaseException as exception:
                thrown = [_without_own_frame(exception)]
        error = 0
    finally:
        if error or last:
            span.finish(error)
        else:
            span.pause()
    if last:
        span.result(result[0])
    return result.pop()


def _steps_of_generator(unstarted: _Unstarted, span: Span) -> Generator[Any, Any, Any]:
    inner = unstarted.take()
    sent: list[Any] = [None]
    thrown: list[BaseException] = []
    error = 1
    try:
        while True:
            span.resume()
            try:
                items = [inner.throw(thrown.pop()) if thrown else inner.send(sent.pop())]
            except StopIteration as stop:
                error = 0
                return stop.value
            span.result(items[0])
            span.pause()
            try:
                sent = [(yield items.pop())]
            except GeneratorExit:
                span.resume()
                inner.close()
                error = 0
                raise
            except BaseException as exception:
                thrown = [_without_own_frame(exception)]
    finally:
        span.finish(error)


def _async_generator(name: str) -> FunctionType:
    step = _coroutine(name)

    async def generate(unstarted: _Unstarted, span: Span) -> AsyncGenerator[Any, Any]:
        inner = unstarted.take()
        sent: list[Any] = [None]
        thrown: list[BaseException] = []
        while True:
            asked = inner.athrow(thrown.pop()) if thrown else inner.asend(sent.pop())
            try:
                items = [await step(_Unstarted(asked), span, last=False)]
            except StopAsyncIteration:
                return
            span.result(items[0])
            try:
                sent = [(yield items.pop())]
            except GeneratorExit:
                await step(_Unstarted(inner.aclose()), span)
                raise
            except BaseException as exception:
                thrown = [_without_own_frame(exception)]

    return named(generate, name)


class _Done:
    """Closes a span when a future is done, one of asyncio's without telling it that its exception was fetched."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def __call__(self, future: Any) -> None:
        error = (
            future._exception if hasattr(future, "_exception") else None if future.cancelled() else future.exception()
        )
        failed = future.cancelled() or error is not None
        self._span.finish_elsewhere(int(failed))
        if not failed:
            self._span.result(future.result())


class _Followed:
    """An awaitable that is neither coroutine nor future, whose span closes when it was awaited."""

    def __init__(self, inner: Awaitable[Any], span: Span, run: Callable[..., Any]) -> None:
        self._copytrace = [span]
        self._inner = inner
        self._run = run

    def __await__(self) -> Generator[Any, Any, Any]:
        if not self._copytrace:
            return self._inner.__await__()
        steps: Generator[Any, Any, Any] = self._run(
            _Unstarted(_awaiting(self._inner)), self._copytrace.pop()
        ).__await__()
        return steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def _awaiting(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
