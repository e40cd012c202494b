"""Computations of cubed: what each task held beside what its plan projected."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from copytrace._session import Session
from copytrace.follow import running
from copytrace.trace import Traced

if TYPE_CHECKING:
    from types import TracebackType

    from copytrace.model import Trace

PATIENCE = 10.0
"""Seconds to wait for processes of an executor, which cubed does not wait for."""


def _callbacks() -> set[Any]:
    """Those that cubed calls in every computation."""
    from cubed.runtime.types import Callback

    active: set[Any] = vars(Callback)["active"]
    return active


class TracedCubed(Traced):
    """A block whose computations are traced, on the executors that run tasks in this process or start processes.

    It is a callback of cubed's while the block runs. A task's ``projected_bytes`` are the plan's ``projected_mem``
    without ``reserved_mem``, which is what a worker takes before it has a task. Options are those of
    :class:`copytrace.Session`.
    """

    def __init__(self, *, label: str = "cubed", **options: Any) -> None:
        self._session = Session(label, follow=True, **options)
        self.projected: dict[str, int] = {}
        """Bytes by the name of the operation."""

    def __enter__(self) -> Self:
        self.projected = {}
        self.__dict__.pop("trace", None)
        self._session.__enter__()
        _callbacks().add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _callbacks().discard(self)
        directory = self._session.followed
        end = time.monotonic() + PATIENCE
        while directory is not None and running(directory) and time.monotonic() < end:
            time.sleep(0.05)
        self._session.__exit__(kind, error, traceback)

    def on_compute_start(self, event: Any) -> None:
        """Note what the plan projects."""
        for name, node in event.dag.nodes(data=True):
            operation = node.get("primitive_op")
            if operation is not None:
                self.projected[name] = int(operation.projected_mem - operation.reserved_mem)

    def on_compute_end(self, event: Any) -> None:
        """Nothing to do."""

    def on_operation_start(self, event: Any) -> None:
        """Nothing to do."""

    def on_operation_end(self, event: Any) -> None:
        """Nothing to do."""

    def on_task_end(self, event: Any) -> None:
        """Nothing to do."""

    @cached_property
    def trace(self) -> Trace:
        """What was recorded. Raises CopytraceError before the end of the block."""
        trace = self._session.trace
        return replace(trace, environment={**trace.environment, "projected_bytes": self.projected})
