"""zarr 2.18: arrays, the processing of chunks, and stores."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.probes._site import Call, Family, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ARRAY = "zarr.core:Array"
_FORMS = ("basic", "orthogonal", "coordinate", "mask", "block")


def _store_name(store: Any) -> str:
    """A store's class and in parentheses what it wraps: ``DirectoryStore``, ``FSStore(S3FileSystem)``."""
    kind, held = type(store), getattr(store, "__dict__", {})
    if "fs" in held:
        return f"{kind.__name__}({type(held['fs']).__name__})"
    if "_mutable_mapping" in held:
        return f"{kind.__name__}({type(held['_mutable_mapping']).__name__})"
    return kind.__name__


def _codec_names(array: Any) -> tuple[str, ...]:
    codecs = (*(array._filters or ()), array._compressor)
    return tuple(str(codec.codec_id) for codec in codecs if codec is not None) or ("bytes",)


def _describe(call: Call) -> Mapping[str, Any]:
    array = call.instance
    store = array._chunk_store if array._chunk_store is not None else array._store
    return {"api": "zarr.Array", "store": _store_name(store), "codecs": _codec_names(array)}


def _payload(call: Call) -> int:
    dtype, fields = call.instance._dtype, call.get("fields")
    if isinstance(fields, str) and fields in (dtype.names or ()):
        dtype = dtype[fields]
    return int(prod(call.get("indexer").shape) * dtype.itemsize)


def _one_element(call: Call) -> int:
    return int(call.instance._dtype.itemsize)


def _arrays() -> Iterator[Site]:
    for form in ("__getitem__", *(f"get_{form}_selection" for form in _FORMS)):
        yield Site(
            target=f"{_ARRAY}.{form}",
            kind="operation",
            direction="read",
            destinations=("out",),
            output=True,
            describe=_describe,
        )
    for form in ("__setitem__", *(f"set_{form}_selection" for form in _FORMS)):
        yield Site(
            target=f"{_ARRAY}.{form}", kind="operation", direction="write", inputs=("value",), describe=_describe
        )
    for get, payload in (("_get_selection", _payload), ("_get_basic_selection_zd", _one_element)):
        yield Site(
            target=f"{_ARRAY}.{get}",
            kind="operation",
            direction="read",
            destinations=("out",),
            output=True,
            describe=_describe,
            payload=payload,
        )
    for put, payload in (("_set_selection", _payload), ("_set_basic_selection_zd", _one_element)):
        yield Site(
            target=f"{_ARRAY}.{put}",
            kind="operation",
            direction="write",
            inputs=("value",),
            describe=_describe,
            payload=payload,
        )
    yield Site(target=f"{_ARRAY}.append", kind="operation", direction="write", inputs=("data",), describe=_describe)
    yield Site(target=f"{_ARRAY}.__array__", kind="operation", direction="read", output=True, describe=_describe)


def _basic(selection: Any) -> bool:
    parts = selection if type(selection) is tuple else (selection,)
    return all(type(part) is slice or isinstance(part, int | np.integer) for part in parts)


def _target(call: Call) -> Any:
    """The part of ``out`` that a chunk is scattered into; None when the chunk is decoded or copied into it directly."""
    array, out, where = call.instance, call.get("out"), call.get("out_selection")
    if not isinstance(out, np.ndarray) or not _basic(where):
        return None
    part = out[where] if where else out
    if not isinstance(part, np.ndarray):
        return None
    whole = _is_whole(call.get("chunk_selection"), array._chunks) and not array._filters and not call.get("fields")
    direct = part.flags.c_contiguous if array._order == "C" else part.flags.f_contiguous
    return None if whole and direct and array._dtype.kind != "O" else part


def _scattered(call: Call) -> Any:
    return call.get("cdata") if _target(call) is not None else None


def _is_whole(selection: Any, chunks: tuple[int, ...]) -> bool:
    parts = selection if type(selection) is tuple else (selection,)
    return len(parts) == len(chunks) and all(
        (type(part) is slice and part.indices(size) == (0, size, 1)) or (isinstance(part, int) and size == 1)
        for part, size in zip(parts, chunks, strict=True)
    )


_CHUNKS = (
    Site(
        target=f"{_ARRAY}._process_chunk",
        kind="scatter",
        direction="read",
        primitive="ndarray.__setitem__",
        inputs=(_scattered,),
        destinations=(_target,),
    ),
    Site(target=f"{_ARRAY}._decode_chunk", kind="context", direction="read", inputs=("cdata",), output=True),
    Site(target=f"{_ARRAY}._process_for_setitem", kind="context", direction="write", inputs=("value",), output=True),
    Site(target=f"{_ARRAY}._encode_chunk", kind="context", direction="write", inputs=("chunk",), output=True),
    Site(target="zarr.storage:DirectoryStore._fromfile", kind="context", direction="read", output=True),
    Site(target="zarr.storage:DirectoryStore._tofile", kind="context", direction="write", inputs=("a",)),
)


def _key(call: Call) -> Mapping[str, Any]:
    return {"key": str(call.args[1] if len(call.args) > 1 else ""), "store": _store_name(call.instance)}


def _keys(call: Call) -> Mapping[str, Any]:
    """One key when there is one, so that a store asked for metadata is known to be."""
    keys = call.args[1] if len(call.args) > 1 else ()
    only = next(iter(keys)) if hasattr(keys, "__len__") and len(keys) == 1 else ""
    return {"key": only if isinstance(only, str) else "", "store": _store_name(call.instance)}


def _given(call: Call) -> Any:
    values = call.args[1] if len(call.args) > 1 else None
    return list(values.values()) if isinstance(values, dict) else None


_STORES = Family(
    base="zarr._storage.store:BaseStore",
    methods=(
        Site(target="__getitem__", kind="request", direction="read", output=True, describe=_key),
        Site(target="__setitem__", kind="request", direction="write", inputs=(2,), describe=_key),
        Site(target="getitems", kind="request", direction="read", describe=_keys),
        Site(target="setitems", kind="request", direction="write", inputs=(_given,), describe=_keys),
        Site(target="get_partial_values", kind="request", direction="read", output=True),
    ),
)

PROBE = Probe(name="zarr2", library="zarr", versions="<3", sites=(*_arrays(), *_CHUNKS), families=(_STORES,))
