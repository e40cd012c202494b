"""What works where no array library is installed; ``versions.py no-libraries`` runs it so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import copytrace
from copytrace.model import COPY_KINDS

SCRIPT = """
import copytrace, sys
data = bytearray(300_007)
with copytrace.operation("hand over", payload_bytes=300_007):
    kept = bytes(data)
assert not {"zarr", "numcodecs", "obstore", "fsspec", "xarray", "dask"} & set(sys.modules)
"""


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "copytrace", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done


def test_a_session_counts_a_copy() -> None:
    data = bytearray(300_007)
    with copytrace.session() as session, copytrace.operation("hand over", payload_bytes=len(data)):
        kept = bytes(data)
    assert len(kept) == len(data)
    (path,) = session.report.paths
    assert (path.api, path.copied_bytes) == ("hand over", 300_007)
    assert [(step.kind, step.layer) for step in path.steps if step.kind in COPY_KINDS] == [("copy", "user")]


def test_a_run_imports_no_array_library_and_every_form_of_report_is_written(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command("run", "-q", "script.py", cwd=tmp_path)
    for form in ("text", "markdown", "json", "html"):
        assert "hand over" in command("report", "script.copytrace", "--format", form, cwd=tmp_path).stdout
    assert command("check", "script.copytrace", "--max-copies", "1", cwd=tmp_path).stdout.startswith("1 path within")
    assert "The same copies on 1 path." in command("diff", "script.copytrace", "script.copytrace", cwd=tmp_path).stdout


def test_the_doctor_finds_no_fault_in_what_is_not_there(tmp_path: Path) -> None:
    out = command("doctor", "--strict", cwd=tmp_path).stdout
    assert "probes attached." in out
