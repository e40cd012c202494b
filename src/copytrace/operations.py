"""Spans -> operations: which call moved an array region, through which store and codecs, and which span belongs to
which of them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.collecting import in_turn
from copytrace.model import COPY_KINDS, DESTINATION, INPUT, OUTPUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from copytrace.model import SiteInfo, Trace

METADATA_KEYS = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_CALLERS = {"caller", "called_from"}
_IN_MEMORY = frozenset({"MemoryStore", "ManagedMemoryStore", "GpuMemoryStore", "MemoryFileSystem"})
_RAW_CODECS = frozenset(
    {"", "bytes", "transpose", "sharding", "sharding_indexed", "crc32c", "vlen-utf8", "vlen-bytes", "endian"}
)
_CODEC_KINDS = frozenset({"encode", "decode"})
_ROOTS = _CODEC_KINDS | {"request"}


def is_metadata(attributes: Mapping[str, Any]) -> bool:
    """Whether a request is for a document that describes arrays, by its key."""
    return str(attributes.get("key", "")).rsplit("/", 1)[-1] in METADATA_KEYS


@dataclass(slots=True)
class SpanView:
    """One span with its place in the tree.

    ``operation`` is the id of the operation's span, 0 for none. Spans of one ``chain`` were reached through the same
    sites and callers.
    """

    id: int
    parent: int
    site: SiteInfo
    attributes: Mapping[str, Any]
    thread: int
    enter: int
    exit: int
    started: int
    ended: int
    payload: int
    error: bool
    is_metadata: bool
    operation: int = 0
    chain: int = 0
    children: list[int] = field(default_factory=list)

    @property
    def by_hand(self) -> bool:
        """Whether it is a ``copytrace.operation``."""
        return self.site.name == "copytrace.operation"


@dataclass(slots=True)
class Operation:
    """One call that moves an array region."""

    root: SpanView
    direction: str
    api: str
    store: str
    codecs: tuple[str, ...]
    payload: int
    errors: int
    chunks: int

    @property
    def label(self) -> str:
        return " . ".join(part for part in (self.direction, self.api, self.store, "+".join(self.codecs)) if part)


@dataclass(slots=True)
class Operations:
    """``spans`` by id in order of id; ``by_root`` the operations by the id of their outermost span."""

    spans: dict[int, SpanView]
    by_root: dict[int, Operation]


def group(trace: Trace) -> Operations:
    """Find the operations of a trace. Spans below none of them (metadata, the user's own code) have ``operation`` 0.
    A codec that was called by itself with nothing (libraries try theirs out when they are imported) is none.
    """
    spans: dict[int, SpanView] = {}
    chains: dict[tuple[int, int, int], int] = {}
    about_callers = [number if _CALLERS & a.keys() else -1 for number, a in enumerate(trace.attributes)]
    about_metadata = list(map(is_metadata, trace.attributes))
    for row in in_turn(trace.spans):
        number, parent, site, attributes, thread, enter, leave, started, ended, payload, error = row
        span = spans[number] = SpanView(
            number,
            parent,
            trace.sites[site],
            trace.attributes[attributes],
            thread,
            enter,
            leave,
            started,
            ended,
            payload,
            bool(error),
            about_metadata[attributes],
        )
        above = spans.get(parent)
        place = (above.chain if above else 0, site, about_callers[attributes])
        span.chain = chains.setdefault(place, len(chains) + 1)
        if above is not None:
            above.children.append(number)
        if above is not None and above.operation:
            span.operation = above.operation
        elif span.site.kind == "operation":
            span.operation = number
    _adopt_lone_roots(spans)
    members: dict[int, list[SpanView]] = {}
    for span in spans.values():
        if span.operation:
            members.setdefault(span.operation, []).append(span)
    seen: Counter[tuple[int, int]] = Counter()
    of_roots = trace.seen[np.isin(trace.seen["span"], np.array(list(members), np.uint64))]
    for number, role, nbytes in of_roots[["span", "role", "nbytes"]].tolist():
        seen[number, role] += nbytes
    found = (_operation(spans[root], inside, spans, seen) for root, inside in members.items())
    return Operations(spans, {op.root.id: op for op in found if op.payload or op.root.site.kind not in _CODEC_KINDS})


def _adopt_lone_roots(spans: dict[int, SpanView]) -> None:
    """A store or codec called outside any array operation is an operation of its own, unless it is after metadata."""
    for span in spans.values():
        if span.operation:
            continue
        above = spans.get(span.parent)
        if above is not None and above.operation:
            if spans[above.operation].site.kind != "operation":
                span.operation = above.operation
        elif span.site.kind in _ROOTS and not _below_metadata(span, spans):
            span.operation = span.id


def _below_metadata(span: SpanView | None, spans: dict[int, SpanView]) -> bool:
    while span is not None:
        if span.is_metadata:
            return True
        span = spans.get(span.parent)
    return False


def _operation(
    root: SpanView, inside: list[SpanView], spans: dict[int, SpanView], seen: Counter[tuple[int, int]]
) -> Operation:
    requests = [span for span in inside if span.site.kind == "request" and not span.is_metadata]
    outermost = [span for span in requests if not _has_request_above(span, spans)]
    described = [span.attributes for span in inside if span.site.kind == "operation"]
    store = next((str(a["store"]) for a in described if a.get("store")), "")
    if not store and outermost:
        store = str(outermost[0].attributes.get("store", ""))
    codecs = next((tuple(a["codecs"]) for a in described if a.get("codecs")), ())
    if not codecs and root.site.kind in _CODEC_KINDS:
        codecs = (str(root.attributes.get("codec") or root.site.name.rsplit(".", 1)[0].rsplit(".", 1)[-1].lower()),)
    stated = (s.site.direction for s in (root, *inside) if s.site.kind == "operation" and s.site.direction)
    asked = (s.site.direction for s in requests if s.site.direction)
    direction = root.site.kind if root.site.kind in _CODEC_KINDS else next(chain(stated, asked), "")
    api = str(root.attributes.get("api") or root.attributes.get("label") or root.site.name)
    return Operation(
        root=root,
        direction=direction,
        api=api,
        store=store,
        codecs=codecs,
        payload=_payload(root, inside, spans, seen),
        errors=int(root.error),
        chunks=len(outermost),
    )


def _has_request_above(span: SpanView, spans: dict[int, SpanView]) -> bool:
    above = spans.get(span.parent)
    while above is not None:
        if above.site.kind == "request":
            return True
        above = spans.get(above.parent)
    return False


def _payload(root: SpanView, inside: list[SpanView], spans: dict[int, SpanView], seen: Counter[tuple[int, int]]) -> int:
    """Bytes of the region: what the root says, or the sum over the operations directly below that say it.

    For a codec or a store called by itself, and where nobody says it, the bytes that it was handed or gave out.
    """
    if root.payload:
        return root.payload
    handed, given = seen[root.id, INPUT], seen[root.id, OUTPUT] or seen[root.id, DESTINATION]
    shown = given if root.site.kind == "decode" or root.site.direction == "read" else handed
    if root.site.kind in _ROOTS:
        return shown
    total = 0
    for span in inside:
        if span is root or not span.payload:
            continue
        above = spans.get(span.parent)
        while above is not None and above is not root and not above.payload:
            above = spans.get(above.parent)
        if above is root:
            total += span.payload
    return total or shown


def keeps_in_memory(store: str, function: str = "") -> bool:
    """Whether a store (``LoggingStore(MemoryStore)``), or the one that ``function`` is of, owns its bytes in memory."""
    innermost = store.rstrip(")").rsplit("(", 1)[-1]
    return innermost in _IN_MEMORY or ("zarr.storage." in function and not _IN_MEMORY.isdisjoint(function.split(".")))


def compresses(codecs: Iterable[str]) -> bool:
    """Whether any of an operation's codecs makes other bytes of its input, inside shards too."""
    return any(part not in _RAW_CODECS for codec in codecs for part in re.split(r"[(+)]", codec))


def is_mover(span: SpanView) -> bool:
    """Whether the span's site moves bytes by itself."""
    return span.site.kind in COPY_KINDS
