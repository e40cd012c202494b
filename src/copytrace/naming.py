"""Who is answerable for a copy: the layer, the function, and the chain of callers beneath it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from copytrace.layers import CARRIERS, permalink, project_of
from copytrace.model import Frame, SiteRef
from copytrace.native import crate_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_RUNTIME_CRATES = frozenset(
    {
        *("std", "core", "alloc", "hashbrown", "bytes", "rayon", "rayon_core", "tokio"),
        *("futures", "futures_util", "futures_core", "futures_channel", "pyo3", "pyo3_ffi", "pyo3_async_runtimes"),
    }
)
"""Crates that carry out orders, as the standard library does in Python."""

_MOST_CALLERS = 6


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
            if site is None and (not primitive or not frame.native):
                primitive = frame.function
            continue
        named = site or frame
        rest = stack[depth:] if site else stack[depth + 1 :]
        return Name(layer, named, primitive, callers(rest))
    if site is not None:
        return Name(site.layer, site, primitive, ())
    return None


def imports(frame: Frame) -> bool:
    """Whether a frame is at work on an import, or is copytrace's own: what it moves is never payload."""
    return frame.file.startswith("<frozen importlib") or frame.layer == "copytrace"


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


def project(layer: str) -> str:
    """The distribution of a layer, empty for an unnamed one."""
    return project_of(layer)
