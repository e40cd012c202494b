"""Who is answerable for a copy: the layer, the function, and the chain of callers beneath it."""

from __future__ import annotations

import re
from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from copytrace.layers import CARRIERS, IMPORT_MACHINERY, layer_of_module, layer_of_native, permalink
from copytrace.model import Frame, SiteRef
from copytrace.native import RUNTIME_CRATES, crate_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from copytrace.flow import Edge
    from copytrace.lookup import Located
    from copytrace.model import Trace
    from copytrace.operations import Operations
    from copytrace.regions import Region
    from copytrace.tree import SpanView

UNKNOWN = "(unknown)"

_ALLOCATES = re.compile(
    r"malloc|calloc|realloc|PyDataMem_|PyArray_NewFromDescr|_PyBytes_FromSize|PyObject_GC_|gc_alloc"
)
"""Native functions that only get memory for the one that called them."""

_RUNTIME_CRATES = RUNTIME_CRATES | {"bytes", "pyo3_ffi"}
"""Crates that carry out orders, as the standard library does in Python."""

_MOST_CALLERS = 10


class Name(NamedTuple):
    """``frame`` is where the copy is made, ``layer`` who ordered it, ``primitive`` what carried the order out."""

    layer: str
    frame: Frame
    primitive: str
    callers: tuple[Frame, ...]


def is_rust(frame: Frame) -> bool:
    """Whether a native frame is a function of a Rust crate that does the work, not of a runtime beneath it."""
    crate = crate_of(frame.function) if frame.native else ""
    return bool(crate) and crate not in _RUNTIME_CRATES


def by_stack(stack: Sequence[Frame], library_layer: str = "") -> Name | None:
    """Name the answerable frame of an allocation's stack; ``library_layer`` is the layer of native frames whose crate
    does not tell it.

    None when nothing on the stack belongs to a library, user code included.
    """
    site: Frame | None = None
    primitive = ""
    for depth, frame in enumerate(stack):
        layer = frame.layer or (library_layer if is_rust(frame) else "")
        if frame.function in CARRIERS:
            site = site or frame
            continue
        if not layer:
            if site is None and (not primitive or not frame.native) and not _ALLOCATES.search(frame.function):
                primitive = frame.function
            continue
        if site is not None:
            return Name(layer, site, primitive, callers(stack[depth:]))
        depth = _at_work(stack, depth)
        return Name(stack[depth].layer or layer, stack[depth], primitive, callers(stack[depth + 1 :]))
    if site is not None:
        return Name(site.layer, site, primitive, ())
    return None


def _at_work(stack: Sequence[Frame], depth: int) -> int:
    """Where on ``stack`` the function stands that the frame at ``depth`` works for: what a library was built from (C
    that it brings along, a runtime's generic code) works for the Rust or Cython function of the same shared object.
    """
    within = takewhile(lambda at: stack[at].native and stack[at].file == stack[depth].file, range(depth, len(stack)))
    return next((at for at in within if "." in stack[at].function or is_rust(stack[at])), depth)


def imports(frame: Frame) -> bool:
    """Whether a frame is at work on an import, or is copytrace's own: what it moves is never payload."""
    return frame.file.startswith(IMPORT_MACHINERY) or frame.layer == "copytrace"


def by_import(stack: Iterable[Frame]) -> bool:
    """Whether an import allocated on a stack, innermost frame first, or copytrace itself. What the user's own code does
    while it is imported is the program's work.
    """
    nearest = next((frame for frame in stack if imports(frame) or frame.layer == "user"), None)
    return nearest is not None and imports(nearest)


