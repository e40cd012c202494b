"""Where the buffers and moves of a path lie in its picture: a graph that is read from top to bottom.

Buffers are bars in rows, moves are ribbons between them, both as wide as their bytes. Units are CSS pixels.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from copytrace.model import IO_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from copytrace.model import Buffer, Path, Step

WIDTH = 250
"""Of the picture, beside which the labels stand."""
BAR = 12
ROW = 40
"""Height of a row of bars with its label."""
MOVE = 54
"""Height that the label of a move takes between two rows."""
GAP = 18
"""Between two bars of a row."""
THINNEST = 2.0
MOST_PIECES = 16
"""A bar is cut into at most so many pieces."""


@dataclass(eq=False, slots=True)
class Node:
    """A bar: a buffer, the kernel's end of a fetch or flush (``buffer`` None), or what could not be found.

    ``stage`` counts the times that the bytes of one buffer moved on to the same buffer. ``lane`` nodes only keep the
    place of a ribbon that passes a row.
    """

    role: str
    buffer: Buffer | None = None
    stage: int = 0
    lane: bool = False
    row: int = 0
    weight: int = 0
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    incoming: list[Ribbon] = field(default_factory=list)
    outgoing: list[Ribbon] = field(default_factory=list)

    @property
    def cuts(self) -> list[float]:
        """Where the bar is cut to show that it is pieces."""
        pieces = min(self.buffer.pieces if self.buffer else 1, MOST_PIECES, int(self.width // 4))
        return [round(self.x + self.width * number / pieces, 1) for number in range(1, pieces)]


@dataclass(eq=False, slots=True)
class Ribbon:
    """A move. ``nodes`` are where it begins, the lanes it takes and where it ends; ``y`` is where its label stands."""

    step: Step
    number: int
    nodes: list[Node]
    width: float = 0.0
    y: float = 0.0
    shape: str = ""
    """An SVG path."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A laid out graph. ``payload`` is the width that the payload has in it, 0 when there is none."""

    nodes: tuple[Node, ...]
    ribbons: tuple[Ribbon, ...]
    height: float
    payload: float
    width: int = WIDTH


def draw(path: Path) -> Picture:
    """The picture of ``path``: every step is a ribbon, every buffer that a step touches a bar."""
    nodes, ribbons = _connect(path)
    _rank(nodes, ribbons)
    every = nodes + _lanes(ribbons)
    rows: defaultdict[int, list[Node]] = defaultdict(list)
    for node in every:
        node.weight = max(sum(ribbon.step.bytes for ribbon in side) for side in (node.incoming, node.outgoing))
        rows[node.row].append(node)
    widest = max((sum(node.weight for node in row) for row in rows.values()), default=0)
    gaps = max((GAP * (len(row) - 1) for row in rows.values()), default=0)
    scale = max(WIDTH - gaps, WIDTH / 4) / max(widest, path.payload_bytes, 1)
    height = _place(rows, ribbons, scale)
    _shape(every, ribbons)
    return Picture(
        tuple(node for node in nodes if not node.lane), tuple(ribbons), height, round(path.payload_bytes * scale, 1)
    )


def _connect(path: Path) -> tuple[list[Node], list[Ribbon]]:
    """One bar a buffer, a new stage of it where bytes would flow back; one ribbon a step, in the order of the steps."""
    buffers = {buffer.id: buffer for buffer in path.buffers}
    latest: dict[str, Node] = {}
    nodes: list[Node] = []
    ribbons: list[Ribbon] = []

    def bar(role: str, buffer: Buffer | None = None, stage: int = 0) -> Node:
        nodes.append(Node(role, buffer, stage))
        return nodes[-1]

    def end(name: str | None, role: str) -> Node:
        if name is None or name not in buffers:
            return bar(role)
        if name not in latest:
            latest[name] = bar(buffers[name].role, buffers[name])
        return latest[name]

    kernel: dict[str, Node] = {}
    for number, step in enumerate(path.steps, 1):
        io = step.kind in IO_KINDS
        if step.kind == "fetch" and step.source is None:
            source = kernel.get("fetch") or bar("io")
            kernel["fetch"] = source
        else:
            source = end(step.source, "unknown")
        if step.kind == "flush" and step.destination is None:
            destination = kernel.get("flush") or bar("io")
            kernel["flush"] = destination
        else:
            destination = end(step.destination, "io" if io else "unknown")
        if destination is source or _reaches(destination, source):
            destination = bar(destination.role, destination.buffer, destination.stage + 1)
            if destination.buffer is not None:
                latest[destination.buffer.id] = destination
        ribbon = Ribbon(step, number, [source, destination])
        source.outgoing.append(ribbon)
        destination.incoming.append(ribbon)
        ribbons.append(ribbon)
    return nodes, ribbons


