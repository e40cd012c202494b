"""A report narrowed to what one library does, and the program that shows it, for an issue with that library."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from copytrace.errors import CopytraceError
from copytrace.model import COPY_KINDS
from copytrace.reports import wording

if TYPE_CHECKING:
    from collections.abc import Mapping

    from copytrace.model import Path, ReportData, Step

LONGEST_PROGRAM = 20_000
"""Characters of a program that a report shows."""
_TOOLS = ("copytrace", "memray")


def narrow[R: ReportData](report: R, layer: str) -> R:
    """The report of what ``layer`` (a layer or a project) copies, fetches and holds, on the paths where it copies.

    Figures are the layer's own; a note on each path says what others copy there. Raises CopytraceError when the layer
    copies nothing.
    """
    paths = tuple(found for path in report.paths if (found := _narrow_path(path, layer)) is not None)
    if not paths:
        layers = ", ".join(total.layer for total in wording.by_bytes(report.layers)) or "none"
        raise CopytraceError(wording.plain(f"--issue {layer}: it copies nothing here; layers that do: {layers}"))
    totals = tuple(total for total in report.layers if layer in (total.layer, total.project))
    return replace(report, paths=paths, layers=totals)


def _narrow_path(path: Path, layer: str) -> Path | None:
    own = tuple(step for step in path.steps if layer in (step.layer, step.project))
    copied = sum(step.bytes for step in own if step.kind in COPY_KINDS)
    if not copied:
        return None
    layers = {step.layer for step in own} | {layer}
    touched = {end for step in own for end in (step.source, step.destination)}
    held = sum(
        buffer.peak_bytes for buffer in path.buffers if buffer.role in ("extra", "temporary") and buffer.layer in layers
    )
    avoidable = sum(step.avoidable_bytes for step in own)
    others = [step for step in path.steps if step not in own]
    return replace(
        path,
        steps=own,
        buffers=tuple(buffer for buffer in path.buffers if buffer.id in touched or buffer.layer in layers),
        copied_bytes=copied,
        copies=_over(copied, path),
        avoidable=_over(avoidable, path),
        best_achievable=round((copied - avoidable) / path.payload_bytes) if path.payload_bytes else 0,
        extra_at_peak_bytes=held,
        extra_at_peak=_over(held, path),
        fetched_bytes=sum(step.bytes for step in own if step.kind == "fetch"),
        flushed_bytes=sum(step.bytes for step in own if step.kind == "flush"),
        notes=(*path.notes, *_elsewhere(others, path)),
    )


def _over(nbytes: int, path: Path) -> float | None:
    return nbytes / path.payload_bytes if path.payload_bytes else None


def _elsewhere(steps: list[Step], path: Path) -> list[str]:
    shares: dict[str, int] = {}
    for step in steps:
        if step.kind in COPY_KINDS:
            shares[step.layer] = shares.get(step.layer, 0) + step.bytes
    if not shares:
        return []
    named = [f"{layer or 'an unknown layer'} {wording.times(_over(nbytes, path))}" for layer, nbytes in shares.items()]
    return [f"copied by others on this path: {wording.some(named, 4)}"]


def reproducer(environment: Mapping[str, Any]) -> str:
    """The program that was run, as a script whose inline metadata (PEP 723) names the versions installed; empty when
    the trace does not hold it.
    """
    program = environment.get("program")
    text = program.get("text") if isinstance(program, dict) else None
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_PROGRAM:
        return ""
    lines = [wording.plain(line.replace("\t", "    ")) for line in text.splitlines()]
    if any(line.startswith("# /// script") for line in lines):
        return "\n".join(lines)
    packages = environment.get("packages")
    versions = packages if isinstance(packages, dict) else {}
    wanted = [
        f'#   "{name}=={version}",'
        for name, version in versions.items()
        if name not in _TOOLS or re.search(rf"^\s*(import|from) {name}\b", text, re.MULTILINE)
    ]
    wanted = [line for line in wanted if re.fullmatch(r'#   "[\w.-]+==[\w.+!-]+",', line)]
    python = ".".join(str(environment.get("python", "")).split(".")[:2])
    metadata = [
        "# /// script",
        *([f'# requires-python = ">={python}"'] if re.fullmatch(r"\d+\.\d+", python) else []),
        *(["# dependencies = [", *wanted, "# ]"] if wanted else []),
        "# ///",
    ]
    first = 1 if lines[0].startswith("#!") else 0
    return "\n".join([*lines[:first], *metadata, *lines[first:]])
