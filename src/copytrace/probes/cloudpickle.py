"""cloudpickle, as Dask and cubed send work with it: functions of a program go by value, and must go without what stands
in for them while a session is open.
"""

from __future__ import annotations

from functools import update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any

from copytrace.places import OWN_FILE
from copytrace.probes._site import Probe, Site

if TYPE_CHECKING:
    from collections.abc import Callable


def _without_stand_ins(reduce: Callable[[Any, Any], Any]) -> FunctionType:
    """``Pickler._function_reduce``, which returns NotImplemented for what goes by reference."""

    def function_reduce(pickler: Any, function: Any) -> Any:
        result = reduce(pickler, function)
        if result is not NotImplemented and function.__code__.co_filename == OWN_FILE:
            return reduce(pickler, function.__wrapped__)
        return result

    update_wrapper(function_reduce, reduce)
    assert isinstance(function_reduce, FunctionType)
    return function_reduce


PROBE = Probe(
    name="cloudpickle",
    library="cloudpickle",
    sites=(
        Site(
            target=(
                "cloudpickle.cloudpickle:Pickler._function_reduce",
                "cloudpickle.cloudpickle_fast:CloudPickler._function_reduce",
            ),
            kind="context",
            instead=_without_stand_ins,
        ),
    ),
)
