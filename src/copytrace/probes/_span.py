"""A span that may stop and go on: that of a coroutine, a generator or an awaitable, in contrast to a call that runs to
its end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from copytrace.recorder import pack_span, parent_span, recorder, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    type Before = Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[int, int]]
    type After = Callable[[int, Any], None]


class Plan(NamedTuple):
    """What a stand-in does around the original.

    ``before(span, args, kwargs)`` returns the index of the span's attributes and its payload in bytes; ``after(span,
    result)`` looks at what came back. Both contain their own errors. ``unless(args, kwargs)`` says that a call need not
    be recorded, and ``copies`` that its copy is the only one.
    """

    name: str
    site: int
    before: Before | None
    after: After | None
    unless: Callable[[tuple[Any, ...], Mapping[str, Any]], bool] | None = None
    copies: bool = False


class Span:
    """One call at a site, from its first step to its last. It opens with the first :meth:`resume` and lets go of the
    arguments then.

    Of coroutines that await one another only the innermost marks that the thread goes to other work and comes back.
    """

    __slots__ = (
        "_args",
        "_around",
        "_attributes",
        "_deeper",
        "_enter",
        "_kwargs",
        "_mark",
        "_outer_base",
        "_parent",
        "_payload",
        "_plan",
        "_previous",
        "_started",
        "_thread",
        "id",
    )

    def __init__(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.id = 0
        self._plan = plan
        self._args = args
        self._kwargs = kwargs
        self._mark = recorder.mark
        self._parent = parent_span.get()
        self._deeper = False

    def resume(self) -> None:
        """A step begins on this thread."""
        state = threads.state
        self._previous = state.current
        self._around = parent_span.get()
        self._outer_base = state.base
        if state.base is None:
            state.base = state.current
        if not self.id:
            self._open()
        parent_span.set(self.id)
        state.current = self.id
        if not self._deeper:
            self._tell(self.id)

    def _open(self) -> None:
        self.id = recorder.next_span()
        self._parent = self._around or self._parent
        before = self._plan.before
        self._attributes, self._payload = before(self.id, self._args, self._kwargs) if before is not None else (0, 0)
        self._args, self._kwargs = (), {}
        self._thread = threads.state.ident
        self._started = time.perf_counter_ns()
        self._enter = self._tell(self.id)
        self._deeper = True

    def suspend(self) -> None:
        """The step ends by waiting: the thread goes on with whatever was open when the outermost coroutine of the chain
        began its step.
        """
        state = threads.state
        beneath = state.base or 0
        self._deeper = state.current == beneath
        if not self._deeper:
            state.current = beneath
            self._tell(beneath)
        self._leave_step()

    def pause(self) -> None:
        """The step ends and its caller goes on."""
        threads.state.current = self._previous
        self._deeper = False
        self._tell(self._previous)
        self._leave_step()

    def finish(self, error: int) -> None:
        """The last step ends."""
        state = threads.state
        state.current = self._previous
        leave = self._tell(self._previous)
        self._leave_step()
        self._write(leave, error)

    def finish_elsewhere(self, error: int) -> None:
        """It is over, outside of any step."""
        self._write(self._tell(threads.state.current), error)

    def result(self, result: Any) -> None:
        """Look at what came out."""
        if self._plan.after is not None:
            self._plan.after(self.id, result)

    def _leave_step(self) -> None:
        threads.state.base = self._outer_base
        parent_span.set(self._around)

    def _tell(self, span: int) -> int:
        mark = self._mark
        return mark(span) if mark is not None and recorder.mark is mark else 0

    def _write(self, leave: int, error: int) -> None:
        if leave:
            row = (
                self.id,
                self._parent,
                self._plan.site,
                self._attributes,
                self._thread,
                self._enter,
                leave,
                self._started,
            )
            recorder.close(pack_span(*row, time.perf_counter_ns(), self._payload, error))
