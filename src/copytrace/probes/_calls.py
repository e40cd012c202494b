"""Stand-ins for the callables at probed sites: each opens a span, calls the original and closes the span.

A stand-in's frame is on the stack of every allocation made below it; its code is named after the site, in a file called
``copytrace``. No stand-in keeps an argument, a result or anything in between alive longer than the original would.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Generator
from functools import update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any

from copytrace.places import OWN_FILE
from copytrace.recorder import recorder, thread_state
from copytrace.spans import Plan, Span, Unstarted, begin, enter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    type Unless = Callable[[tuple[Any, ...], Mapping[str, Any]], bool]

_NOTHING: tuple[Any, ...] = ()
_NO_NAMES: dict[str, Any] = {}


def stand_in(plan: Plan, original: Any, unless: Unless | None = None) -> FunctionType:
    """A replacement for the callable ``original`` that takes the same arguments, ``self`` or ``cls`` among them.

    Calls of a plain function for which ``unless(args, kwargs)`` is true are not recorded.
    """
    made: Any
    if inspect.iscoroutinefunction(original):
        made = inspect.markcoroutinefunction(_stepping(plan, original, _coroutine(plan.name)))
    elif inspect.isasyncgenfunction(original):
        made = _stepping(plan, original, _async_generator(plan.name))
    elif inspect.isgeneratorfunction(original):
        made = _stepping(plan, original, named(_steps_of_generator, plan.name))
    elif type(original) is FunctionType and not hasattr(original, "__wrapped__"):
        made = named(_plain(plan, original, unless), plan.name)
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


def _plain(plan: Plan, original: Callable[..., Any], unless: Unless | None) -> Callable[..., Any]:
    """For a function that returns when it is done."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if unless is not None and recorder.mark is not None and unless(args, kwargs):
            return original(*args, **kwargs)
        span = enter(plan, args, kwargs)
        if span is None:
            return original(*args, **kwargs)
        try:
            if kwargs:
                result = original(*(args, args := _NOTHING)[0], **(kwargs, kwargs := _NO_NAMES)[0])
            else:
                result = original(*(args, args := _NOTHING)[0])
        except BaseException:
            span.leave(True)
            raise
        span.leave(False)
        span.result(result)
        return result

    return call


def _stepping(plan: Plan, original: Callable[..., Any], run: FunctionType) -> FunctionType:
    """For a function that returns something with steps, which ``run`` follows under the name of the original."""
    run.__name__ = getattr(original, "__name__", run.__name__)
    run.__qualname__ = getattr(original, "__qualname__", run.__qualname__)

    def call(*args: Any, **kwargs: Any) -> Any:
        inner = original(*args, **kwargs)
        if recorder.mark is None or thread_state().busy:
            return inner
        return run(Unstarted(plan, inner, args, kwargs))

    return named(call, plan.name)


def _unknown(plan: Plan, original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """For a callable of which it is not known whether it returns a result or something to await, such as a function in
    Rust.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        span = begin(plan, args, kwargs)
        if span is None:
            return original(*args, **kwargs)
        try:
            result = original(*(args, args := _NOTHING)[0], **(kwargs, kwargs := _NO_NAMES)[0])
        except BaseException:
            span.finish(True)
            raise
        if not hasattr(type(result), "__await__"):
            span.finish(False)
            span.result(result)
            return result
        span.pause()
        if hasattr(result, "add_done_callback"):
            result.add_done_callback(_Done(span))
            return result
        if isinstance(result, Coroutine):
            return run(_Begun(result, span))
        return _Followed(result, span, run)

    return call


class _Begun:
    """A coroutine whose span is open already, as :class:`Unstarted` hands it over."""

    __slots__ = ("_inner", "_span")

    def __init__(self, inner: Any, span: Span) -> None:
        self._inner = inner
        self._span = span

    def start(self) -> tuple[Any, Span]:
        return self._inner, self._span


def _without_own_frame[E: BaseException](error: E) -> E:
    """``error`` as it came, before the frame that caught it was put on its traceback."""
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _coroutine(name: str) -> FunctionType:
    return named(_steps_of_coroutine, name, coroutine=True)


def _steps_of_coroutine(unstarted: Unstarted | _Begun) -> Generator[Any, Any, Any]:
    """Take a coroutine through its steps, with all that is sent and thrown passed on as it is."""
    inner, span = unstarted.start()
    sent = None
    thrown: list[BaseException] = []
    while True:
        try:
            sent = yield (span.throw(inner, thrown) if thrown else span.send(inner, sent))
        except BaseException as error:
            if span.done:
                if isinstance(error, StopIteration):
                    return error.value
                raise
            if isinstance(error, GeneratorExit):
                _close(inner, span)
                raise
            thrown = [_without_own_frame(error)]


def _close(inner: Any, span: Span) -> None:
    span.resume()
    try:
        inner.close()
    finally:
        span.finish(True)


def _steps_of_generator(unstarted: Unstarted) -> Generator[Any, Any, Any]:
    inner, span = unstarted.start()
    sent: list[Any] = [None]
    thrown: list[BaseException] = []
    error = True
    try:
        while True:
            span.resume()
            try:
                items = [inner.throw(thrown.pop()) if thrown else inner.send(sent.pop())]
            except StopIteration as stop:
                error = False
                return stop.value
            span.result(items[0])
            span.pause()
            try:
                sent = [(yield items.pop())]
            except GeneratorExit:
                span.resume()
                inner.close()
                error = False
                raise
            except BaseException as exception:
                thrown = [_without_own_frame(exception)]
    finally:
        span.finish(error)


def _async_generator(name: str) -> FunctionType:
    step = named(_step_of_async_generator, name, coroutine=True)

    async def generate(unstarted: Unstarted) -> AsyncGenerator[Any, Any]:
        inner, span = unstarted.start()
        sent: list[Any] = [None]
        thrown: list[BaseException] = []
        while True:
            asked = inner.athrow(thrown.pop()) if thrown else inner.asend(sent.pop())
            try:
                items = [await step(asked, span)]
            except StopAsyncIteration:
                return
            span.result(items[0])
            try:
                sent = [(yield items.pop())]
            except GeneratorExit:
                await step(inner.aclose(), span)
                span.finish_elsewhere(False)
                raise
            except BaseException as exception:
                thrown = [_without_own_frame(exception)]

    return named(generate, name)


def _step_of_async_generator(asked: Any, span: Span) -> Generator[Any, Any, Any]:
    """Take what ``asend`` and its like return to the next item; the span ends with the generator."""
    sent = None
    thrown: list[BaseException] = []
    while True:
        span.resume()
        try:
            waits_for = [asked.throw(thrown.pop()) if thrown else asked.send(sent)]
        except StopIteration as stop:
            span.pause()
            return stop.value
        except BaseException as error:
            span.finish(not isinstance(error, StopAsyncIteration))
            raise
        span.suspend()
        try:
            sent = yield waits_for.pop()
        except GeneratorExit:
            _close(asked, span)
            raise
        except BaseException as error:
            thrown = [_without_own_frame(error)]


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
        self._span.finish_elsewhere(failed)
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
        steps: Generator[Any, Any, Any] = self._run(_Begun(_awaiting(self._inner), self._copytrace.pop())).__await__()
        return steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def _awaiting(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
