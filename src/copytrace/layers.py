"""Module, crate or library -> layer and project; the source of an installed version as a permalink.

A layer is who is answerable for a copy: the nearest frame that belongs to a known library. CPython, the standard
library and numpy only carry out the order and have no layer; the conversions in :data:`CARRIERS` carry out the order
of their caller.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from copytrace.native import RUNTIME_CRATES
from copytrace.places import imported_as, loaded_from, relative

if TYPE_CHECKING:
    from collections.abc import Mapping

    from copytrace.model import Frame

IMPORT_MACHINERY = "<frozen importlib"
"""How the file of a frame at work on an import begins."""

MODULE_LAYERS = {
    "zarr.core.buffer": "zarr.buffer",
    "zarr.buffer": "zarr.buffer",
    "zarr.core.codec_pipeline": "zarr.pipeline",
    "zarr.core.chunk_utils": "zarr.pipeline",
    "zarr.core.indexing": "zarr.array",
    "zarr.codecs": "zarr.codecs",
    "zarr.abc.codec": "zarr.codecs",
    "zarr.storage": "zarr.storage",
    "zarr.abc.store": "zarr.storage",
    "zarr.core.sync": "",
    "zarr._storage": "zarr.storage",
    "zarr.testing": "zarr.storage",
    "zarr": "zarr.array",
    "s3fs": "s3fs",
    "gcsfs": "gcsfs",
    "aiobotocore": "botocore",
    "botocore": "botocore",
    "copytrace": "",
    "numpy": "",
    "wrapt": "",
    "memray": "",
    "asyncio": "",
    "uvloop": "",
}
"""Longest dotted prefix wins; a module that none fits has the layer of its top-level package."""

CRATE_LAYERS = {
    "_obstore": "obstore",
    "pyo3_object_store": "obstore",
    "pyo3_bytes": "obstore",
    "object_store": "",
    "_icechunk_python": "icechunk",
    "icechunk": "icechunk",
    "icechunk_storage": "icechunk",
    "icechunk_arrow_object_store": "icechunk",
    "_zarrista": "zarrista",
    "zarrista": "zarrista",
    "zarrs_python": "zarrs",
    "zarrs": "zarrs",
    "_internal": "",
}
"""Crates that answer for their copies. A crate that is not here (``object_store``, ``bytes``) answers under the library
it is built into.
"""

LIBRARY_LAYERS = {
    "_obstore": "obstore",
    "_icechunk_python": "icechunk",
    "_zarrista": "zarrista",
    "zarrs": "zarrs",
    "zarrs_python": "zarrs",
    "_ssl": "",
    "_socket": "",
}

CARRIER_LIBRARIES = re.compile(
    r"^(libpython|python3|lib(c|m|pthread|dl|rt|stdc\+\+|gcc_s|z|ssl|crypto)[.-]|ld-|_multiarray_umath|_simd|lib\w*blas)"
)
"""Base names of shared objects that only carry out orders."""

CARRIERS = frozenset(
    f"zarr.core.buffer.{module}.{function}"
    for module in ("core", "cpu", "gpu")
    for function in (
        "Buffer.to_bytes",
        "Buffer.as_buffer_like",
        "Buffer.as_numpy_array",
        "NDBuffer.as_numpy_array",
        "NDBuffer.copy",
    )
)
"""Conversions whose caller is answerable: it asked for another form of the bytes."""


def project_of(layer: str) -> str:
    """The distribution a layer belongs to: ``zarr.buffer`` -> ``zarr``."""
    return layer.split(".", 1)[0] if layer.startswith("zarr.") else layer


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


@cache
def _distribution(package: str, kind: str) -> str:
    """The distribution that a top-level package comes from, empty when there is none; most have its name."""
    try:
        return metadata.distribution(package).name
    except (metadata.PackageNotFoundError, ValueError):
        found = _distributions().get(package, []) if kind == "installed" else []
        return found[0] if found else ""


def _kind_of(package: str) -> str:
    file = getattr(sys.modules.get(package), "__file__", None)
    return relative(file)[1] if isinstance(file, str) else ""


@cache
def layer_of_module(name: str, kind: str = "") -> str:
    """The layer of a Python module or of something in it; ``kind`` is what :func:`copytrace.places.relative` says of
    it, by default of the package that is imported under that name.

    A package that is not in the table has the name of its distribution, what no distribution holds is the user's.
    """
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        layer = MODULE_LAYERS.get(".".join(parts[:n]))
        if layer is not None:
            return layer
    if parts[0] == "__main__":
        return "user"
    kind = kind or _kind_of(parts[0])
    return _distribution(parts[0], kind) or (parts[0] if kind == "installed" else "user")


@cache
def layer_of_native(function: str, crate: str, library: str) -> str:
    """The layer of a native frame, empty for what only carries out orders.

    ``crate`` is the Rust crate of the function, ``library`` the base name of the shared object when it is known.
    Cython functions name their module in the symbol (``__pyx_pw_9numcodecs_4zstd_1compress``).
    """
    if CARRIER_LIBRARIES.match(library):
        return ""
    if function.startswith("__pyx_"):
        module = cython_name(function)
        return layer_of_module(module) if "." in module else ""
    if crate and crate not in RUNTIME_CRATES:
        layer = CRATE_LAYERS.get(crate)
        if layer is not None:
            return layer or layer_of_library(library)
    return layer_of_library(library)


@cache
def layer_of_library(library: str) -> str:
    """The layer of a shared object, by the table or by the package that it was loaded from."""
    stem = library.split(".", 1)[0]
    if stem in LIBRARY_LAYERS or not stem or stem == "<unknown>":
        return LIBRARY_LAYERS.get(stem, "")
    path = loaded_from(library)
    name, kind = relative(path)
    if not path or kind == "standard":
        return ""
    module = imported_as(path) or name.split(os.sep, 1)[0].removesuffix(".libs")
    return layer_of_module(module, kind) if kind == "installed" or imported_as(path) else ""


@cache
def cython_name(symbol: str) -> str:
    """The dotted name in a Cython symbol, or the symbol itself.

    >>> cython_name("__pyx_pw_9numcodecs_4zstd_1compress")
    'numcodecs.zstd.compress'
    """
    match = re.match(r"__pyx_(?:pw|pf|fuse_\d+_*pw|f|tp_\w+?|gb)_", symbol)
    if not match:
        return symbol
    rest, names = symbol[match.end() :], []
    while found := re.match(r"(\d+)(?=[A-Za-z_])", rest):
        size = int(found.group(1))
        name = rest[found.end() : found.end() + size]
        tail = rest[found.end() + size :]
        if len(name) < size or (tail and not tail.startswith("_")):
            break
        names.append(name)
        rest = tail[1:]
    last = re.split(r"[.(]", re.sub(r"^\d+", "", rest), maxsplit=1)[0]
    return ".".join([*names, last] if last else names) or symbol


SOURCES = {
    "zarr": (
        ("3", "https://github.com/zarr-developers/zarr-python/blob/v{version}/src/{file}"),
        ("2", "https://github.com/zarr-developers/zarr-python/blob/v{version}/{file}"),
    ),
    "numcodecs": (
        ("0.17", "https://github.com/zarr-developers/numcodecs/blob/v{version}/src/{file}"),
        ("0.6", "https://github.com/zarr-developers/numcodecs/blob/v{version}/{file}"),
    ),
    "fsspec": (("2022.3", "https://github.com/fsspec/filesystem_spec/blob/{version}/{file}"),),
    "s3fs": (("2022.3", "https://github.com/fsspec/s3fs/blob/{version}/{file}"),),
    "aiohttp": (("3", "https://github.com/aio-libs/aiohttp/blob/v{version}/{file}"),),
    "xarray": (("2022.3", "https://github.com/pydata/xarray/blob/v{padded}/{file}"),),
    "dask": (("2022.6", "https://github.com/dask/dask/blob/{version}/{file}"),),
    "botocore": (("1", "https://github.com/boto/botocore/blob/{version}/{file}"),),
    "obstore": (("0.5", "https://github.com/developmentseed/obstore/blob/py-v{version}/obstore/python/{file}"),),
    "icechunk": (("0.2", "https://github.com/earth-mover/icechunk/blob/v{version}/icechunk-python/python/{file}"),),
}
"""Distribution -> (from this version on, where the file of a wheel lies), newest first; ``padded`` is the version with
a month of two digits, as xarray's tags have it. As the tags of the repositories and their trees are.
"""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _padded(version: str) -> str:
    year, _, rest = version.partition(".")
    month, dot, patch = rest.partition(".")
    return f"{year}.{month:>02}{dot}{patch}"


def permalink(frame: Frame, versions: Mapping[str, str]) -> str:
    """The source line of a Python frame at the installed version's tag, empty when that is not known for certain.

    ``versions`` maps the distributions that were installed from a package index to their versions.
    """
    package = frame.file.split("/", 1)[0]
    version = versions.get(package, "")
    if frame.native or not frame.line or not re.fullmatch(r"\d+(\.\d+)*", version):
        return ""
    for since, template in SOURCES.get(package, ()):
        if _numbers(version) >= _numbers(since):
            return f"{template.format(version=version, padded=_padded(version), file=frame.file)}#L{frame.line}"
    return ""
