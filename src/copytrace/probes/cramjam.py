"""cramjam: the codecs of each of its modules, by one call or by a stream, as python-snappy under fsspec uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Probe, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODECS = ("snappy", "gzip", "zlib", "deflate", "brotli", "bzip2", "lz4", "zstd", "xz")
_VARIANTS = {"snappy": ("", "_raw"), "lz4": ("", "_block")}


def _site(codec: str, verb: str, name: str, **looks: Any) -> Site:
    return Site(
        target=f"cramjam:{codec}.{name}",
        name=f"cramjam.{codec}.{name}",
        kind="encode" if verb == "compress" else "decode",
        direction="write" if verb == "compress" else "read",
        describe=lambda _call: {"codec": codec},
        **looks,
    )


def _sites() -> Iterator[Site]:
    for codec in _CODECS:
        for verb in ("compress", "decompress"):
            for variant in _VARIANTS.get(codec, ("",)):
                yield _site(codec, verb, f"{verb}{variant}", inputs=(0,), output=True)
                yield _site(codec, verb, f"{verb}{variant}_into", inputs=(0,), destinations=(1,))
            yield _site(codec, verb, f"{verb.capitalize()}or.{verb}", inputs=(1,))
            for name in ("flush", "finish"):
                yield Site(target=f"cramjam:{codec}.{verb.capitalize()}or.{name}", kind="context", output=True)


PROBE = Probe(name="cramjam", library="cramjam", sites=tuple(_sites()))
