"""fsspec from 2025.3: file systems sync and async, files, block caches and mappings, of any implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Family, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Mapping


def _about(key: Any, store: str) -> Mapping[str, Any]:
    """Only the last part of a path is kept: it tells data from metadata, the rest may name a person's directory."""
    return {"key": key.rstrip("/").rsplit("/", 1)[-1] if isinstance(key, str) else "", "store": store}


def _only(keys: Any) -> Any:
    """The one key when there is one."""
    return keys if isinstance(keys, str) else next(iter(keys)) if hasattr(keys, "__len__") and len(keys) == 1 else ""


def _path(call: Call) -> Mapping[str, Any]:
    path = next((call.get(name) for name in ("path", "paths", "rpath") if call.get(name) is not None), "")
    return _about(_only(path), type(call.instance).__name__)


def _piped(call: Call) -> Any:
    path = call.get("path")
    return list(path.values()) if isinstance(path, dict) else call.get("value")


def _mapped(call: Call) -> Mapping[str, Any]:
    return _about(_only(call.args[1]), f"FSMap({type(call.instance.fs).__name__})")


def _values(call: Call) -> Any:
    return list(call.args[1].values())


def _file(call: Call) -> Mapping[str, Any]:
    return _about(getattr(call.instance, "path", ""), type(call.instance).__name__)


def _of_file_system(prefix: str) -> tuple[Site, ...]:
    """The methods that move bytes, in their synchronous form or, with ``_``, the asynchronous one."""
    return (
        Site(target=f"{prefix}cat_file", kind="request", direction="read", output=True, describe=_path),
        Site(target=f"{prefix}cat_ranges", kind="request", direction="read", output=True, describe=_path),
        Site(target=f"{prefix}cat", kind="request", direction="read", output=True, describe=_path),
        Site(target=f"{prefix}pipe_file", kind="request", direction="write", inputs=("value",), describe=_path),
        Site(target=f"{prefix}pipe", kind="request", direction="write", inputs=(_piped,), describe=_path),
        Site(target=f"{prefix}get_file", kind="context", direction="read"),
        Site(target=f"{prefix}put_file", kind="context", direction="write"),
    )


_READ_AND_WRITE = (
    Site(target="read", kind="request", direction="read", output=True, describe=_file),
    Site(target="write", kind="request", direction="write", inputs=(1,), describe=_file),
)
_FILE = (
    *_READ_AND_WRITE,
    Site(target="readinto", kind="request", direction="read", destinations=(1,), describe=_file),
    Site(target="_fetch_range", kind="context", direction="read", output=True),
    Site(target="_upload_chunk", kind="context", direction="write"),
)
_MAP = "fsspec.mapping:FSMap"
_LOCAL_FILE = "fsspec.implementations.local:LocalFileOpener"

PROBE = Probe(
    name="fsspec",
    library="fsspec",
    families=(
        Family(base="fsspec.spec:AbstractFileSystem", methods=(*_of_file_system(""), *_of_file_system("_"))),
        Family(base="fsspec.spec:AbstractBufferedFile", methods=_FILE),
        Family(
            base="fsspec.caching:BaseCache",
            methods=(Site(target="_fetch", kind="context", direction="read", output=True),),
        ),
    ),
    sites=(
        Site(target="fsspec.asyn:sync", kind="context"),
        Site(target=f"{_MAP}.__getitem__", kind="request", direction="read", output=True, describe=_mapped),
        Site(target=f"{_MAP}.__setitem__", kind="request", direction="write", inputs=(2,), describe=_mapped),
        Site(target=f"{_MAP}.getitems", kind="request", direction="read", describe=_mapped),
        Site(target=f"{_MAP}.setitems", kind="request", direction="write", inputs=(_values,), describe=_mapped),
        *(replace(site, target=f"{_LOCAL_FILE}.{site.targets[0]}") for site in _READ_AND_WRITE),
    ),
)
