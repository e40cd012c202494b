"""CPython and numpy: threads that carry on a span's work, and the primitives that copy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from copytrace.model import SiteInfo
from copytrace.probes._calls import named
from copytrace.probes._patch import Patch, PatchError
from copytrace.probes._site import Probe, Switch
from copytrace.probes.primitives import Primitives
from copytrace.recorder import parent_span, recorder, thread_state

if TYPE_CHECKING:
    from collections.abc import Callable

_SUBMIT = "concurrent.futures.ThreadPoolExecutor.submit"
_NOTHING: tuple[Any, ...] = ()


class Carrier(Switch):
    """What is submitted to a thread pool belongs to the span that submitted it, and nothing else of its context goes
    along.
    """

    info = SiteInfo(_SUBMIT, "python", "context")

    def __init__(self) -> None:
        self._patch: Patch | None = None

    def attach(self) -> str:
        patch = Patch.of_callable(ThreadPoolExecutor, "submit", _carrying)
        try:
            patch.install()
        except PatchError as error:
            return str(error)
        self._patch = patch
        return ""

    def detach(self) -> None:
        if self._patch is not None:
            self._patch.remove()
            self._patch = None


def _carrying(original: Callable[..., Any]) -> Any:
    def submit(*args: Any, **kwargs: Any) -> Any:
        span = parent_span.get()
        if recorder.mark is None or not span or len(args) < 2:
            return original(*args, **kwargs)
        pool, function, *rest = args
        return original(pool, _carried, span, function, *rest, **kwargs)

    return named(submit, _SUBMIT)


def _run_in_span(span: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    mark, state = recorder.mark, thread_state()
    if mark is None:
        return function(*args, **kwargs)
    parent, previous = parent_span.get(), state.current
    parent_span.set(span)
    state.current = span
    mark(span)
    try:
        return function(*(args, args := _NOTHING)[0], **kwargs)
    finally:
        parent_span.set(parent)
        state.current = previous
        if recorder.mark is mark:
            mark(previous)


_carried = named(_run_in_span, _SUBMIT)

PROBE = Probe(name="python", library="python", module="sys", switches=(Carrier(), Primitives()))
