"""xarray and dask: what sits above the arrays in practice."""

from __future__ import annotations

from copytrace.probes._site import Probe, Site

XARRAY = Probe(
    name="xarray",
    library="xarray",
    sites=(
        *(
            Site(target=f"xarray.core.{module}:{kind}.{method}", kind="context", direction=direction)
            for module, kind in (("dataset", "Dataset"), ("dataarray", "DataArray"))
            for method, direction in (("to_zarr", "write"), ("load", "read"), ("compute", "read"))
        ),
        Site(target="xarray.backends.zarr:ZarrArrayWrapper.__getitem__", kind="context", direction="read", output=True),
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
