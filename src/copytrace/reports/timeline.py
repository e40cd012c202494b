"""Where the areas and lines of a path's timeline of live bytes lie in its picture. Units are CSS pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from copytrace.reports import wording

if TYPE_CHECKING:
    from collections.abc import Sequence

    from copytrace.model import Timeline

WIDTH = 720
HEIGHT = 160
LEAST = 0.005
"""Layers that never hold so much of the height are not drawn."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Stacked areas, one a layer from the bottom up, the height of the payload, and the ticks of both axes."""

    areas: tuple[tuple[str, str], ...]
    """(layer, SVG path)."""
    payload: float
    ticks: tuple[tuple[float, str], ...]
    """(y, size)."""
    moments: tuple[tuple[float, str], ...]
    """(x, time)."""
    width: int = WIDTH
    height: int = HEIGHT


def chart(timeline: Timeline) -> Chart | None:
    """The picture of a timeline; None when it has no moments, nothing was ever alive, or its rows are uneven."""
    times = timeline.milliseconds
    if len(timeline.live) != len(timeline.layers) or any(len(row) != len(times) for row in timeline.live):
        return None
    totals = [sum(column) for column in zip(*timeline.live, strict=True)]
    if len(times) < 2 or not any(totals):
        return None
    highest = float(max(*totals, timeline.payload_bytes))
    duration = max(times[-1] - times[0], 1e-9)
    xs = [round((moment - times[0]) / duration * WIDTH, 1) for moment in times]

    def height(nbytes: float) -> float:
        return round(HEIGHT - nbytes / highest * (HEIGHT - 8), 1)

    areas, below = [], [0] * len(times)
    for layer, row in zip(timeline.layers, timeline.live, strict=True):
        above = [low + nbytes for low, nbytes in zip(below, row, strict=True)]
        if max(row) >= LEAST * highest:
            areas.append((layer, _area(xs, [height(n) for n in above], [height(n) for n in below])))
        below = above
    marks = (highest, highest / 2, 0)
    return Chart(
        tuple(areas),
        height(timeline.payload_bytes),
        tuple((height(nbytes), wording.size(nbytes)) for nbytes in marks),
        tuple((round(WIDTH * part, 1), f"{duration * part:,.1f} ms") for part in (0.0, 0.5, 1.0)),
    )


def _area(xs: Sequence[float], above: Sequence[float], below: Sequence[float]) -> str:
    """The area between two lines that go in steps."""
    forth = f"M{xs[0]} {above[0]}" + "".join(f"H{x}V{y}" for x, y in zip(xs[1:], above[1:], strict=True))
    back = f"L{xs[-1]} {below[-1]}" + "".join(f"V{below[index]}H{xs[index]}" for index in range(len(xs) - 2, -1, -1))
    return f"{forth}{back}z"
