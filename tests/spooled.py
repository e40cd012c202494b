"""Recording with the recorder alone: marks are kept in a list, spans are read back as objects."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.model import DESTINATION, INPUT, OUTPUT, SPAN_DTYPE, SiteInfo
from copytrace.probes import Attachment, Probe, attach_all
from copytrace.recorder import recorder
from copytrace.spool import Spool

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Seen:
    role: int
    contiguous: bool
    address: int
    extent: int
    nbytes: int


@dataclass
class Span:
    id: int
    parent: int
    name: str
    kind: str
    direction: str
    library: str
    attributes: Mapping[str, Any]
    thread: int
    enter: int
    exit: int
    started: int
    ended: int
    payload: int
    error: bool
    seen: list[Seen] = field(default_factory=list)

    def sizes(self, role: int) -> list[int]:
        return [seen.nbytes for seen in self.seen if seen.role == role]

    @property
    def inputs(self) -> list[int]:
        return self.sizes(INPUT)

    @property
    def outputs(self) -> list[int]:
        return self.sizes(OUTPUT)

    @property
    def destinations(self) -> list[int]:
        return self.sizes(DESTINATION)


class Recorded:
    """``spans`` in the order they began, once the recording is over; ``marks`` as (sequence, thread, span)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.marks: list[tuple[int, int, int]] = []
        self.attachment: Attachment | None = None
        self._count = itertools.count(1)
        self._lock = threading.Lock()

    def mark(self, span: int) -> int:
        with self._lock:
            sequence = next(self._count)
            self.marks.append((sequence, threading.get_ident(), span))
        return sequence

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans of {name} in {[span.name for span in self.spans]}"
        return found[0]

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def ancestors(self, span: Span) -> list[str]:
        by_id = {span.id: span for span in self.spans}
        found = []
        while span.parent in by_id:
            span = by_id[span.parent]
            found.append(span.name)
        return found

    def innermost_at(self, sequence: int, thread: int) -> int:
        """The span that is innermost on ``thread`` just after ``sequence``."""
        return next((span for at, on, span in reversed(self.marks) if at <= sequence and on == thread), 0)


@contextmanager
def recording(spool: Path, *probes: Probe, attached: bool = True) -> Iterator[Recorded]:
    """Record into ``spool`` with ``probes`` attached, all of copytrace's own when none are given."""
    recorded = Recorded()
    spool.mkdir(exist_ok=True)
    recorder.begin(spool, recorded.mark)
    try:
        if attached:
            recorded.attachment = Attachment(probes) if probes else attach_all()
        yield recorded
        assert recorder.failures == 0, recorder.first_failure
    finally:
        if recorded.attachment is not None:
            recorded.attachment.detach()
        recorder.end()
    recorded.spans = read_spans(spool)


def read_spool(spool: Path) -> tuple[Any, Any, tuple[SiteInfo, ...], list[Mapping[str, Any]]]:
    """Spans in the order in which they closed, buffers that were seen in them, sites and attributes."""
    read = Spool(spool)
    spans = np.concatenate([np.zeros(0, SPAN_DTYPE), *read.spans()])
    return (
        spans,
        read.seen(spans[np.argsort(spans["id"])]),
        read.sites,
        read.attributes.chosen(range(read.attributes.count)),
    )


def read_spans(spool: Path) -> list[Span]:
    rows, seen, sites, attributes = read_spool(spool)
    spans = {}
    for row in rows:
        site = sites[int(row["site"])]
        spans[int(row["id"])] = Span(
            id=int(row["id"]),
            parent=int(row["parent"]),
            name=site.name,
            kind=site.kind,
            direction=site.direction,
            library=site.library,
            attributes=attributes[int(row["attributes"])],
            thread=int(row["thread"]),
            enter=int(row["enter"]),
            exit=int(row["exit"]),
            started=int(row["started"]),
            ended=int(row["ended"]),
            payload=int(row["payload"]),
            error=bool(row["error"]),
        )
    for row in seen:
        spans[int(row["span"])].seen.append(
            Seen(int(row["role"]), bool(row["contiguous"]), int(row["address"]), int(row["extent"]), int(row["nbytes"]))
        )
    return sorted(spans.values(), key=lambda span: span.enter)


def attributes_of(attachment_probes: Iterable[Probe]) -> dict[tuple[int, str], Any]:
    """What is in the place of every attribute that the probes may patch: (owner's id, name) -> the raw object."""
    attachment = Attachment(attachment_probes)
    try:
        places = [(patch.owner, patch.attribute) for patch in attachment._patches.values()]
    finally:
        attachment.detach()
    return {(id(owner), name): vars(owner).get(name) for owner, name in places}
