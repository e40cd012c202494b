"""Running a stack in a process of its own and reading its report; packages that copytrace has never heard of."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import pytest

import copytrace
from copytrace.transfers import _extension

needs_the_hook = pytest.mark.skipif(_extension()[0] is None, reason="needs the native hook")
"""What moves in native code between buffers that no probe is handed is not told without it."""

COPIES = frozenset({"copy", "join", "gather", "convert", "encode", "decode", "scatter"})

_PROGRAM = """
import sys
sys.path[:0] = {path!r}
import numpy as np
import copytrace
tmp = {tmp!r}
{before}
with copytrace.session() as s:
{inside}
{after}
open({out!r}, "w").write(s.report.to_json())
"""


def trace(
    tmp: Path,
    inside: str,
    *,
    before: str = "",
    after: str = "",
    path: tuple[Path, ...] = (),
    python: str = sys.executable,
    **variables: str,
) -> copytrace.Report:
    """The report of ``inside`` run in a session, after ``before``, in ``tmp``. Errors inside probes are errors."""
    out, program = tmp / "report.json", tmp / "program.py"
    program.write_text(
        _PROGRAM.format(
            path=[str(p) for p in path],
            tmp=str(tmp),
            before=textwrap.dedent(before),
            inside=textwrap.indent(textwrap.dedent(inside), "    "),
            after=textwrap.dedent(after),
            out=str(out),
        )
    )
    environment = {**os.environ, "COPYTRACE_STRICT": "1", **variables}
    done = subprocess.run(
        [python, str(program)], capture_output=True, text=True, timeout=300, cwd=tmp, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return copytrace.Report.from_dict(json.loads(out.read_text()))


def copies(path: Any) -> list[tuple[str, int, str, str]]:
    """Kind, bytes, layer and last part of the function of each step that copies 1 % of the payload or more."""
    return [
        (step.kind, step.bytes, step.layer, step.site.function.replace("::", ".").rsplit(".", 1)[-1])
        for step in path.steps
        if step.kind in COPIES and step.bytes * 100 >= path.payload_bytes
    ]


def functions(path: Any) -> set[str]:
    """Every function that a step of ``path`` names, callers too."""
    return {ref.function for step in path.steps for ref in (step.site, *step.called_from)}


def only(report: copytrace.Report, direction: str) -> Any:
    """The one path of that direction."""
    (path,) = [path for path in report.paths if path.direction == direction]
    return path


def install(place: Path, package: str, files: dict[str, str]) -> Path:
    """Put a distribution of one package into ``place``, which it returns; C sources are compiled."""
    place.mkdir(exist_ok=True)
    written = []
    for name, text in files.items():
        target = place / package / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(textwrap.dedent(text))
        if name.endswith(".c"):
            target = _compile(target)
        written.append(str(target.relative_to(place)))
    info = place / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in written))
    return place


def _compile(source: Path) -> Path:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = source.with_name(source.stem + suffix)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    include = sysconfig.get_path("include")
    subprocess.run([*compiler, "-shared", "-fPIC", "-O2", f"-I{include}", str(source), "-o", str(target)], check=True)
    return target
