"""numcodecs from 0.15.1: every codec class, by what a codec is and not by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Family, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def _codec(call: Call) -> Mapping[str, Any]:
    return {"codec": str(getattr(call.instance, "codec_id", None) or type(call.instance).__name__)}


def _registered() -> Iterable[type]:
    registry = getattr(sys.modules.get("numcodecs.registry"), "codec_registry", {})
    return [kind for kind in registry.values() if isinstance(kind, type)]


PROBE = Probe(
    name="numcodecs",
    library="numcodecs",
    families=(
        Family(
            base="numcodecs.abc:Codec",
            methods=(
                Site(target="encode", kind="encode", direction="write", inputs=(1,), output=True, describe=_codec),
                Site(
                    target="decode",
                    kind="decode",
                    direction="read",
                    inputs=(1,),
                    destinations=("out",),
                    output=True,
                    describe=_codec,
                ),
            ),
            more=_registered,
        ),
    ),
)
