"""What could be patched: every attribute of the modules and classes that copytrace probes, by identity."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PROBED = ("zarr", "numcodecs", "obstore", "fsspec", "xarray", "dask")


def attributes() -> dict[str, Any]:
    """Name -> object, of all modules and classes of probed packages, of thread pools, memray and monitoring tools."""
    found: dict[str, Any] = {}
    classes: list[type] = [ThreadPoolExecutor]
    for name, module in list(sys.modules.items()):
        if name.split(".", 1)[0] in PROBED and module is not None:
            for key, value in list(vars(module).items()):
                found[f"{name}:{key}"] = value
                if isinstance(value, type) and str(value.__module__).split(".", 1)[0] in (*PROBED, "builtins"):
                    classes.append(value)
    for kind in classes:
        found |= {f"{kind.__module__}.{kind.__qualname__}.{key}": value for key, value in list(vars(kind).items())}
    memray = sys.modules.get("memray")
    if memray is not None:
        found["memray.Tracker"] = memray.Tracker
    found |= {f"monitoring tool {tool}": sys.monitoring.get_tool(tool) for tool in range(6)}
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names whose object is another one or gone; what is made at its first use, and the last instance that
    fsspec keeps of a class, are no change."""
    settled = {name: value for name, value in before.items() if value is not None}
    return sorted(
        name
        for name, value in settled.items()
        if after.get(name, before) is not value and not name.endswith((".__doc__", "_abc_impl", "._cache", "._latest"))
    )
