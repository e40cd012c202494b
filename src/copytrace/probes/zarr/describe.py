"""What is said of zarr's objects: a store's name, an array's codecs, the bytes of a selection. Nothing of zarr is
imported for it.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from copytrace.probes._site import Call


def store_name(store: Any) -> str:
    """A store's class and in parentheses what it wraps: ``LocalStore``, ``ObjectStore(S3Store)``,
    ``LoggingStore(FsspecStore(LocalFileSystem))``.
    """
    kind: type = type(store)
    wraps = _wraps(kind)
    held = store.__dict__.get(wraps) if wraps else None
    if held is None:
        return kind.__name__
    if wraps == "_store":
        return f"{kind.__name__}({store_name(held)})"
    return f"{kind.__name__}({_file_system(held) if wraps == 'fs' else type(held).__name__})"


_HELD = {"WrapperStore": "_store", "ObjectStore": "store", "FsspecStore": "fs"}


@lru_cache(maxsize=64)
def _wraps(kind: type) -> str:
    """The attribute in which a store of this class has what it wraps, empty when it wraps nothing."""
    bases = {base.__name__ for base in kind.__mro__}
    return next((attribute for name, attribute in _HELD.items() if name in bases), "")


def _file_system(fs: Any) -> str:
    return type(getattr(fs, "__dict__", {}).get("sync_fs", fs)).__name__


def codec_names(metadata: Any) -> tuple[str, ...]:
    """An array's codecs in the order in which they encode, sharding with its own: ``("transpose",
    "sharding(bytes+zstd)")``.
    """
    codecs = getattr(metadata, "codecs", None)
    if codecs is not None:
        return tuple(map(_codec, codecs))
    filters = getattr(metadata, "filters", None) or ()
    compressor = getattr(metadata, "compressor", None)
    return tuple(codec.codec_id for codec in (*filters, compressor) if codec is not None) or ("bytes",)


def _codec(codec: Any) -> str:
    inner = getattr(codec, "__dict__", {}).get("codecs")
    if inner:
        return f"sharding({'+'.join(map(_codec, inner))})"
    described = codec.to_dict()
    name = described.get("name") if isinstance(described, dict) else None
    return str(name or type(codec).__name__)


def about(api: str, call: str, store_path: Any, metadata: Any) -> dict[str, Any]:
    """The description of an operation on an array."""
    return {"api": api, "call": call, "store": store_name(store_path.store), "codecs": codec_names(metadata)}


def of_array(api: str, call: str, find: Callable[[Call], Any]) -> Callable[[Call], Mapping[str, Any]]:
    """Describes a call on the array that ``find`` gets at (an ``Array`` or an ``AsyncArray``)."""

    def describe(call_: Call) -> Mapping[str, Any]:
        array = find(call_)
        return about(api, call, array.store_path, array.metadata)

    return describe


def selected_bytes(metadata: Any, indexer: Any, fields: Any = None) -> int:
    """Elements of a selection x itemsize of the array's dtype, or of one field of it."""
    dtype = metadata.dtype
    dtype = dtype.to_native_dtype() if hasattr(dtype, "to_native_dtype") else dtype
    if isinstance(fields, str) and fields in (dtype.names or ()):
        dtype = dtype[fields]
    return int(prod(indexer.shape) * dtype.itemsize)


def nbytes(value: Any) -> int:
    """Bytes of an array that the caller handed over, 0 when it does not say."""
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def only_arrays(values: Iterable[Any]) -> tuple[Any, ...]:
    """Those of ``values`` that can hold array data, as a tuple that can be looked at."""
    return tuple(values) if isinstance(values, list | tuple) else ()
