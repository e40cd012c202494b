"""What a report says of where it was made: versions, and nothing that names a machine or a person."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

PACKAGES = (
    *(
        "aiobotocore",
        "aiohttp",
        "botocore",
        "copytrace",
        "cramjam",
        "cubed",
        "dask",
        "fsspec",
        "gcsfs",
        "h5py",
        "icechunk",
    ),
    *(
        "kerchunk",
        "memray",
        "numcodecs",
        "numpy",
        "obspec",
        "obstore",
        "pyarrow",
        "s3fs",
        "tensorstore",
        "virtualizarr",
    ),
    *("xarray", "zarr", "zarrista", "zarrs"),
)
"""Distributions whose versions matter to a copy; those that are imported or part of copytrace are listed."""

_ALWAYS = {"copytrace", "memray", "numpy"}


def describe() -> dict[str, Any]:
    """Python, platform and the versions of the array libraries that are imported."""
    packages = {}
    installers = set()
    for name in PACKAGES:
        if name in _ALWAYS or name in sys.modules:
            try:
                found = metadata.distribution(name)
                packages[name] = found.version
                installers.add((found.read_text("INSTALLER") or "").strip())
            except metadata.PackageNotFoundError:
                continue
    libc = "-".join(part for part in platform.libc_ver() if part)
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": "-".join(part for part in (platform.system(), platform.machine(), libc) if part),
        "installer": ", ".join(sorted(installers - {""})) or "unknown",
        "packages": packages,
    }