def callers(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    """The frames of libraries and of the user's code, innermost first, repeats left out."""
    chain: list[Frame] = []
    for frame in stack:
        if frame.layer and not any(frame.function == known.function for known in chain):
            chain.append(frame)
            if len(chain) == _MOST_CALLERS:
                break
    return tuple(chain)


def reference(frame: Frame, versions: Mapping[str, str]) -> SiteRef:
    """A frame as the report shows it."""
    return SiteRef(frame.function, frame.file, frame.line, permalink(frame, versions))


class Namer:
    """Names edges and regions of one trace; equal situations are named once."""

    def __init__(self, trace: Trace, operations: Operations, located: Located, edges: Sequence[Edge]) -> None:
        self.stacks = trace.allocations.stacks
        self.moved_by = trace.transfers.callers
        self.spans = operations.spans
        self.regions = located.regions
        self._libraries = self._count_libraries(edges)
        self._of_region: dict[tuple[int, str], Name | None] = {}
        self._of_edge: dict[tuple[Any, ...], Name] = {}
        self._of_span: dict[tuple[int, str], Name] = {}

    def region(self, region: Region, operation: int) -> Name | None:
        """Who allocated a region; None for memory from before the session and where nobody is named."""
        if not region.rows:
            return None
        library = self._library(operation)
        key = (region.stack, library)
        if key not in self._of_region:
            stack = self.stacks[region.stack]
            name = by_stack(stack, library)
            if name is None:
                frame = next((frame for frame in stack if is_rust(frame)), None)
                name = Name(library, frame, "", ()) if frame and library else None
            self._of_region[key] = name
        return self._of_region[key]

    def edge(self, edge: Edge) -> Name:
        """Who moved the bytes of an edge."""
        into = self.regions[edge.destination] if edge.destination is not None else None
        out = self.regions[edge.source] if edge.source is not None else None
        memory = out if edge.kind == "flush" else into
        chain = self.spans.chain_of(edge.span)
        fresh = into is not None and bool(into.rows) and edge.kind != "flush" and _fresh(into, edge)
        key = (
            edge.kind,
            edge.mover,
            chain,
            edge.operation if chain < 0 else 0,
            memory.stack if memory else -1,
            edge.caller,
            fresh,
            self._library(edge.operation),
        )
        name = self._of_edge.get(key)
        if name is None:
            span = self.spans.get(edge.span)
            if edge.mover and span is not None:
                name = self._mover(edge, span, into)
            else:
                name = self._move(edge, span, memory, into if fresh else None)
            self._of_edge[key] = name
        return name

    def _move(self, edge: Edge, span: SpanView | None, memory: Region | None, fresh: Region | None) -> Name:
        caller = self.moved_by[edge.caller] if edge.caller >= 0 else None
        stack = self.stacks[memory.stack] if memory and memory.rows else ()
        if caller is not None and caller.layer:
            works = not crate_of(caller.function) or is_rust(caller)
            frame = caller if works else next((f for f in stack if is_rust(f)), caller)
            return Name(frame.layer or caller.layer, frame, "", self._callers_above(span))
        primitive = caller.function if caller else "realloc"
        name = self.region(fresh, edge.operation) if fresh else None
        if name is not None:
            return name._replace(primitive=name.primitive or primitive)
        if span is not None:
            return self._span(span, primitive)
        name = self.region(memory, edge.operation) if memory else None
        if name is not None:
            return name
        ordered = next((frame for frame in stack if not frame.native), caller)
        return Name("", ordered or Frame(UNKNOWN, "", 0), primitive, ())

    def _mover(self, edge: Edge, span: SpanView, into: Region | None) -> Name:
        name = self._span(span, span.site.primitive)
        if into is None or not into.rows or edge.kind == "scatter":
            return name
        stack = self.stacks[into.stack]
        if span.attributes.get("caller"):
            return name._replace(callers=_callers_of(name.frame, stack) or name.callers)
        function = span.site.name.rsplit(".", 1)[-1]
        for depth, frame in enumerate(stack):
            if not frame.native and frame.function.rsplit(".", 1)[-1] == function:
                by_frame = by_stack(stack[depth:])
                if by_frame is not None:
                    primitive = name.primitive or next((f.function for f in stack[:depth] if _carries_out(f)), "")
                    return by_frame._replace(frame=frame, primitive=primitive)
        if edge.kind in ("encode", "decode"):
            beneath = callers(frame for frame in stack if frame.layer != name.layer)
            return name._replace(callers=beneath or name.callers)
        return name

    def _span(self, span: SpanView, primitive: str) -> Name:
        key = (span.chain, primitive)
        if key not in self._of_span:
            self._of_span[key] = self._name_span(span, primitive)
        return self._of_span[key]

    def _name_span(self, span: SpanView, primitive: str) -> Name:
        frame = site_frame(span)
        above = self.spans.get(span.parent)
        chain = callers((*noted_callers(span), *self._callers_above(above)))
        if span.by_hand and chain:
            return Name(chain[0].layer, chain[0], primitive, chain[1:])
        if span.attributes.get("caller"):
            return Name(frame.layer, frame, span.site.primitive or span.site.name, chain)
        layer = chain[0].layer if frame.function in CARRIERS and chain else frame.layer
        return Name(layer, frame, primitive, chain)

    def _callers_above(self, span: SpanView | None) -> tuple[Frame, ...]:
        """The sites of a span and of those above it, and who called them; what called the operation is among them."""
        frames: list[Frame] = []
        while span is not None:
            frames += (site_frame(span), *noted_callers(span))
            span = self.spans.get(span.parent)
        return callers(frames)

    def _library(self, operation: int) -> str:
        """The native library at work in an operation, for frames of crates that several libraries are built from."""
        return self._libraries.get(operation, "")

    def _count_libraries(self, edges: Sequence[Edge]) -> dict[int, str]:
        votes: dict[int, Counter[str]] = {}
        for edge in edges:
            if edge.caller >= 0 and self.moved_by[edge.caller].layer:
                votes.setdefault(edge.operation, Counter())[self.moved_by[edge.caller].layer] += edge.nbytes
        layers: dict[str, str] = {}
        probed: dict[int, Counter[str]] = {}
        for operation, site, count in self.spans.sites_of_operations:
            library = self.spans.sites[site].library
            if library not in layers:
                layers[library] = layer_of_native("", "", f"_{library}") or layer_of_native("", "", library)
            if layers[library]:
                probed.setdefault(operation, Counter())[layers[library]] += count
        return {operation: counts.most_common(1)[0][0] for operation, counts in (probed | votes).items()}


def site_frame(span: SpanView) -> Frame:
    """A span's site as a frame: what was called, or for a primitive the line that called it."""
    if span.attributes.get("caller"):
        return _noted([span.attributes[name] for name in ("caller", "file", "line", "layer")])
    site = span.site
    return Frame(site.name, site.file, site.line, layer="" if site.library == "python" else layer_of_module(site.name))


def noted_callers(span: SpanView) -> tuple[Frame, ...]:
    """Who called, as a probe noted it."""
    return tuple(_noted(caller) for caller in span.attributes.get("called_from", ()))


def _noted(caller: Sequence[Any]) -> Frame:
    function, file, line, layer = caller
    return Frame(str(function), str(file), int(line), layer=str(layer))


def _fresh(region: Region, edge: Edge) -> bool:
    """Whether the block was allocated for this very move: by the span that made it, or since the last mark."""
    return region.span == edge.span or edge.kind == "fetch" or (not edge.span and not region.span)


def _carries_out(frame: Frame) -> bool:
    return not frame.layer and not _ALLOCATES.search(frame.function)


def _callers_of(frame: Frame, stack: Sequence[Frame]) -> tuple[Frame, ...]:
    """Who called the function of ``frame``, by the stack of what was allocated in it."""
    function = frame.function.rsplit(".", 1)[-1]
    for depth, below in enumerate(stack):
        if not below.native and below.function.rsplit(".", 1)[-1] == function:
            return callers(stack[depth + 1 :])
    return ()
