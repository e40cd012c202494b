"""zarr's arrays: the operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Site
from copytrace.probes.zarr.describe import about, nbytes, of_array, selected_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FORMS = ("basic", "orthogonal", "mask", "coordinate", "block")
_INDEXERS = {"VIndex": "vindex", "OIndex": "oindex", "BlockIndex": "blocks"}


def _self(call: Call) -> Any:
    return call.instance


def _held(call: Call) -> Any:
    return call.instance.array


def _on_array() -> Iterator[Site]:
    forms = [("__getitem__", "__setitem__"), *((f"get_{form}_selection", f"set_{form}_selection") for form in _FORMS)]
    for get, put in forms:
        name = f"zarr.Array.{get}"
        yield Site(
            target=f"zarr.core.array:Array.{get}",
            name=name,
            kind="operation",
            direction="read",
            destinations=("out",),
            output=True,
            describe=of_array("zarr.Array", name, _self),
        )
        name = f"zarr.Array.{put}"
        yield Site(
            target=f"zarr.core.array:Array.{put}",
            name=name,
            kind="operation",
            direction="write",
            inputs=("value",),
            describe=of_array("zarr.Array", name, _self),
        )
    yield Site(
        target="zarr.core.array:Array.append",
        name="zarr.Array.append",
        kind="operation",
        direction="write",
        inputs=("data",),
        describe=of_array("zarr.Array", "zarr.Array.append", _self),
    )
    yield Site(
        target="zarr.core.array:Array.__array__",
        name="zarr.Array.__array__",
        kind="operation",
        direction="read",
        output=True,
        describe=of_array("zarr.Array", "zarr.Array.__array__", _self),
    )
    for kind, shown in _INDEXERS.items():
        name = f"zarr.Array.{shown}.__getitem__"
        yield Site(
            target=f"zarr.core.indexing:{kind}.__getitem__",
            name=name,
            kind="operation",
            direction="read",
            output=True,
            describe=of_array("zarr.Array", name, _held),
        )
        name = f"zarr.Array.{shown}.__setitem__"
        yield Site(
            target=f"zarr.core.indexing:{kind}.__setitem__",
            name=name,
            kind="operation",
            direction="write",
            inputs=("value",),
            describe=of_array("zarr.Array", name, _held),
        )


def _on_async_array() -> Iterator[Site]:
    for method, versions in (
        ("getitem", ""),
        ("get_orthogonal_selection", ">=3.1"),
        ("get_mask_selection", ">=3.1"),
        ("get_coordinate_selection", ">=3.1"),
    ):
        name = f"zarr.AsyncArray.{method}"
        yield Site(
            target=f"zarr.core.array:AsyncArray.{method}",
            name=name,
            kind="operation",
            direction="read",
            destinations=("out",),
            output=True,
            describe=of_array("zarr.AsyncArray", name, _self),
            versions=versions,
        )
    for kind, shown in (("AsyncOIndex", "oindex"), ("AsyncVIndex", "vindex")):
        name = f"zarr.AsyncArray.{shown}.getitem"
        yield Site(
            target=f"zarr.core.indexing:{kind}.getitem",
            name=name,
            kind="operation",
            direction="read",
            output=True,
            describe=of_array("zarr.AsyncArray", name, _held),
            versions=">=3.1",
        )
    for method, value in (("setitem", "value"), ("append", "data")):
        name = f"zarr.AsyncArray.{method}"
        yield Site(
            target=f"zarr.core.array:AsyncArray.{method}",
            name=name,
            kind="operation",
            direction="write",
            inputs=(value,),
            describe=of_array("zarr.AsyncArray", name, _self),
        )


def _funnel_describe(name: str, api: str = "zarr.AsyncArray") -> Any:
    def describe(call: Call) -> Mapping[str, Any]:
        store_path = call.get("store_path")
        if store_path is not None:
            return about(api, name, store_path, call.get("metadata"))
        array = call.instance
        return about(api, name, array.store_path, array.metadata)

    return describe


def _funnel_payload(call: Call) -> int:
    metadata = call.get("metadata")
    return selected_bytes(
        metadata if metadata is not None else call.instance.metadata, call.get("indexer"), call.get("fields")
    )


def _funnels() -> Iterator[Site]:
    """Where every selection passes, whichever call made it: these know the bytes of the region."""
    for function, direction in (("_get_selection", "read"), ("_set_selection", "write")):
        name = f"zarr.AsyncArray.{function}"
        yield Site(
            target=(f"zarr.core.array:{function}", f"zarr.core.array:AsyncArray.{function}"),
            name=name,
            kind="operation",
            direction=direction,
            inputs=("value",) if direction == "write" else (),
            destinations=("out",) if direction == "read" else (),
            output=direction == "read",
            describe=_funnel_describe(name),
            payload=_funnel_payload,
        )


def _functions() -> Iterator[Site]:
    """Functions that make an array and fill it, or read a whole one."""
    for function, value, versions in (
        ("array", "data", ""),
        ("save_array", "arr", ""),
        ("save", 1, ""),
        ("from_array", "data", ">=3.0.7"),
    ):
        targets = {
            f"zarr.{function}": f"zarr:{function}",
            f"zarr.api.asynchronous.{function}": f"zarr.api.asynchronous:{function}",
        }
        if function == "from_array":
            targets["zarr.core.array.from_array"] = "zarr.core.array:from_array"
        for name, target in targets.items():
            yield Site(
                target=target,
                name=name,
                kind="operation",
                direction="write",
                inputs=(value,),
                describe=_whole(name),
                payload=_bytes_of(value),
                versions=versions,
            )
    for name, target in {"zarr.load": "zarr:load", "zarr.api.asynchronous.load": "zarr.api.asynchronous:load"}.items():
        yield Site(target=target, name=name, kind="operation", direction="read", output=True, describe=_whole(name))


def _whole(name: str) -> Any:
    api = name.rpartition(".")[0]
    return lambda _call: {"api": api, "call": name}


def _bytes_of(value: str | int) -> Any:
    if isinstance(value, int):
        return lambda call: sum(nbytes(given) for given in (*call.args[value:], *call.kwargs.values()))
    return lambda call: nbytes(call.get(value))


ARRAYS = (*_on_array(), *_on_async_array(), *_funnels(), *_functions())
