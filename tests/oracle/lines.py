"""Where a line of a test's own source is, and what a report says in a form that compares."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from copytrace.model import COPY_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from copytrace.model import Path, ReportData, Step


class Told(NamedTuple):
    """One copy of a report: what, how much, how often, by whom and where."""

    kind: str
    bytes: int
    count: int
    layer: str
    function: str
    line: int


def line_of(function: Callable[..., Any], marker: str = "# here") -> int:
    """The line of ``function``'s source that holds ``marker``; it must be the only one."""
    lines, first = inspect.getsourcelines(function)
    found = [number for number, text in enumerate(lines, first) if marker in text]
    assert len(found) == 1, f"{marker!r} is in {len(found)} lines of {function.__qualname__}"
    return found[0]


def told(step: Step) -> Told:
    """A step in brief; the function without its module."""
    name = step.site.function.replace("<locals>.", "").rsplit(".", 1)[-1]
    return Told(step.kind, step.bytes, step.count, step.layer, name, step.site.line)


def copies(steps: Iterable[Step], layer: str | None = None) -> list[Told]:
    """The copies among ``steps``, of one layer when it is given."""
    return [told(step) for step in steps if step.kind in COPY_KINDS and layer in (None, step.layer)]


def only_path(report: ReportData, direction: str = "") -> Path:
    """The one path of a report that goes in ``direction``."""
    found = [path for path in report.paths if path.direction == direction]
    assert len(found) == 1, [path.label for path in report.paths]
    return found[0]
