"""Who called: the frames above a probe that belong to somebody, without those of copytrace and the standard library."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from copytrace.places import relative

if TYPE_CHECKING:
    from types import FrameType

type Caller = tuple[str, str, int]
"""Module and qualified name of a function, its file (relative to site-packages or the working directory), line."""

_MOST = 8
_SKIPPED = {"own", "standard"}


def callers(most: int = _MOST) -> tuple[Caller, ...]:
    """The innermost ``most`` frames above the caller that are of user code or an installed library, innermost first."""
    found: list[Caller] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < most:
        caller = _caller(frame)
        if caller is not None:
            found.append(caller)
        frame = frame.f_back
    return tuple(found)


def nearest(frame: FrameType | None) -> Caller:
    """The innermost frame from ``frame`` up that is not numpy's, copytrace's or the standard library's."""
    while frame is not None:
        caller = _caller(frame)
        if caller is not None and not caller[0].startswith("numpy."):
            return caller
        frame = frame.f_back
    return "", "", 0


def _caller(frame: FrameType) -> Caller | None:
    code = frame.f_code
    file, kind = relative(code.co_filename)
    if kind in _SKIPPED:
        return None
    return f"{frame.f_globals.get('__name__', '')}.{code.co_qualname}", file, frame.f_lineno
