"""xarray and dask: what sits above the arrays in practice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Mapping


def _to_zarr(call: Call) -> Mapping[str, Any]:
    return {"api": f"xarray.{type(call.instance).__name__}", "call": "to_zarr"}


def _arrays(call: Call) -> Any:
    """The arrays in memory that are to be written; lazy ones are not computed for it."""
    held = call.instance
    variables = held.variables.values() if hasattr(held, "variables") else (held.variable,)
    return [variable._data for variable in variables if type(variable._data).__module__ == "numpy"]


XARRAY = Probe(
    name="xarray",
    library="xarray",
    sites=(
        *(
            Site(
                target=f"xarray.core.{module}:{kind}.to_zarr",
                kind="operation",
                direction="write",
                inputs=(_arrays,),
                describe=_to_zarr,
            )
            for module, kind in (("dataset", "Dataset"), ("dataarray", "DataArray"))
        ),
        *(
            Site(target=f"xarray.core.{module}:{kind}.{method}", kind="context", direction="read")
            for module, kind in (("dataset", "Dataset"), ("dataarray", "DataArray"))
            for method in ("load", "compute")
        ),
        Site(
            target="xarray.backends.zarr:ZarrArrayWrapper.__getitem__", kind="context", direction="read", output=True
        ),
        Site(target="xarray.backends.zarr:ZarrStore.store", kind="context", direction="write"),
    ),
)

DASK = Probe(
    name="dask",
    library="dask",
    sites=(
        Site(target="dask.array.core:store", kind="context", direction="write"),
        Site(target="dask.array.core:to_zarr", kind="context", direction="write"),
        Site(target="dask.array.core:load_store_chunk", kind="context", direction="write", inputs=("x",)),
        Site(target="dask.array.core:getter", kind="context", direction="read", output=True),
        Site(target="dask.base:compute", kind="context"),
    ),
)
