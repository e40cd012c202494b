"""Copies made by methods of immutable C types, which cannot be patched: told by ``sys.monitoring``, beside memray and
any profiler.

A call is recorded as a span around the primitive. The interpreter tells the callable and its first argument and nothing
of the result. A place that was seen to call something else is not watched any more, so that watching costs nothing
where nothing is copied.
"""

from __future__ import annotations

import io
import mmap
import sys
import time
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from copytrace.callers import nearest
from copytrace.extents import extents
from copytrace.model import DESTINATION, INPUT, SiteInfo
from copytrace.places import OWN_FILE, PACKAGE
from copytrace.probes._site import Switch
from copytrace.recorder import pack_span, parent_span, recorder, thread_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

SMALLEST = 512
"""Bytes; calls on less are not recorded."""

_TOOL_IDS = (4, 3, 5, 2)

_METHODS: dict[type, dict[str, str]] = {
    np.ndarray: {
        "tobytes": "copy",
        "copy": "copy",
        "astype": "convert",
        "byteswap": "convert",
        "flatten": "gather",
        "ravel": "gather",
        "take": "gather",
    },
    memoryview: {"tobytes": "copy"},
    bytes: {"join": "join"},
    io.BytesIO: {"read": "copy", "read1": "copy", "getvalue": "copy", "getbuffer": "copy", "readinto": "copy"},
    mmap.mmap: {"read": "copy"},
}
_FUNCTIONS: dict[str, tuple[Any, str]] = {
    "bytes": (bytes, "copy"),
    "bytearray": (bytearray, "copy"),
    "numpy.array": (np.array, "copy"),
    "numpy.ascontiguousarray": (np.ascontiguousarray, "gather"),
    "numpy.asfortranarray": (np.asfortranarray, "gather"),
    "numpy.concatenate": (np.concatenate, "join"),
    "numpy.copyto": (np.copyto, "scatter"),
}
_UNSIZED = frozenset({"bytes.join", *(f"BytesIO.{name}" for name in _METHODS[io.BytesIO])})
"""The first argument does not hold what is copied, or cannot be looked at without changing it."""
_GATHERS_ONLY = frozenset({"ndarray.ravel", "numpy.asfortranarray"})
_LISTS = frozenset({"numpy.concatenate"})


class _Primitive(NamedTuple):
    name: str
    site: int
    role: int


class _Pending(NamedTuple):
    code: CodeType
    offset: int
    mark: Callable[[int], int]
    span: int
    parent: int
    previous: int
    site: int
    attributes: int
    started: int
    enter: int


