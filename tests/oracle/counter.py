"""The preloaded counter of moves: built with the C compiler, used in a process of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("counter.c")
LIBRARY = "ORACLE_LIBRARY"


def build(directory: Path) -> Path | None:
    """The shared object, None without a compiler or where preloading is another matter."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = directory / "counter.so"
    options = ["-O2", "-fPIC", "-shared", "-fno-builtin", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *options, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment of a process that counts."""
    return {**os.environ, "LD_PRELOAD": str(library), LIBRARY: str(library)}


def counted(run: Callable[[], Any], file: Path) -> Counter[str]:
    """Bytes moved by each library during ``run``, in a process that counts."""
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.oracle_begin()
    run()
    assert library.oracle_end(os.fsencode(file)) == 0
    found: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        name, _, nbytes = line.split("\t")
        found[name] += int(nbytes)
    return found
