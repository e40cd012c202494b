"""Traces written by hand, event by event, for tests of look-ups and attribution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from copytrace.model import (
    MARK_DTYPE,
    SEEN_DTYPE,
    SPAN_DTYPE,
    TRANSFER_DTYPE,
    TRANSFER_KINDS,
    Allocations,
    Frame,
    SiteInfo,
    Trace,
    Transfers,
)

MAIN = 77


@dataclass
class Story:
    """What happened, in order. Each call is one event; ``trace()`` is what the recorders would have written."""

    recorded: bool = True
    sequence: int = 0
    position: int = 0
    sites: list[SiteInfo] = field(default_factory=list)
    attributes: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    spans: list[list[Any]] = field(default_factory=list)
    seen: list[tuple[int, ...]] = field(default_factory=list)
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    moves: list[tuple[int, ...]] = field(default_factory=list)
    callers: list[Frame] = field(default_factory=list)
    stacks: list[tuple[Frame, ...]] = field(default_factory=lambda: [()])
    blocks: list[dict[str, Any]] = field(default_factory=list)
    open: dict[int, list[int]] = field(default_factory=lambda: {MAIN: []})

    def _next(self) -> int:
        self.sequence += 1
        return self.sequence

    def _mark(self, thread: int) -> int:
        stack = self.open.setdefault(thread, [])
        number = self._next()
        self.position += 2
        self.marks.append((number, thread, stack[-1] if stack else 0))
        return number

    def enter(
        self, site: SiteInfo, *, thread: int = MAIN, payload: int = 0, parent: int | None = None, **about: Any
    ) -> int:
        stack = self.open.setdefault(thread, [])
        number = len(self.spans) + 1
        above = parent if parent is not None else stack[-1] if stack else 0
        if site not in self.sites:
            self.sites.append(site)
        if about not in self.attributes:
            self.attributes.append(about)
        stack.append(number)
        entered = self._mark(thread)
        place = [number, above, self.sites.index(site), self.attributes.index(about), thread]
        self.spans.append([*place, entered, 0, entered * 1000, 0, payload, 0])
        return number

    def leave(self, span: int, *, thread: int = MAIN, error: bool = False) -> None:
        self.open[thread].remove(span)
        left = self._mark(thread)
        self.spans[span - 1][6] = left
        self.spans[span - 1][8] = left * 1000
        self.spans[span - 1][10] = int(error)

    def see(self, span: int, role: int, address: int, nbytes: int, *, extent: int | None = None) -> None:
        whole = nbytes if extent is None else extent
        self.seen.append((span, role, int(whole == nbytes), address, whole, nbytes))

    def allocate(
        self, address: int, size: int, *stack: Frame, thread: int = MAIN, previous: int = -1, moved: bool = False
    ) -> int:
        frames = tuple(stack)
        if frames not in self.stacks:
            self.stacks.append(frames)
        opened = self.open.get(thread, [])
        row = len(self.blocks)
        self.blocks.append(
            {
                "address": address,
                "size": size,
                "born": self.position,
                "died": None,
                "enter": self.marks[-1][0] if self.marks else 0,
                "leave": None,
                "span": opened[-1] if opened else 0,
                "thread": thread,
                "stack": self.stacks.index(frames),
                "previous": previous,
                "moved": moved,
            }
        )
        self.position += 1
        return row

    def free(self, row: int) -> None:
        self.blocks[row]["died"] = self.position
        self.blocks[row]["leave"] = self.marks[-1][0] if self.marks else 0
        self.position += 1

    def move(self, kind: str, source: int, destination: int, nbytes: int, caller: Frame, *, thread: int = MAIN) -> None:
        if caller not in self.callers:
            self.callers.append(caller)
        what = (TRANSFER_KINDS.index(kind), source, destination, nbytes, self.callers.index(caller), 1)
        self.moves.append((self._next(), thread, *what))

    def trace(self) -> Trace:
        last = self.marks[-1][0] if self.marks else 0
        for block in self.blocks:
            if block["died"] is None:
                block["died"], block["leave"] = self.position, last

        def column(name: str, kind: str) -> Any:
            return np.array([block[name] for block in self.blocks], kind)

        return Trace(
            spans=np.array([tuple(span) for span in self.spans], SPAN_DTYPE),
            seen=np.array(self.seen, SEEN_DTYPE),
            marks=np.array(self.marks, MARK_DTYPE),
            sites=tuple(self.sites),
            attributes=tuple(self.attributes),
            allocations=Allocations(
                *(column(name, "u8") for name in ("address", "size", "born", "died", "enter", "leave", "span")),
                *(column(name, "u4") for name in ("thread", "stack")),
                column("previous", "i8"),
                column("moved", "?"),
                stacks=tuple(self.stacks),
                records=self.position,
            ),
            transfers=Transfers(np.array(self.moves, TRANSFER_DTYPE), tuple(self.callers), recorded=self.recorded),
            environment={"python": "3.12", "platform": "test", "packages": {}},
        )
