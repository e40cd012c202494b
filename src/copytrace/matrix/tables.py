"""Figures -> Markdown, in the form of the memray-array tables, each row with its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from copytrace.matrix.results import key_of, setting_of
from copytrace.reports.markdown import code
from copytrace.reports.wording import short

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from copytrace.matrix.configurations import Configuration
    from copytrace.matrix.results import Copied, Figures, Held

STAGES = ("write", "read")
LEGEND = (
    "Extra memory at peak over the array's bytes, rounded (exact; published where there is such a figure). "
    "**Bold** is the best that can be achieved. *Copies* are bytes copied over the array's bytes, inferred where there "
    "was no native hook."
)


def render(rows: Sequence[Configuration], found: Mapping[str, Figures], table: str, *, level: int = 1) -> str:
    """The tables of writes and of reads, and for each row the copies and the buffers held; ``level`` of the heading."""
    mark = "#" * level
    lines = [f"{mark} Copies of an array by stack: {table}", ""]
    for stage in STAGES:
        lines += [f"{mark}# {stage.capitalize()}s", "", *_table(rows, found, stage), ""]
    lines += [LEGEND, "", f"{mark}# Who makes them", ""]
    for row in rows:
        lines += [f"{mark}## {row.name}", "", *_details(row, found), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Configuration], found: Mapping[str, Figures], stage: str) -> Iterator[str]:
    yield "| Filesystem | Store | Libraries | Zarr format | Uncompressed | Copies | Compressed | Copies |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        if not (row.writes if stage == "write" else row.reads):
            continue
        published = row.published_write if stage == "write" else row.published_read
        cells = []
        libraries = ""
        for compressed in (False, True):
            one = found.get(key_of(row.name, stage, compressed))
            cells += _cells(one, published[compressed] if published else None)
            if one is not None and not one.error:
                libraries = libraries or libraries_of(row, one)
        yield f"| {row.filesystem} | {row.store} | {libraries} | {row.format} | {' | '.join(cells)} |"


def _cells(one: Figures | None, published: int | None) -> list[str]:
    if one is None:
        return ["-", "-"]
    if one.error:
        return ["failed", "failed"]
    rounded = round(one.extra_at_peak)
    shown = f"**{rounded}**" if rounded <= one.best else str(rounded)
    told = "" if published is None else f"; published {published}"
    copies = f"{one.copies:.2f}{'' if one.recorded else ' (inferred)'}"
    return [f"{shown} ({one.extra_at_peak:.3f}{told})", f"**{copies}**" if one.copies <= one.best else copies]


def libraries_of(row: Configuration, one: Figures) -> str:
    """``zarr 3.3.0, numcodecs 0.17.1``: what the row names and what its S3 client stands on."""
    named = [requirement.split("=", 1)[0].split("[", 1)[0] for requirement in row.requirements]
    shown = dict.fromkeys([*named, *(name for name in ("aiohttp",) if "s3fs" in named)])
    return ", ".join(f"{name} {one.versions[name]}" for name in shown if name in one.versions)


def _details(row: Configuration, found: Mapping[str, Figures]) -> Iterator[str]:
    for stage in STAGES:
        for compressed in (False, True):
            one = found.get(key_of(row.name, stage, compressed))
            if one is None:
                continue
            kind = f"{stage}, {setting_of(compressed)}"
            if one.error:
                yield f"- {kind}: failed: {one.error}"
                continue
            copied = [told(copy, one.payload_bytes) for copy in one.copied]
            held = [_holding(holder, one.payload_bytes) for holder in one.held]
            yield f"- {kind}: {'; '.join(copied) or 'no copies'}. Held at peak: {'; '.join(held) or 'nothing'}."


def told(copy: Copied, payload: int) -> str:
    """``1.00 copy by zarr.storage `Buffer.to_bytes`, called from `FsspecStore.set```."""
    caller = next((name for name in copy.called_from if name != copy.function), "")
    beneath = f", called from {_named(caller)}" if caller else ""
    return f"{copy.bytes / payload:.2f} {copy.kind} by {copy.layer or '?'} {_named(copy.function)}{beneath}"


def _holding(held: Held, payload: int) -> str:
    kind = " (temporary)" if held.role == "temporary" else ""
    return f"{held.bytes / payload:.2f} by {held.layer or '?'} {_named(held.function)}{kind}"


def _named(function: str) -> str:
    return code(short(function)) or "?"