class Primitives(Switch):
    """``sys.monitoring`` of calls, on for a session."""

    info = SiteInfo("sys.monitoring", "python", "context")

    def __init__(self) -> None:
        self._tool: int | None = None
        self._known: dict[int, _Primitive] = {}
        self._bound: dict[tuple[type, str], _Primitive] = {}

    def attach(self) -> str:
        monitoring = sys.monitoring
        for tool in _TOOL_IDS:
            if monitoring.get_tool(tool) is None:
                break
        else:
            names = ", ".join(str(monitoring.get_tool(tool)) for tool in _TOOL_IDS)
            unseen = "copies by bytes(), ndarray.tobytes() and their like are not seen"
            return f"no id of sys.monitoring is free ({names}): {unseen}"
        monitoring.use_tool_id(tool, "copytrace")
        self._tool = tool
        self._learn()
        events = monitoring.events
        monitoring.register_callback(tool, events.CALL, self._on_call)
        for event in (events.C_RETURN, events.C_RAISE):
            monitoring.register_callback(tool, event, self._on_return if event == events.C_RETURN else self._on_raise)
        monitoring.set_events(tool, events.CALL)
        monitoring.restart_events()
        return ""

    def detach(self) -> None:
        if self._tool is None:
            return
        monitoring, tool = sys.monitoring, self._tool
        monitoring.set_events(tool, 0)
        for event in (monitoring.events.CALL, monitoring.events.C_RETURN, monitoring.events.C_RAISE):
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
        self._tool = None

    def _learn(self) -> None:
        if self._known:
            return
        for kind, methods in _METHODS.items():
            for method, copies in methods.items():
                name = f"{kind.__name__}.{method}"
                primitive = _primitive(name, f"{'numpy.' if kind is np.ndarray else ''}{name}", copies)
                self._known[id(getattr(kind, method))] = self._bound[kind, method] = primitive
        for name, (function, copies) in _FUNCTIONS.items():
            self._known[id(function)] = _primitive(name, name, copies)

    def _on_call(self, code: CodeType, offset: int, function: object, argument: object) -> object:
        primitive = self._known.get(id(function))
        if primitive is None:
            if type(function) is not BuiltinMethodType:
                return sys.monitoring.DISABLE
            argument = function.__self__
            primitive = self._bound.get((type(argument), function.__name__))
            if primitive is None:
                return sys.monitoring.DISABLE
        if primitive.name in _GATHERS_ONLY and _gives_a_view(argument):
            return None
        if _own(code):
            return sys.monitoring.DISABLE
        mark, state = recorder.mark, thread_state()
        if mark is None or state.busy or state.copying or parent_span.get() > recorder.muted_before:
            return None
        state.busy = True
        try:
            if _worthwhile(primitive.name, argument):
                _open(primitive, code, offset, argument)
        except Exception as error:
            recorder.failed(error, primitive.name)
        finally:
            state.busy = False
        return None

    def _on_return(self, code: CodeType, offset: int, _function: object, _argument: object) -> None:
        _ended(code, offset, 0)

    def _on_raise(self, code: CodeType, offset: int, _function: object, _argument: object) -> None:
        _ended(code, offset, 1)


def _primitive(name: str, shown: str, kind: str) -> _Primitive:
    return _Primitive(
        name, recorder.site(SiteInfo(shown, "python", kind, "", shown)), DESTINATION if kind == "scatter" else INPUT
    )


def _own(code: CodeType) -> bool:
    return code.co_filename == OWN_FILE or code.co_filename.startswith(PACKAGE)


def _gives_a_view(argument: object) -> bool:
    """Whether an array is in both orders, so that neither copies it."""
    if not isinstance(argument, np.ndarray):
        return False
    flags = argument.flags
    return flags.c_contiguous and flags.f_contiguous


def _worthwhile(name: str, argument: Any) -> bool:
    if name in _UNSIZED:
        return True
    if name == "bytes" and type(argument) is bytes:
        return False
    if isinstance(argument, list | tuple):
        return name in _LISTS and sum(extent[3] for extent in extents(argument)) >= SMALLEST
    if isinstance(argument, np.ndarray):
        return argument.nbytes >= SMALLEST
    return sum(extent[3] for extent in extents(argument)) >= SMALLEST


def _open(primitive: _Primitive, code: CodeType, offset: int, argument: Any) -> None:
    mark, state = recorder.mark, thread_state()
    assert mark is not None
    span, parent, previous = recorder.next_span(), parent_span.get(), state.current
    if primitive.name not in _UNSIZED:
        recorder.see(span, primitive.role, argument)
    function, file, line = nearest(sys._getframe(2))
    attributes = recorder.attributes({"caller": function, "file": file, "line": line})
    parent_span.set(span)
    state.current = span
    started = time.perf_counter_ns()
    if state.pending and state.pending[-1].mark is not mark:
        state.pending.clear()  # an earlier session ended inside of them
    pending = _Pending(code, offset, mark, span, parent, previous, primitive.site, attributes, started, mark(span))
    state.pending.append(pending)


def _ended(code: CodeType, offset: int, error: int) -> None:
    pending = thread_state().pending
    if pending and pending[-1].code is code and pending[-1].offset == offset and not _own(code):
        _close(pending.pop(), error)


def _close(pending: _Pending, error: int) -> None:
    state = thread_state()
    state.current = pending.previous
    parent_span.set(pending.parent)
    if recorder.mark is pending.mark:
        leave, ended = pending.mark(pending.previous), time.perf_counter_ns()
        row = (pending.span, pending.parent, pending.site, pending.attributes, state.ident, pending.enter, leave)
        recorder.close(pack_span(*row, pending.started, ended, 0, error))
