"""An environment for each set of requirements: made with uv, kept for the next run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import copytrace
from copytrace.errors import CopytraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

READY = "ready"
"""A file of this name in an environment says that everything was installed."""


def cache_directory() -> Path:
    """Where environments are kept: ``$XDG_CACHE_HOME/copytrace`` or ``~/.cache/copytrace``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "copytrace"


def environment(
    requirements: Sequence[str], *, cache: Path, exclude_newer: str = "", traced: bool = True, stamp: str = ""
) -> Path:
    """The ``bin`` directory of an environment with ``requirements`` and, when ``traced``, copytrace itself.

    ``exclude_newer`` is the last day whose releases count for the requirements; copytrace and what it needs come after
    them and leave them as they are. Equal arguments give the same environment; ``stamp`` tells others apart.

    Raises CopytraceError when uv is missing or cannot install them.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise CopytraceError("uv is not on PATH: the matrix makes its environments with it (pip install uv)")
    own = _own_requirement()
    facts = [*requirements, exclude_newer, sys.version.split()[0], " ".join(own) if traced else "", stamp]
    place = cache / hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    binaries = place / "bin"
    if not (place / READY).exists():
        _run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(place)])
        python = str(binaries / "python")
        newest = ["--exclude-newer", exclude_newer] if exclude_newer else []
        _run([uv, "pip", "install", "-q", "--python", python, *newest, *requirements])
        if traced:
            _run([uv, "pip", "install", "-q", "--python", python, *own])
        (place / READY).touch()
    return binaries


def _own_requirement() -> list[str]:
    """How copytrace itself is installed elsewhere: from its checkout when it runs from one."""
    root = Path(copytrace.__file__).resolve().parents[2]
    return ["-e", str(root)] if (root / "pyproject.toml").exists() else [f"copytrace=={copytrace.__version__}"]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = "; ".join(lines[:4]) or f"exit {done.returncode}"
        raise CopytraceError(f"{' '.join(Path(command[0]).name.split() + command[1:3])} failed: {told}"[:600])
