"""tensorstore: arrays read and written by its threads; a call returns a future, and is over when that is done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

_STORE = "tensorstore:TensorStore"


def _codec(described: Any) -> str:
    return str(described.get("name") or described.get("id")) if isinstance(described, dict) else str(described)


def _describe(call: Call) -> Mapping[str, Any]:
    array = call.instance
    described = array.spec().to_json()
    held = described.get("kvstore")
    metadata = described.get("metadata", {})
    codecs = metadata.get("codecs") or (metadata.get("compressor"),)
    return {
        "api": "tensorstore.TensorStore",
        "store": f"{described.get('driver', '')}({held.get('driver', '')})" if isinstance(held, dict) else "",
        "codecs": tuple(_codec(codec) for codec in codecs if codec) or ("bytes",),
    }


def _site(method: str, direction: str, **looks: Any) -> Site:
    return Site(target=f"{_STORE}.{method}", kind="operation", direction=direction, describe=_describe, **looks)


PROBE = Probe(
    name="tensorstore",
    library="tensorstore",
    sites=(
        _site("read", "read", output=True),
        _site("__array__", "read", output=True),
        _site("write", "write", inputs=(1,)),
        _site("__setitem__", "write", inputs=(2,)),
    ),
)
