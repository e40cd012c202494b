"""Traces of work that an engine spreads over processes and machines.

:class:`TracedWorkers` is for the workers of a Dask cluster and needs ``distributed``; :class:`TracedCubed` is for
computations of cubed on its own executors. Both give one report, with what each task moved and held.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copytrace.distributed.cubed import TracedCubed
    from copytrace.distributed.workers import TracedWorkers, WorkerTracer

__all__ = ["TracedCubed", "TracedWorkers", "WorkerTracer"]

_HOME = {"TracedCubed": "cubed", "TracedWorkers": "workers", "WorkerTracer": "workers"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"copytrace.distributed.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
