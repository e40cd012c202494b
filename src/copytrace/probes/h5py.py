"""h5py: datasets read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

_DATASET = "h5py._hl.dataset:Dataset"


def _describe(call: Call) -> Mapping[str, Any]:
    dataset = call.instance
    filters = [name for name in ("scaleoffset", "shuffle", "fletcher32") if getattr(dataset, name)]
    if dataset.compression:
        filters.append(str(dataset.compression))
    return {
        "api": "h5py.Dataset",
        "store": f"File({dataset.file.driver})",
        "codecs": tuple(filters) or ("bytes",),
    }


def _site(method: str, direction: str, **looks: Any) -> Site:
    return Site(
        target=f"{_DATASET}.{method}",
        name=f"h5py.Dataset.{method}",
        kind="operation",
        direction=direction,
        describe=_describe,
        **looks,
    )


PROBE = Probe(
    name="h5py",
    library="h5py",
    sites=(
        _site("__getitem__", "read", output=True),
        _site("__array__", "read", output=True),
        _site("read_direct", "read", destinations=("dest",)),
        _site("__setitem__", "write", inputs=("val",)),
        _site("write_direct", "write", inputs=("source",)),
    ),
)
