"""zarrista 0.1: arrays sync and async. Nothing between the call and the disk is Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Argument, Call, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def _codec(described: Mapping[str, Any]) -> str:
    inner = (described.get("configuration") or {}).get("codecs")
    return f"sharding({'+'.join(map(_codec, inner))})" if inner else str(described["name"])


def _store_name(store: Any) -> str:
    """Its class, and for one of obstore's or icechunk's the library too: zarrista has stores of the same names."""
    kind = type(store)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library == "zarrista" else f"{library.lstrip('_')}.{kind.__name__}"


def _describe(call: Call) -> Mapping[str, Any]:
    array = call.instance
    return {
        "api": f"zarrista.{type(array).__name__}",
        "store": _store_name(array.storage),
        "codecs": tuple(_codec(codec) for codec in array.metadata["codecs"]),
    }


def _bytes_given(call: Call) -> Any:
    given = call.args[2]
    return getattr(given, "bytes", given)


_WRITES: dict[str, Argument] = {
    "store_array_subset": 2,
    "store_chunk": _bytes_given,
    "store_chunks": 2,
    "store_encoded_chunk": 2,
}
_READS = (
    "retrieve_array_subset",
    "retrieve_chunk",
    "retrieve_encoded_chunk",
    "retrieve_encoded_subchunk",
    "retrieve_subchunk",
)


def _sites() -> Iterator[Site]:
    for kind in ("Array", "AsyncArray"):
        writes = {**_WRITES, "__setitem__": 2} if kind == "Array" else _WRITES
        for name, given in writes.items():
            yield Site(
                target=f"zarrista:{kind}.{name}",
                kind="operation",
                direction="write",
                inputs=(given,),
                describe=_describe,
            )
        for name in (*_READS, "__getitem__"):
            yield Site(
                target=f"zarrista:{kind}.{name}", kind="operation", direction="read", output=True, describe=_describe
            )
    for name in ("decode", "decode_async"):
        yield Site(target=f"zarrista:EncodedChunk.{name}", kind="decode", direction="read", inputs=(0,), output=True)


PROBE = Probe(name="zarrista", library="zarrista", sites=tuple(_sites()))
