"""The report as one HTML file that needs nothing else: pictures are SVG, all names are escaped, no request is made."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from copytrace.model import COPY_KINDS
from copytrace.reports import flowgraph, processes, timeline, wording

if TYPE_CHECKING:
    from jinja2 import Environment

    from copytrace.model import Path, ReportData, Step
    from copytrace.reports.flowgraph import Node

COLORS = 10
"""Layers that have a colour of their own; the rest share the last one."""
MOST_COPIES = 4
"""What fills a bar of a table; more is cut off."""
OPEN = 3
"""In a report of more paths, only the worst one is unfolded."""


def render(report: ReportData) -> str:
    """The report as an HTML document."""
    return _render("report.html", report)


def render_fragment(report: ReportData) -> str:
    """The report as a part of an HTML document, for a notebook: without script, and with styles of its own only."""
    return _render("notebook.html", report)


def _render(template: str, report: ReportData) -> str:
    script, style = _resource("report.js"), _resource("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    ranked = sorted(enumerate(report.paths, 1), key=lambda item: _guilt(item[1]), reverse=True)
    return (
        _environment()
        .get_template(template)
        .render(
            report=report,
            colors=_colors(report),
            script=script,
            digest=digest,
            style=style,
            ranked=ranked,
            opened=[number for number, _ in (ranked if len(ranked) <= OPEN else ranked[:1])],
            sites=wording.by_guilt(report),
        )
    )


def _guilt(path: Path) -> tuple[float, int]:
    return ((path.avoidable or 0) * path.payload_bytes, path.copied_bytes)


def _colors(report: ReportData) -> dict[str, int]:
    """Layer -> number of its colour, the layers that move most first."""
    moved: Counter[str] = Counter()
    for path in report.paths:
        for step in path.steps:
            moved[step.layer] += step.bytes
        for layer in path.timeline.layers if path.timeline else ():
            moved[layer] += 0
    return {layer: min(number, COLORS - 1) for number, (layer, _) in enumerate(moved.most_common())}


@cache
def _resource(name: str) -> str:
    return (files("copytrace.reports") / "templates" / name).read_text("utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: wording.plain(value) if type(value) is str else value,
    )
    environment.filters["arrows"] = lambda text: text.replace("->", "\u2192").replace("<-", "\u2190")
    environment.globals.update(
        wording=wording,
        processes=processes,
        draw=flowgraph.draw,
        chart=timeline.chart,
        bar_height=flowgraph.BAR,
        copy_kinds=COPY_KINDS,
        link=link,
        share=lambda ratio: round(min(max(ratio, 0), MOST_COPIES) / MOST_COPIES * 100, 1),
        stack=stack,
        title=title,
    )
    return environment


def link(url: str) -> str:
    """``url`` when it leads to a web page, else nothing: no other scheme gets into a link."""
    return url if re.fullmatch(r"https?://[^\s\"'<>]+", url) else ""


def stack(path: Path) -> list[dict[str, Any]]:
    """The layers that the payload passes, in the order of its way, with what each copies and what could be avoided."""
    layers: dict[str, list[Step]] = {}
    for step in path.steps:
        layers.setdefault(step.layer, []).append(step)
    return [
        {
            "layer": layer,
            "copied": sum(step.ratio or 0 for step in steps if step.kind in COPY_KINDS),
            "avoidable": sum(step.avoidable_bytes for step in steps),
            "io": next((step.kind for step in steps if step.kind not in COPY_KINDS), ""),
        }
        for layer, steps in layers.items()
    ]


def title(node: Node, path: Path) -> str:
    """What a bar of the flow graph is called."""
    buffer = node.buffer
    if buffer is None:
        store = path.store or "file or socket"
        return store if node.role == "io" else "memory that was not identified"
    if node.role == "io":
        return path.store or buffer.label or "file or socket"
    if node.role == "source":
        return "the caller's array" if path.direction == "write" else "source"
    if node.role == "result":
        return "result"
    name = wording.short(buffer.site.function or buffer.label)
    return f"{name}, again" if node.stage else name
