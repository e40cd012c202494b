"""obstore 0.11 and 0.12: functions and methods, sync and async, on every store."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def _request(call: Call) -> Mapping[str, Any]:
    store = call.args[0] if call.args else call.kwargs.get("store")
    return {"key": str(call.get("path", "")), "store": type(store).__name__}


def _methods(kind: str, names: tuple[str, ...], reads: bool) -> tuple[Site, ...]:
    return tuple(
        Site(
            target=name,
            name=f"obstore.{kind}.{name}",
            kind="request",
            direction="read" if reads else "write",
            inputs=() if reads else (1,),
            output=reads,
        )
        for name in names
    )


_STREAM = _methods("BytesStream", ("__next__", "__anext__"), reads=True)
_READER = _methods("ReadableFile", ("read", "readall", "readline", "readlines"), reads=True)
_WRITER = _methods("WritableFile", ("write", "flush", "close"), reads=False)
_RESULT = (
    *_methods("GetResult", ("bytes", "bytes_async", "buffer", "buffer_async"), reads=True),
    *(
        Site(target=name, name=f"obstore.GetResult.{name}", kind="context", direction="read", returns=_STREAM)
        for name in ("stream", "__iter__", "__aiter__")
    ),
)

_READS: dict[str, tuple[Site, ...]] = {"get": _RESULT, "get_range": (), "get_ranges": ()}


def _both(name: str) -> tuple[str, str]:
    return name, f"{name}_async"


def _sites() -> Iterator[Site]:
    for owners, shown in (
        (("obstore:",), "obstore."),
        (
            ("obstore.store:ObjectStoreMethods.", "obstore.store:_ObjectStoreMixin."),
            "obstore.store.ObjectStoreMethods.",
        ),
    ):
        for base, returns in _READS.items():
            for name in _both(base):
                yield Site(
                    target=tuple(owner + name for owner in owners),
                    name=shown + name,
                    kind="request",
                    direction="read",
                    output=not returns,
                    returns=returns,
                    describe=_request,
                )
        for name in _both("put"):
            yield Site(
                target=tuple(owner + name for owner in owners),
                name=shown + name,
                kind="request",
                direction="write",
                inputs=("file",),
                describe=_request,
            )
    for (opens, returns), name in product((("open_reader", _READER), ("open_writer", _WRITER)), ("", "_async")):
        yield Site(
            target=f"obstore:{opens}{name}",
            kind="context",
            direction="read" if returns is _READER else "write",
            returns=returns,
            describe=_request,
        )
    yield Site(target="obstore:Bytes.to_bytes", kind="copy", direction="read", inputs=(0,), output=True)


PROBE = Probe(name="obstore", library="obstore", sites=tuple(_sites()))
