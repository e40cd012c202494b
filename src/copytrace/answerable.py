"""Moves that nobody on the stack answers for, as those of an event loop and of TLS: they are made for a neighbour."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from copytrace.model import Step


def answered_for(steps: Sequence[Step]) -> list[Step]:
    """The same steps, where those without a layer have that of who took their bytes next or, failing that, gave them.

    The function stays the one that moved the bytes.
    """
    found = list(steps)
    changed = True
    while changed:
        changed = False
        for number, step in enumerate(found):
            if step.layer:
                continue
            neighbour = _next(step, found) or _before(step, found)
            if neighbour is not None:
                found[number] = replace(step, layer=neighbour.layer, project=neighbour.project)
                changed = True
    return found


def _next(step: Step, steps: Sequence[Step]) -> Step | None:
    return next((other for other in steps if other.layer and other.source and other.source == step.destination), None)


def _before(step: Step, steps: Sequence[Step]) -> Step | None:
    return next(
        (other for other in steps if other.layer and other.destination and other.destination == step.source), None
    )
