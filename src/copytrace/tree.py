"""The spans of a stretch as a tree: in columns what is asked of all of them, as objects those that are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from copytrace.model import SiteInfo, Trace

METADATA_KEYS = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_CALLERS = {"caller", "called_from"}


def is_metadata(attributes: Mapping[str, Any]) -> bool:
    """Whether a request is for a document that describes arrays, by its key."""
    return str(attributes.get("key", "")).rsplit("/", 1)[-1] in METADATA_KEYS


def is_by_hand(site: SiteInfo) -> bool:
    """Whether a site is ``copytrace.operation``."""
    return site.name == "copytrace.operation"


@dataclass(slots=True)
class SpanView:
    """One span with its place in the tree.

    ``operation`` is the id of the operation's span, 0 for none. Spans of one ``chain`` were reached through the same
    sites and callers.
    """

    id: int
    parent: int
    site: SiteInfo
    attributes: Mapping[str, Any]
    thread: int
    enter: int
    exit: int
    started: int
    ended: int
    payload: int
    error: bool
    is_metadata: bool
    operation: int
    chain: int

    @property
    def by_hand(self) -> bool:
        """Whether it is a ``copytrace.operation``."""
        return is_by_hand(self.site)


class Spans:
    """The spans of a trace by their ids. Columns have shape (n,), a row for each in the order of the ids; ``above`` is
    the row of the parent, -1 for none.
    """

    def __init__(self, trace: Trace) -> None:
        self.table = trace.spans
        self.sites = trace.sites
        self.attributes = trace.attributes
        self.ids = trace.spans["id"].astype(np.int64)
        self.above = self.rows_of(trace.spans["parent"])
        self.operation = np.zeros(len(self.ids), np.int64)
        self.is_metadata = self.described(is_metadata)
        self._levels = list(_levels(self.above))
        self._row = dict(zip(self.ids.tolist(), range(len(self.ids)), strict=True))
        self._made: dict[int, SpanView] = {}

    # --- all of them

    def rows_of(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """The rows of spans, -1 for what is none; shape (n,)."""
        if not len(self.ids):
            return np.full(len(numbers), -1, np.int64)
        numbers = numbers.astype(np.int64)
        rows = np.minimum(np.searchsorted(self.ids, numbers), len(self.ids) - 1)
        return np.where(self.ids[rows] == numbers, rows, -1)

    def operations_of(self, numbers: NDArray[Any]) -> NDArray[np.int64]:
        """The operations of spans, 0 for none; shape (n,)."""
        rows = self.rows_of(numbers)
        return np.where(rows >= 0, np.append(self.operation, 0)[rows], 0)

    def placed(self, chosen: Callable[[SiteInfo], bool]) -> NDArray[np.bool_]:
        """Which spans are of the sites that are chosen; shape (n,)."""
        found: NDArray[np.bool_] = np.array([chosen(site) for site in self.sites], bool)[self.table["site"]]
        return found

    def of_kind(self, kinds: Collection[str]) -> NDArray[np.bool_]:
        """Which spans are of sites of some kinds; shape (n,)."""
        return self.placed(lambda site: site.kind in kinds)

    def described(self, chosen: Callable[[Mapping[str, Any]], bool]) -> NDArray[np.bool_]:
        """Which spans have attributes that are chosen; shape (n,)."""
        about = np.array([chosen(each) for each in self.attributes], bool)
        found: NDArray[np.bool_] = about[self.table["attributes"]]
        return found

    def nearest(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each span ``own`` of itself or else of the nearest above that has one, which is not 0; shape (n,)."""
        result = own.copy()
        for rows in self._levels[1:]:
            result[rows] = np.where(own[rows], own[rows], result[self.above[rows]])
        return result

    def outermost(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each span ``own`` of the outermost above that has one, which is not 0, or else of itself; shape (n,)."""
        result = own.copy()
        for rows in self._levels[1:]:
            above = result[self.above[rows]]
            result[rows] = np.where(above, above, own[rows])
        return result

    def is_below(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which spans are below those that are chosen; shape (n,)."""
        found = self.nearest(chosen.astype(np.int64))
        below: NDArray[np.bool_] = (self.above >= 0) & (found[self.above] > 0)
        return below

    @cached_property
    def chain(self) -> list[int]:
        """A number for each row, the same for those that were reached through the same sites and callers."""
        about = np.array([number if _CALLERS & each.keys() else -1 for number, each in enumerate(self.attributes)])
        about = about[self.table["attributes"]] + 1 if len(self.table) else about
        own = self.table["site"] * np.int64(len(self.attributes) + 1) + about
        room = len(self.sites) * (len(self.attributes) + 1)
        result = np.zeros(len(self.table), np.int64)
        known = 0
        for rows in self._levels:
            above = np.where(self.above[rows] >= 0, result[self.above[rows]], 0)
            distinct, inverse = np.unique(above * room + own[rows], return_inverse=True)
            result[rows] = inverse + known + 1
            known += len(distinct)
        return result.tolist()

    @cached_property
    def sites_of_operations(self) -> list[tuple[int, int, int]]:
        """Operation (0 for none), site, and how many spans of that it has; in the order of the first of them."""
        operations, rank = np.unique(self.operation, return_inverse=True)
        sites = max(len(self.sites), 1)
        pairs, first, counts = np.unique(rank * sites + self.table["site"], return_index=True, return_counts=True)
        order = np.argsort(first)
        told = operations[pairs // sites], pairs % sites, counts
        return list(zip(*(column[order].tolist() for column in told), strict=True))

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, parent in zip(self.ids.tolist(), self.table["parent"].tolist(), strict=True):
            found.setdefault(parent, []).append(number)
        return found

    # --- one by one

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, number: int) -> bool:
        return number in self._row

    def __getitem__(self, number: int) -> SpanView:
        """Raises KeyError when there is no such span."""
        if number not in self._made:
            self._make([self._row[number]])
        return self._made[number]

    def get(self, number: int) -> SpanView | None:
        """A span, None when there is no such."""
        view = self._made.get(number)
        return view if view is not None else self[number] if number in self._row else None

    def at(self, rows: NDArray[np.int64]) -> Iterator[SpanView]:
        """The spans of ``rows``."""
        numbers = self.ids[rows].tolist()
        self._make(row for row, number in zip(rows.tolist(), numbers, strict=True) if number not in self._made)
        return map(self._made.__getitem__, numbers)

    def chain_of(self, number: int) -> int:
        """The number of a span's chain, -1 when there is no such span."""
        row = self._row.get(number)
        return self.chain[row] if row is not None else -1

    def children(self, number: int) -> list[int]:
        """The spans whose parent a span is."""
        return self._children.get(number, [])

    def beneath(self, number: int) -> Iterator[int]:
        """A span and all that are below it."""
        waiting = [number]
        while waiting:
            yield (number := waiting.pop())
            waiting += self.children(number)

    def _make(self, rows: Iterable[int]) -> None:
        chosen = np.fromiter(rows, np.int64)
        about = self.is_metadata[chosen].tolist(), self.operation[chosen].tolist()
        for row, of_metadata, operation, at in zip(self.table[chosen].tolist(), *about, chosen.tolist(), strict=True):
            number, parent, site, attributes, thread, enter, leave, started, ended, payload, error = row
            self._made[number] = SpanView(
                number,
                parent,
                self.sites[site],
                self.attributes[attributes],
                thread,
                enter,
                leave,
                started,
                ended,
                payload,
                bool(error),
                of_metadata,
                operation,
                self.chain[at],
            )


def _levels(above: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The rows that have none above, those right below them, and so on."""
    depth = np.zeros(len(above), np.int64)
    higher = above
    while (inner := higher >= 0).any():
        depth += inner
        higher = np.where(inner, above[higher], -1)
    order = np.argsort(depth, kind="stable")
    yield from np.split(order, np.cumsum(np.bincount(depth))[:-1]) if len(above) else ()
