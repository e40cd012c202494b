"""zarr's stores: every subclass of ``zarr.abc.store.Store``, zarr's own and anybody's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Family, Site
from copytrace.probes.zarr.describe import store_name
from copytrace.recorder import recorder

if TYPE_CHECKING:
    from collections.abc import Mapping


def _key(call: Call) -> int:
    return recorder.request(str(call.get("key")), store_name(call.instance))


def _store(call: Call) -> Mapping[str, Any]:
    return {"store": store_name(call.instance)}


STORES = Family(
    base="zarr.abc.store:Store",
    methods=(
        *(
            Site(target=name, kind="request", direction="read", output=True, describe=_key)
            for name in ("get", "get_sync")
        ),
        *(
            Site(target=name, kind="request", direction="read", output=True, describe=_key)
            for name in ("get_ranges", "get_ranges_sync")
        ),
        Site(target="get_partial_values", kind="request", direction="read", output=True, describe=_store),
        *(
            Site(target=name, kind="request", direction="write", inputs=("value",), describe=_key)
            for name in ("set", "set_sync", "set_if_not_exists", "set_if_not_exists_sync")
        ),
        Site(target="set_partial_values", kind="request", direction="write", describe=_store),
    ),
)

HELPERS = (
    Site(
        target="zarr.storage._memory:_copy_buffer",
        kind="copy",
        direction="write",
        primitive="ndarray.copy",
        inputs=("value",),
        output=True,
        versions=">=3.3",
    ),
)
