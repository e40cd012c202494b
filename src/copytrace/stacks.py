"""The stacks of a memray capture, resolved: Python frames, and native ones where they name a library."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from copytrace.frames import native_frame, python_frame
from copytrace.layers import IMPORT_MACHINERY
from copytrace.model import Frame
from copytrace.places import OWN_FILE, relative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_MAX_FRAMES = 60
_MUCH = 64 << 10
_MUCH_FOR_AN_IMPORT = 1 << 20
_MOST = 6000
_MOST_NATIVE = 1500
"""Stacks that are resolved, and those of them with native frames."""

UNRESOLVED = (Frame("(not resolved)", "", 0),)
"""The stack of what is too little to be payload."""

OWN_STACK = (Frame("copytrace", "copytrace", 0, layer="copytrace"),)
"""The stack of what copytrace itself allocated."""


type Entry = tuple[str, str, int]
"""Function, file and line of a frame, as memray gives them."""

type Gathered = tuple[Sequence[Entry], Sequence[Entry]]
"""A stack, innermost first: its Python frames, and these mixed with the native ones."""


def gather(
    records: Sequence[Any],
    native: NDArray[np.bool_],
    stack: NDArray[np.uint32],
    size: NDArray[np.uint64],
    span: NDArray[np.uint64],
) -> list[Gathered | None]:
    """The stacks of allocations whose ``stack`` counts ``records`` from 1: of what may be payload, as it was allocated
    inside a span or much of it; None for the others. ``native``: whether the capture of each record has native
    frames.

    Resolving native frames takes up to a millisecond a stack and a fifth of a second for the first of a library, and
    importing one inside a span makes tens of thousands of stacks: only those that most was allocated on are resolved,
    the very largest with native frames, and what an import allocates without them unless it is much.
    """
    count = 1 + len(records)
    total = np.bincount(stack, size, count)
    wanted = (np.bincount(stack, span > 0, count) > 0) | (total >= _MUCH)
    largest = np.argsort(np.where(wanted, total, -1.0), kind="stable")[::-1]
    wanted[largest[_MOST:]] = False
    with_native = np.zeros(count, bool)
    with_native[largest[:_MOST_NATIVE]] = True
    with_native[1:] &= native
    return [
        _gathered(record, bool(with_native[number]), total[number]) if wanted[number] else None
        for number, record in enumerate(records, 1)
    ]


def _gathered(record: Any, native: bool, total: float) -> Gathered:
    python = record.stack_trace(_MAX_FRAMES)
    if total < _MUCH_FOR_AN_IMPORT and any(entry[1].startswith(IMPORT_MACHINERY) for entry in python):
        native = False
    if native:
        with suppress(AssertionError):  # memray 1.20 raises it now and then for hybrid stacks
            return python, record.hybrid_stack_trace(_MAX_FRAMES)
    return python, python


def named(gathered: Gathered | None) -> tuple[Frame, ...]:
    """A stack as frames: Python ones, and native ones down to where they only run the interpreter. Callbacks of
    ``sys.monitoring`` have no Python frame in memray's stacks.
    """
    if gathered is None:
        return UNRESOLVED
    python, mixed = ([tuple(entry) for entry in entries] for entries in gathered)
    if python and python[0][1] != OWN_FILE and relative(python[0][1])[1] == "own":
        return OWN_STACK
    known = set(python)
    frames: list[Frame] = []
    innermost = True
    for entry in mixed:
        if entry in known:
            innermost = False
            if relative(entry[1])[1] != "own":
                frames.append(python_frame(*entry))
        else:
            frame = native_frame(*entry)
            if innermost and "call_instrumentation" in frame.function:
                return OWN_STACK
            if innermost or frame.layer:
                frames.append(frame)
    return tuple(frames)