def _reaches(start: Node, goal: Node) -> bool:
    waiting, seen = [start], {id(start)}
    while waiting:
        node = waiting.pop()
        if node is goal:
            return True
        for ribbon in node.outgoing:
            if id(ribbon.nodes[-1]) not in seen:
                seen.add(id(ribbon.nodes[-1]))
                waiting.append(ribbon.nodes[-1])
    return False


def _rank(nodes: Sequence[Node], ribbons: Sequence[Ribbon]) -> None:
    """Rows, so that every ribbon leads downwards; a bar that nothing fills stands right above where it flows to."""
    for _ in nodes:
        moved = False
        for ribbon in ribbons:
            above, below = ribbon.nodes
            if below.row <= above.row:
                below.row, moved = above.row + 1, True
        if not moved:
            break
    for node in nodes:
        if not node.incoming and node.outgoing:
            node.row = min(ribbon.nodes[-1].row for ribbon in node.outgoing) - 1


def _lanes(ribbons: Iterable[Ribbon]) -> list[Node]:
    lanes = []
    for ribbon in ribbons:
        above, below = ribbon.nodes
        passed = [
            Node("lane", lane=True, row=row, incoming=[ribbon], outgoing=[ribbon])
            for row in range(above.row + 1, below.row)
        ]
        ribbon.nodes[1:1] = passed
        lanes += passed
    return lanes


def _place(rows: dict[int, list[Node]], ribbons: Sequence[Ribbon], scale: float) -> float:
    """Give every bar its place, from top to bottom; returns the height."""
    labels: defaultdict[int, list[Ribbon]] = defaultdict(list)
    for ribbon in ribbons:
        ribbon.width = max(ribbon.step.bytes * scale, THINNEST)
        labels[ribbon.nodes[0].row].append(ribbon)
    y = 0.0
    for number in sorted(rows):
        row = sorted(rows[number], key=_wanted)
        x = 0.0
        for node in row:
            node.width = max(node.weight * scale, THINNEST)
            node.x, node.y = round(x, 1), y
            x += node.width + GAP
        y += ROW
        for ribbon in labels[number]:
            ribbon.y = y
            y += MOVE
    return y


def _wanted(node: Node) -> float:
    """Where a bar would best be: under the middle of what fills it."""
    above = [ribbon.nodes[ribbon.nodes.index(node) - 1] if node in ribbon.nodes else node for ribbon in node.incoming]
    return sum(one.x + one.width / 2 for one in above) / len(above) if above else 0.0


def _shape(nodes: Sequence[Node], ribbons: Sequence[Ribbon]) -> None:
    leaving: dict[int, float] = {id(node): node.x for node in nodes}
    arriving = dict(leaving)
    parts: defaultdict[int, list[str]] = defaultdict(list)
    ordered = sorted(ribbons, key=lambda ribbon: ribbon.nodes[1].x)
    starts = {}
    for ribbon in ordered:
        above = ribbon.nodes[0]
        starts[id(ribbon)] = leaving[id(above)]
        leaving[id(above)] += ribbon.width
    for ribbon in sorted(ribbons, key=lambda ribbon: ribbon.nodes[-2].x):
        below = ribbon.nodes[-1]
        last = arriving[id(below)]
        arriving[id(below)] += ribbon.width
        x = starts[id(ribbon)]
        for above, under in zip(ribbon.nodes, ribbon.nodes[1:], strict=False):
            target = last if under is below else under.x
            parts[id(ribbon)].append(_band(x, above.y + BAR, target, under.y, ribbon.width))
            if under.lane:
                parts[id(ribbon)].append(_band(target, under.y, target, under.y + BAR, ribbon.width))
            x = target
    for ribbon in ribbons:
        ribbon.shape = " ".join(parts[id(ribbon)])


def _band(x: float, top: float, target: float, bottom: float, width: float) -> str:
    middle = (top + bottom) / 2
    return (
        f"M{x:.1f} {top:.1f}C{x:.1f} {middle:.1f} {target:.1f} {middle:.1f} {target:.1f} {bottom:.1f}"
        f"h{width:.1f}C{target + width:.1f} {middle:.1f} {x + width:.1f} {middle:.1f} {x + width:.1f} {top:.1f}z"
    )
