"""zarr's Buffer and NDBuffer: the copies that zarr itself makes."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.probes._site import Call, Site
from copytrace.probes.zarr.describe import only_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

_BASIC = frozenset({int, EllipsisType})


def _selected(call: Call) -> Any:
    """The part of ``self`` that ``self[key] = value`` writes to, as a view; all of it when only a copy could be had."""
    data, key = call.args[0].__dict__.get("_data"), call.get("key")
    if not isinstance(data, np.ndarray):
        return None
    whole = True
    for part in key if type(key) is tuple else (key,):
        if type(part) is not slice:
            whole = False
            if type(part) not in _BASIC and not isinstance(part, np.integer):
                return data
    parts = key if type(key) is tuple else (key,)
    return data[key] if whole or ... in parts else data[(*parts, ...)]


def _value(call: Call) -> Any:
    """The array that is scattered; a fill value is none."""
    value = call.get("value")
    data = value if isinstance(value, np.ndarray) else getattr(value, "__dict__", {}).get("_data")
    return data if isinstance(data, np.ndarray) and data.ndim else None


def _others(call: Call) -> Any:
    return only_arrays(call.get("others"))


def _returns_view(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
    """Whether ``self[key]`` is basic indexing."""
    key = args[1] if len(args) > 1 else None
    for part in key if type(key) is tuple else (key,):
        if type(part) is not slice and type(part) not in _BASIC and not isinstance(part, np.integer):
            return False
    return True


def _contiguous(args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> bool:
    """Whether ``self`` can be reshaped without a copy."""
    data = args[0].__dict__.get("_data")
    return isinstance(data, np.ndarray) and data.flags.c_contiguous


_CORE = "zarr.core.buffer.core"
_CPU = "zarr.core.buffer.cpu"

BUFFERS = (
    Site(
        target=f"{_CPU}:NDBuffer.__setitem__",
        kind="scatter",
        primitive="ndarray.__setitem__",
        inputs=(_value,),
        destinations=(_selected,),
    ),
    Site(
        target=f"{_CPU}:NDBuffer.__getitem__",
        kind="gather",
        primitive="ndarray.__getitem__",
        inputs=(0,),
        output=True,
        unless=_returns_view,
    ),
    Site(
        target=f"{_CORE}:NDBuffer.reshape",
        kind="gather",
        primitive="ndarray.reshape",
        inputs=(0,),
        output=True,
        unless=_contiguous,
    ),
    Site(
        target=(f"{_CPU}:NDBuffer.astype", f"{_CORE}:NDBuffer.astype"),
        name="zarr.core.buffer.cpu.NDBuffer.astype",
        kind="convert",
        primitive="ndarray.astype",
        inputs=(0,),
        output=True,
    ),
    Site(target=f"{_CORE}:NDBuffer.copy", kind="copy", primitive="ndarray.copy", inputs=(0,), output=True),
    Site(
        target=(f"{_CPU}:NDBuffer.all_equal", f"{_CORE}:NDBuffer.all_equal"),
        name="zarr.core.buffer.cpu.NDBuffer.all_equal",
        kind="context",
        inputs=(0,),
    ),
    Site(target=f"{_CORE}:Buffer.to_bytes", kind="copy", primitive="bytes", inputs=(0,), output=True),
    Site(
        target=f"{_CORE}:Buffer.__setitem__",
        kind="scatter",
        primitive="ndarray.__setitem__",
        inputs=("value",),
        destinations=(_selected,),
    ),
    Site(
        target=f"{_CPU}:Buffer.combine",
        kind="join",
        primitive="numpy.concatenate",
        inputs=(0, _others),
        output=True,
        versions=">=3.1.4",
    ),
    Site(
        target=(f"{_CPU}:Buffer.__add__", f"{_CORE}:Buffer.__add__"),
        name="zarr.core.buffer.cpu.Buffer.__add__",
        kind="join",
        primitive="numpy.concatenate",
        inputs=(0, "other"),
        output=True,
    ),
)
