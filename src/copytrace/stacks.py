"""The stacks of allocations as frames: Python ones, and native ones where they name a library."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from copytrace.frames import native_frame, python_frame
from copytrace.layers import IMPORT_MACHINERY
from copytrace.model import Frame
from copytrace.places import OWN_FILE, PACKAGE, relative

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from copytrace.captures import Capture, Entry, Stack

_CALLBACKS = f"{PACKAGE}probes{os.sep}primitives.py"
_MUCH = 64 << 10
_MUCH_FOR_AN_IMPORT = 1 << 20
_MOST = 6000
_MOST_NATIVE = 1500
"""Stacks that are resolved, and those of them with native frames."""

UNRESOLVED = (Frame("(not resolved)", "", 0),)
"""The stack of what is too little to be payload."""

OWN_STACK = (Frame("copytrace", "copytrace", 0, layer="copytrace"),)
"""The stack of what copytrace itself allocated."""


class Stacks:
    """The stacks of the captures of a session, which are numbered one after the other."""

    def __init__(self) -> None:
        self._captures: list[tuple[int, Capture, bool]] = []
        self._resolved: dict[tuple[int, bool], tuple[Frame, ...]] = {}

    def begin(self, first: int, capture: Capture, *, native: bool) -> None:
        """From stack ``first`` + 1 on they are those of ``capture``."""
        self._captures.append((first, capture, native))

    def resolve(
        self, stack: NDArray[np.int64], size: NDArray[np.uint64], span: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint32], tuple[tuple[Frame, ...], ...]]:
        """The distinct stacks of allocations, numbered from 1 after an empty one, and which each has.

        Resolved are those of what may be payload: as it was allocated inside a span, or much of it. Importing a library
        makes tens of thousands of stacks: only those that most was allocated on are resolved, the very largest with
        native frames, and what an import allocates without them unless it is much.
        """
        numbers, inverse = np.unique(stack, return_inverse=True)
        count = len(numbers)
        total = np.bincount(inverse, size, count)
        wanted = (np.bincount(inverse, span > 0, count) > 0) | (total >= _MUCH)
        largest = np.argsort(np.where(wanted, total, -1.0), kind="stable")[::-1]
        wanted[largest[_MOST:]] = False
        with_native = np.zeros(count, bool)
        with_native[largest[:_MOST_NATIVE]] = True
        each = zip(numbers.tolist(), wanted.tolist(), with_native.tolist(), total.tolist(), strict=True)
        frames = tuple(
            self._frames(number, native, much) if told else UNRESOLVED for number, told, native, much in each
        )
        return (inverse + 1).astype(np.uint32), ((), *frames)

    def _frames(self, number: int, native: bool, total: float) -> tuple[Frame, ...]:
        first, capture, has_native = next(entry for entry in reversed(self._captures) if entry[0] < number)
        native = native and has_native
        if native and total < _MUCH_FOR_AN_IMPORT:
            python, _ = capture.stack(number - first, native=False)
            native = not any(entry[1].startswith(IMPORT_MACHINERY) for entry in python)
        if (number, native) not in self._resolved:
            self._resolved[number, native] = named(capture.stack(number - first, native=native))
        return self._resolved[number, native]


def named(stack: Stack) -> tuple[Frame, ...]:
    """A stack as frames: Python ones, and native ones down to where they only run the interpreter. Our extension has no
    Python frame in memray's stacks, nor have callbacks of ``sys.monitoring``, but for those that a thread was in when
    the capture began: they stay there until it calls a function.
    """
    python, mixed = stack
    if left := max((number for number, entry in enumerate(python, 1) if entry[1] == _CALLBACKS), default=0):
        mixed = [entry for entry in mixed if entry not in python[:left]]
        python = python[left:]
    if python and python[0][1] != OWN_FILE and relative(python[0][1])[1] == "own":
        return OWN_STACK
    known = set(python)
    frames: list[Frame] = []
    innermost = True
    for entry in mixed:
        if entry in known:
            innermost = False
            if relative(entry[1])[1] != "own":
                frames.append(python_frame(*entry[:3]))
        else:
            frame = native_frame(*entry)
            if innermost and ("call_instrumentation" in entry[0] or _keeps_rows(entry)):
                return OWN_STACK
            if frame.layer or (innermost and not frame.function.startswith("+")):
                frames.append(frame)
    return tuple(frames)


def _keeps_rows(entry: Entry) -> bool:
    """Whether a native frame is our own extension's at work on its rows, not on a call of what it stands in for."""
    return entry[0].startswith("append_to") and relative(entry[3])[1] == "own"
