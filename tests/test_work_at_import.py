"""A program may be a module that is imported: what it does then is its work."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 8 * 100_003
WORK = """
import numpy as np, zarr
a = np.arange(100_003, dtype="f8")
z = zarr.create_array("a.zarr", shape=a.shape, chunks=a.shape, dtype=a.dtype, compressors=None)
z[...] = a
kept = a.tobytes()
"""


def test_work_at_import_is_told_as_that_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    run = [sys.executable, "-m", "copytrace", "run", "-q", "-o", "out.copytrace", "-c", "import work"]
    subprocess.run(run, cwd=tmp_path, check=True)
    show = [sys.executable, "-m", "copytrace", "report", "out.copytrace", "--format", "json"]
    report = json.loads(subprocess.run(show, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)
    (write,) = [path for path in report["paths"] if path["direction"] == "write"]
    assert (write["payload_bytes"], write["copied_bytes"], write["flushed_bytes"]) == (SIZE, 0, SIZE)
