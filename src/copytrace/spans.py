"""A span from its first moment to its last, as a plan says.

The extension ``_spans`` does the same in a tenth of the time; this is what happens without it, and what it is tested
against.
"""

from __future__ import annotations

import time
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple

from copytrace.model import MUTED, OUTPUT
from copytrace.recorder import native, pack_span, parent_span, recorder, thread_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from copytrace.recorder import ThreadState


class Plan(NamedTuple):
    """What is done around a call at a site.

    ``looks`` are arguments to note: role, position, name. ``before(span, args, kwargs)`` notes others and returns the
    index of the span's attributes and its payload in bytes. ``output`` says that the result is to be noted, and
    ``after(result)`` sees it too. ``copies`` says that the call is itself the copy, so that none need be told inside.
    ``before`` and ``after`` contain their own errors.
    """

    name: str
    site: int
    looks: tuple[tuple[int, int, str], ...] = ()
    before: Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[int, int]] | None = None
    output: bool = False
    after: Callable[[Any], None] | None = None
    copies: bool = False


class PythonSpan:
    """One call at a site, made by :func:`enter` or :func:`begin`.

    A span of many steps stops and goes on: that of a coroutine, a generator or an awaitable. Of coroutines that await
    one another only the innermost marks that the thread goes to other work and comes back. ``running`` is true in a
    step, ``done`` after the last.
    """

    __slots__ = (
        "_around",
        "_attributes",
        "_copying",
        "_deeper",
        "_enter",
        "_mark",
        "_outer_base",
        "_parent",
        "_payload",
        "_plan",
        "_previous",
        "_started",
        "_thread",
        "done",
        "id",
        "running",
    )

    def __init__(
        self, state: ThreadState, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], parent: int
    ) -> None:
        self._plan = plan
        self._deeper = False
        self._around = parent_span.get()
        self._parent = self._around or parent
        left_out = recorder.leaves_out(self._parent, plan.copies)
        self._mark = None if left_out else recorder.mark
        self._thread = state.ident
        self._attributes = self._payload = 0
        self.id = recorder.next_span() | (MUTED if left_out else 0)
        self.running = self.done = False
        if self._mark is not None:
            self._look(args, kwargs)
        self._previous = state.current
        self._started = time.perf_counter_ns()
        self._enter = self._tell(self.id)
        self._become_innermost(state)
        parent_span.set(self.id)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = self._plan
        try:
            for role, index, name in plan.looks:
                recorder.see(self.id, role, args[index] if len(args) > index else kwargs.get(name))
        except Exception as error:
            recorder.failed(error, plan.name)
        if plan.before is not None:
            self._attributes, self._payload = plan.before(self.id, args, kwargs)

    def enter(self, state: ThreadState) -> None:
        """It is a call that runs to its end."""
        self._copying = state.copying
        state.copying = self._plan.copies

    def leave(self, error: bool, /) -> None:
        """A call that was entered is over."""
        state = thread_state()
        parent_span.set(self._around)
        state.current, state.copying = self._previous, self._copying
        self._write(self._tell(self._previous), error)

    def begin(self, state: ThreadState) -> None:
        """It is in the first of many steps."""
        self.running = True
        self._outer_base = state.base
        if state.base is None:
            state.base = self._previous

    def resume(self) -> None:
        """A step begins on this thread, if one does not go on already."""
        if self.running:
            return
        state = thread_state()
        self._around = parent_span.get()
        self._previous = state.current
        self.begin(state)
        if not self._deeper:
            self._tell(self.id)
        self._become_innermost(state)
        parent_span.set(self.id)

    def suspend(self) -> None:
        """The step ends by waiting.

        The thread goes on with what was open when the outermost coroutine of the chain began its step.
        """
        state = thread_state()
        beneath = state.base or 0
        self._deeper = state.current == beneath
        if not self._deeper:
            state.current = beneath
            self._tell(beneath)
        self._leave_step(state)

    def pause(self) -> None:
        """The step ends and its caller goes on."""
        state = thread_state()
        state.current = self._previous
        self._deeper = False
        self._tell(self._previous)
        self._leave_step(state)

    def finish(self, error: bool, /) -> None:
        """The last step ends."""
        state = thread_state()
        state.current = self._previous
        self.done = True
        left = self._tell(self._previous)
        self._leave_step(state)
        self._write(left, error)

    def finish_elsewhere(self, error: bool, /) -> None:
        """It is over, outside of any step."""
        self._write(self._tell(thread_state().current), error)

    def send(self, coroutine: Any, value: Any, /) -> Any:
        """Take a coroutine one step on; returns what it waits for, raises StopIteration with what it returns."""
        self.resume()
        return self._stepped(coroutine.send, [value])

    def throw(self, coroutine: Any, error: list[BaseException], /) -> Any:
        """The same by raising the one exception in ``error``, which is taken out of it, where it waits."""
        self.resume()
        return self._stepped(coroutine.throw, error)

    def _stepped(self, step: Callable[[Any], Any], value: list[Any]) -> Any:
        try:
            waits_for = step(value.pop())
        except StopIteration as stop:
            self.finish(False)
            self.result(stop.value)
            raise
        except BaseException:
            self.finish(True)
            raise
        self.suspend()
        return waits_for

    def result(self, value: Any, /) -> None:
        """Look at what came out."""
        if self._plan.output:
            try:
                recorder.see(self.id, OUTPUT, value)
            except Exception as error:
                recorder.failed(error, self._plan.name)
        if self._plan.after is not None:
            self._plan.after(value)

    def _become_innermost(self, state: ThreadState) -> None:
        if self.id < MUTED:
            state.current = self.id

    def _leave_step(self, state: ThreadState) -> None:
        self.running = False
        state.base = self._outer_base
        parent_span.set(self._around)

    def _tell(self, span: int) -> int:
        mark = self._mark
        return mark(span) if mark is not None and recorder.mark is mark else 0

    def _write(self, left: int, error: bool) -> None:
        if left:
            row = (self.id, self._parent, self._plan.site, self._attributes, self._thread, self._enter, left)
            recorder.close(pack_span(*row, self._started, time.perf_counter_ns(), self._payload, error))


