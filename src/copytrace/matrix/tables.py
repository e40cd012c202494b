"""Figures -> Markdown, in the form of the memray-array tables, each row with its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from copytrace.matrix.results import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from copytrace.matrix.configurations import Configuration
    from copytrace.matrix.results import Figures

_SMALLEST = 0.01
"""Share of the payload from which a copy or a buffer is listed."""


def render(rows: Sequence[Configuration], found: Mapping[str, Figures], table: str) -> str:
    """The tables of writes and of reads, and for each row the copies and the buffers held."""
    lines = [f"# Copies of an array by stack: {table}", ""]
    for stage in ("write", "read"):
        lines += [f"## {stage.capitalize()}s", ""]
        lines += _table(rows, found, stage)
        lines.append("")
    lines += [
        "Extra memory at peak over the array's bytes, rounded (exact; published where there is such a figure). "
        "**Bold** is the best that can be achieved. *Copies* are bytes copied over the array's bytes.",
        "",
        "## Who makes them",
        "",
    ]
    for row in rows:
        lines += _details(row, found)
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Configuration], found: Mapping[str, Figures], stage: str) -> Iterator[str]:
    yield "| Filesystem | Store | Libraries | Uncompressed | Copies | Compressed | Copies |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        published = row.published_write if stage == "write" else row.published_read
        cells = []
        libraries = ""
        for compressed in (False, True):
            one = found.get(key_of(row.name, stage, compressed))
            cells += _cells(one, published[compressed] if published else None)
            if one is not None and not one.error:
                libraries = libraries or _libraries(row, one)
        yield f"| {row.filesystem} | {row.store} | {libraries} | {' | '.join(cells)} |"


def _cells(one: Figures | None, published: int | None) -> list[str]:
    if one is None:
        return ["-", "-"]
    if one.error:
        return ["failed", "failed"]
    rounded = round(one.process_at_peak)
    shown = f"**{rounded}**" if rounded <= one.best else str(rounded)
    told = "" if published is None else f"; published {published}"
    copies = f"{one.copies:.2f}"
    return [f"{shown} ({one.process_at_peak:.3f}{told})", f"**{copies}**" if one.copies <= one.best else copies]


def _libraries(row: Configuration, one: Figures) -> str:
    named = [requirement.split("=", 1)[0].split("[", 1)[0] for requirement in row.requirements]
    shown = dict.fromkeys([*named, *(name for name in ("aiohttp",) if "s3fs" in named)])
    return ", ".join(f"{name} {one.versions[name]}" for name in shown if name in one.versions)


def _details(row: Configuration, found: Mapping[str, Figures]) -> Iterator[str]:
    yield f"### {row.name}"
    yield ""
    for stage in ("write", "read"):
        for compressed in (False, True):
            one = found.get(key_of(row.name, stage, compressed))
            if one is None:
                continue
            kind = f"{stage}, {'compressed' if compressed else 'uncompressed'}"
            if one.error:
                yield f"- {kind}: failed: {one.error}"
                continue
            copied = [
                f"{c.ratio:.2f} {c.kind} by {c.layer or '?'} `{c.function}`" for c in one.copied if c.ratio >= _SMALLEST
            ]
            held = [
                f"{h.bytes / one.payload_bytes:.2f} by {h.layer or '?'} `{h.function}`"
                for h in one.held
                if h.bytes >= _SMALLEST * one.payload_bytes
            ]
            yield f"- {kind}: {'; '.join(copied) or 'no copies'}. Held at peak: {'; '.join(held) or 'nothing'}."
    yield ""
