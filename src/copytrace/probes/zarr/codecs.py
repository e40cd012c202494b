"""zarr's codecs and the pipelines that run them."""

from __future__ import annotations

from dataclasses import replace

from copytrace.probes._site import Family, Site

_CARRIERS = frozenset({"BytesCodec", "ShardingCodec", "TransposeCodec", "V2Codec", "VLenUTF8Codec", "VLenBytesCodec"})
"""Codecs that only lay out what they are given, or pass it to numcodecs: the copies they cause are made by what they
call.
"""
_NUMCODECS = frozenset({"ZstdCodec", "BloscCodec", "GzipCodec", "_NumcodecsCodec"})


def _adapt(kind: type, site: Site) -> Site | None:
    """A site for ``kind``, none for what only raises or passes on: an async method of one chunk that calls its sync
    twin.
    """
    method = site.targets[0]
    if kind.__module__ == "zarr.abc.codec":
        return None
    if method.endswith("code_single") and kind.__name__ != "ShardingCodec":
        code = getattr(vars(kind)[method], "__code__", None)
        if code is not None and method.replace("single", "sync") in code.co_names:
            return None
    names = {base.__name__ for base in kind.__mro__ if base.__module__.startswith(("zarr.codecs", "numcodecs.zarr3"))}
    return replace(site, kind="context") if names & (_CARRIERS | _NUMCODECS) else site


CODECS = Family(
    base="zarr.abc.codec:BaseCodec",
    methods=(
        *(
            Site(target=f"_encode_{way}", kind="encode", direction="write", inputs=(1,), output=True)
            for way in ("single", "sync")
        ),
        *(
            Site(target=f"_decode_{way}", kind="decode", direction="read", inputs=(1,), output=True)
            for way in ("single", "sync")
        ),
        *(
            Site(target=f"_encode_partial_{way}", kind="context", direction="write", inputs=(2,))
            for way in ("single", "sync")
        ),
        *(
            Site(target=f"_decode_partial_{way}", kind="context", direction="read", output=True)
            for way in ("single", "sync")
        ),
    ),
    adapt=_adapt,
)

_MODULE = "zarr.core.codec_pipeline"

PIPELINES = (
    Site(target=f"{_MODULE}:BatchedCodecPipeline.read", kind="context", direction="read"),
    Site(target=f"{_MODULE}:BatchedCodecPipeline.write", kind="context", direction="write"),
    Site(target=f"{_MODULE}:BatchedCodecPipeline.read_batch", kind="context", direction="read"),
    Site(target=f"{_MODULE}:BatchedCodecPipeline.write_batch", kind="context", direction="write"),
    Site(target=f"{_MODULE}:FusedCodecPipeline.read", kind="context", direction="read", versions=">=3.3"),
    Site(target=f"{_MODULE}:FusedCodecPipeline.write", kind="context", direction="write", versions=">=3.3"),
    Site(target=f"{_MODULE}:FusedCodecPipeline.read_sync", kind="context", direction="read", versions=">=3.3"),
    Site(target=f"{_MODULE}:FusedCodecPipeline.write_sync", kind="context", direction="write", versions=">=3.3"),
)