def enter_in_python(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> PythonSpan | None:
    """An open span for a call that runs to its end, which :meth:`Span.leave` closes; None when not recording."""
    state = thread_state()
    if recorder.mark is None or state.busy:
        return None
    span = PythonSpan(state, plan, args, kwargs, 0)
    span.enter(state)
    return span


def begin_in_python(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> PythonSpan | None:
    """An open span in the first of many steps; None when not recording."""
    state = thread_state()
    if recorder.mark is None or state.busy:
        return None
    span = PythonSpan(state, plan, args, kwargs, 0)
    span.begin(state)
    return span


class PythonUnstarted:
    """A coroutine or generator until its first step.

    A coroutine that is dropped or closed before that warns once that it was never awaited, and not for the original
    too.
    """

    __slots__ = ("_args", "_inner", "_kwargs", "_parent", "_plan")

    def __init__(self, plan: Plan, inner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None:
        self._plan = plan
        self._inner = inner
        self._args = args
        self._kwargs = kwargs
        self._parent = parent_span.get()

    def start(self) -> tuple[Any, PythonSpan]:
        """The coroutine or generator and its span, in its first step."""
        state = thread_state()
        span = PythonSpan(state, self._plan, self._args, self._kwargs, self._parent)
        span.begin(state)
        inner, self._inner = self._inner, None
        self._args, self._kwargs = (), {}
        return inner, span

    def __del__(self) -> None:
        if isinstance(self._inner, CoroutineType):
            self._inner.close()


if TYPE_CHECKING or native is None:
    Span = PythonSpan
    Unstarted = PythonUnstarted
    begin = begin_in_python
    enter = enter_in_python
else:
    Span = native.Span
    Unstarted = native.Unstarted
    begin = native.begin
    enter = native.enter
