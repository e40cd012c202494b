"""Spans -> operations: which call moved an array region, through which store and codecs, and which span belongs to
which of them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from copytrace.model import DESTINATION, INPUT, OUTPUT
from copytrace.tree import Spans, SpanView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from copytrace.model import Trace

_IN_MEMORY = frozenset({"MemoryStore", "ManagedMemoryStore", "GpuMemoryStore", "MemoryFileSystem"})
_RAW_CODECS = frozenset(
    {"", "bytes", "transpose", "sharding", "sharding_indexed", "crc32c", "vlen-utf8", "vlen-bytes", "endian"}
)
_CODEC_KINDS = frozenset({"encode", "decode"})
_ROOTS = _CODEC_KINDS | {"request"}


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
    """All spans; ``by_root`` the operations by the id of their outermost span."""

    spans: Spans
    by_root: dict[int, Operation]


def group(trace: Trace) -> Operations:
    """Find the operations of a trace. Spans below none of them (metadata, the user's own code) have ``operation`` 0.
    A codec that was called by itself with nothing (libraries try theirs out when they are imported) is none.
    """
    spans = Spans(trace)
    spans.operation = _operations_of(spans)
    grouping = _Grouping(trace, spans)
    inside = np.flatnonzero(spans.operation)
    inside = inside[np.argsort(spans.operation[inside], kind="stable")]
    bounds = np.flatnonzero(np.diff(spans.operation[inside])) + 1
    found = map(grouping.operation, np.split(inside, bounds) if len(inside) else ())
    return Operations(spans, {op.root.id: op for op in found if op.payload or op.root.site.kind not in _CODEC_KINDS})


def _operations_of(spans: Spans) -> NDArray[np.int64]:
    """The id of the operation of each span. A store or codec called outside any array operation is an operation of its
    own, unless it is after metadata.
    """
    named = spans.outermost(np.where(spans.of_kind({"operation"}), spans.ids, 0))
    about_metadata = spans.is_metadata | spans.is_below(spans.is_metadata)
    alone = spans.of_kind(_ROOTS) & (named == 0) & ~about_metadata
    return np.where(named, named, spans.outermost(np.where(alone, spans.ids, 0)))


class _Grouping:
    def __init__(self, trace: Trace, spans: Spans) -> None:
        self.spans = spans
        self.is_operation = spans.of_kind({"operation"})
        requests = spans.of_kind({"request"})
        self.is_request = requests & ~spans.is_metadata
        self.is_outermost = self.is_request & ~spans.is_below(requests)
        self.has_payload = spans.table["payload"] > 0
        self.seen: Counter[tuple[int, int]] = Counter()
        of_roots = trace.seen[np.isin(trace.seen["span"], np.unique(spans.operation).astype(np.uint64))]
        for number, role, nbytes in of_roots[["span", "role", "nbytes"]].tolist():
            self.seen[number, role] += nbytes

    def operation(self, rows: NDArray[np.int64]) -> Operation:
        """The operation of ``rows`` of the spans, of which the first is its root."""
        spans = self.spans
        (root,) = spans.at(rows[:1])
        described = list(spans.at(rows[self.is_operation[rows]]))
        outermost = rows[self.is_outermost[rows]]
        store = next((str(s.attributes["store"]) for s in described if s.attributes.get("store")), "")
        if not store and len(outermost):
            store = str(next(spans.at(outermost[:1])).attributes.get("store", ""))
        codecs = next((tuple(s.attributes["codecs"]) for s in described if s.attributes.get("codecs")), ())
        if not codecs and root.site.kind in _CODEC_KINDS:
            codecs = (str(root.attributes.get("codec") or root.site.name.rsplit(".", 1)[0].rsplit(".", 1)[-1].lower()),)
        return Operation(
            root=root,
            direction=root.site.kind if root.site.kind in _CODEC_KINDS else self._direction(rows, described),
            api=str(root.attributes.get("api") or root.attributes.get("label") or root.site.name),
            store=store,
            codecs=codecs,
            payload=self._payload(root, rows),
            errors=int(root.error),
            chunks=len(outermost),
        )

    def _direction(self, rows: NDArray[np.int64], described: Iterable[SpanView]) -> str:
        """What its calls say, or else its requests."""
        stated = next((span.site.direction for span in described if span.site.direction), "")
        asked = map(self.spans.sites.__getitem__, self.spans.table["site"][rows[self.is_request[rows]]].tolist())
        return stated or next((site.direction for site in asked if site.direction), "")

    def _payload(self, root: SpanView, rows: NDArray[np.int64]) -> int:
        """Bytes of the region: what the root says, or the sum over the operations directly below that say it.

        For a codec or a store called by itself, and where nobody says it, the bytes that it was handed or gave out.
        """
        if root.payload:
            return root.payload
        seen = self.seen
        handed, given = seen[root.id, INPUT], seen[root.id, OUTPUT] or seen[root.id, DESTINATION]
        shown = given if root.site.kind == "decode" or root.site.direction == "read" else handed
        if root.site.kind in _ROOTS:
            return shown
        total = 0
        for span in self.spans.at(rows[self.has_payload[rows]]):
            above = self.spans.get(span.parent)
            while above is not None and above is not root and not above.payload:
                above = self.spans.get(above.parent)
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
