"""What a report says of where it was made: versions, and nothing that names a machine or a person."""

from __future__ import annotations

import platform
import sys
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGES = (
    *(
        "aiobotocore",
        "aiohttp",
        "botocore",
        "copytrace",
        "cramjam",
        "cubed",
        "dask",
        "distributed",
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
    """Python, platform and the versions of the array libraries that are imported; ``from_source`` are those that were
    not installed from a package index (PEP 610).
    """
    packages = {}
    sources = []
    installers = set()
    for name in PACKAGES:
        if (name in _ALWAYS or name in sys.modules) and (found := _installed(name)):
            packages[name], installer, from_source = found
            installers.add(installer)
            if from_source:
                sources.append(name)
    libc = "-".join(part for part in platform.libc_ver() if part)
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": "-".join(part for part in (platform.system(), platform.machine(), libc) if part),
        "installer": ", ".join(sorted(installers - {""})) or "unknown",
        "packages": packages,
        "from_source": sources,
    }


@cache
def _installed(name: str) -> tuple[str, str, bool] | None:
    """Version, installer and whether it is from source, None when there is no such distribution."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return found.version, (found.read_text("INSTALLER") or "").strip(), bool(found.read_text("direct_url.json"))


def released(environment: Mapping[str, Any]) -> dict[str, str]:
    """The versions of those packages that came from a package index: what is installed is what was released.

    Packages that were installed from a directory, a repository or a file of one's own may hold anything.
    """
    return {
        name: version
        for name, version in environment.get("packages", {}).items()
        if name not in environment.get("from_source", ())
    }
