"""Where an object's bytes lie: address, extent and size of anything that holds array data.

Nothing is imported, copied or kept alive, and no code of another library runs but the buffer protocol and
``__array_interface__``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Buffer, Callable
from types import GetSetDescriptorType
from typing import Any

import numpy as np

type Extent = tuple[int, int, int, int]
"""1 when all bytes between are its own, lowest address, bytes from there to one past the highest, elements x itemsize.
"""

type _Reader = Callable[[Any], tuple[Extent, ...]]

_MEMORY = (ctypes.c_uint64 * (1 << 59)).from_address(0)
_MOST_ITEMS = 4096
_MOST_TYPES = 1024


def _pointer_offset(sample: Any) -> int | None:
    """Offset in ``sample``'s C struct of the pointer to its data, or None when this interpreter lays it out otherwise.

    ``__array_interface__`` says the same and takes ten times as long, which every buffer of every span would pay.
    """
    address = np.frombuffer(sample, "u1").__array_interface__["data"][0]
    for offset in range(16, type(sample).__basicsize__ - 7, 8):
        if _MEMORY[(id(sample) + offset) >> 3] == address:
            return offset
    return None


_ARRAY_OFFSET = _pointer_offset(np.arange(1, 18, dtype="u1"))
_VIEW_OFFSET = _pointer_offset(memoryview(b"copytrace, seventeen"))
_BYTES_OFFSET = bytes.__basicsize__ - 1


def extents(value: Any) -> tuple[Extent, ...]:
    """Where the data of ``value`` lies; empty when it has none, or none that can be told.

    Understands ndarrays, anything with the buffer protocol (bytes, memoryview, mmap, ``obstore.Bytes``),
    ``__array_interface__``, zarr's ``Buffer`` and ``NDBuffer``, classes of C or Rust with a ``buffer``, and lists and
    tuples of these.
    """
    kind = type(value)
    reader = _READERS.get(kind) or _LEARNT.get(kind)
    if reader is None:
        reader = _reader(value)
        if len(_LEARNT) >= _MOST_TYPES:
            forget()
        _LEARNT[kind] = reader
        if reader is _wrapped:
            WRAPPERS[kind] = reader
    return reader(value)


def forget() -> None:
    """Drop what was learnt of the types seen, so that none is kept alive."""
    _LEARNT.clear()
    WRAPPERS.clear()


def array_extent(value: np.ndarray[Any, Any]) -> tuple[Extent, ...]:
    """The extent of an ndarray, strided or not."""
    size = value.nbytes
    if not size:
        return ()
    address = _MEMORY[(id(value) + _ARRAY_OFFSET) >> 3] if _ARRAY_OFFSET else value.__array_interface__["data"][0]
    if value.flags.forc:
        return ((1, address, size, size),)
    return (_strided(address, value.shape, value.strides, value.itemsize),)


def _strided(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Extent:
    low = high = address
    size = itemsize
    for length, stride in zip(shape, strides, strict=True):
        size *= length
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    extent = high + itemsize - low
    return int(extent == size), low, extent, size


def _none(_value: Any) -> tuple[Extent, ...]:
    return ()


def _bytes(value: bytes) -> tuple[Extent, ...]:
    size = len(value)
    return ((1, id(value) + _BYTES_OFFSET, size, size),) if size else ()


def _buffer(value: Buffer) -> tuple[Extent, ...]:
    try:
        with memoryview(value) as view:
            size = view.nbytes
            if not size:
                return ()
            if view.contiguous and _VIEW_OFFSET:
                return ((1, _MEMORY[(id(view) + _VIEW_OFFSET) >> 3], size, size),)
            return array_extent(np.asarray(view))
    except (ValueError, BufferError):
        return ()


def _interface(value: Any) -> tuple[Extent, ...]:
    interface = value.__array_interface__
    data, shape, itemsize = interface.get("data"), interface["shape"], np.dtype(interface["typestr"]).itemsize
    if not isinstance(data, tuple) or 0 in shape:
        return ()
    if interface.get("strides") is None:
        size = itemsize * int(np.prod(shape, dtype=np.int64))
        return ((1, data[0], size, size),)
    return (_strided(data[0], shape, interface["strides"], itemsize),)


def _wrapped(value: Any) -> tuple[Extent, ...]:
    data = value.__dict__.get("_data")
    return array_extent(data) if type(data) is np.ndarray else extents(data)


def _held(value: Any) -> tuple[Extent, ...]:
    held = value.buffer
    return extents(held) if isinstance(held, Buffer) else ()


def _many(value: list[Any] | tuple[Any, ...]) -> tuple[Extent, ...]:
    found: list[Extent] = []
    for item in value[:_MOST_ITEMS]:
        if type(item) not in (list, tuple):
            found += extents(item)
    return tuple(found)


def _reader(value: Any) -> _Reader:
    kind = type(value)
    if issubclass(kind, np.generic):
        return _none
    if issubclass(kind, np.ndarray):
        return array_extent
    if issubclass(kind, Buffer):
        return _buffer
    if hasattr(kind, "__array_interface__"):
        return _interface
    if "_data" in getattr(value, "__dict__", ()):
        return _wrapped
    if isinstance(vars(kind).get("buffer"), GetSetDescriptorType):
        return _held
    return _none


_READERS: dict[type, _Reader] = {
    bytes: _bytes,
    np.ndarray: array_extent,
    list: _many,
    tuple: _many,
    **dict.fromkeys((type(None), bool, int, float, str, dict, slice), _none),
}
_LEARNT: dict[type, _Reader] = {}

WRAPPERS: dict[type, _Reader] = {}
"""Those of the types seen that hold their array in an attribute ``_data``."""
