"""The IPython extension, in a shell and in a real notebook."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import copytrace
import reportdata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from copytrace.report import Report

WRITE = """
import numpy as np, zarr
data = np.ones((211, 503), "f4")
z = zarr.create_array({}, shape=data.shape, chunks=data.shape, dtype="f4", compressors=None)
z[:] = data
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell that writes no history."""
    hooks = sys.displayhook, sys.excepthook
    made = InteractiveShell()
    made.history_manager.enabled = False
    monkeypatch.setattr("builtins.get_ipython", lambda: made, raising=False)
    made.run_line_magic("load_ext", "copytrace")
    yield made
    made.run_line_magic("unload_ext", "copytrace")
    assert "copytrace" not in made.magics_manager.magics["cell"] | made.magics_manager.magics["line"]
    atexit.unregister(made.atexit_operations)
    sys.displayhook, sys.excepthook = hooks


def traced(shell: InteractiveShell, cell: str, line: str = "") -> Report:
    report = shell.run_cell_magic("copytrace", line, cell)
    assert isinstance(report, copytrace.Report)
    return report


def test_a_cell_is_traced_and_its_names_stay(shell: InteractiveShell, tmp_path: Path) -> None:
    (path,) = traced(shell, WRITE.format(repr(str(tmp_path / "a.zarr")))).paths
    assert (path.label, path.payload_bytes) == ("write . zarr.Array . LocalStore . bytes", 211 * 503 * 4)
    with capture_output() as shown:
        (path,) = traced(shell, "out = z[:]\nout.shape").paths
    assert path.label == "read . zarr.Array . LocalStore . bytes"
    assert (shell.user_ns["out"] == shell.user_ns["data"]).all()
    assert "(211, 503)" in shown.stdout


def test_a_line_is_traced(shell: InteractiveShell, tmp_path: Path) -> None:
    shell.run_cell(WRITE.format(repr(str(tmp_path / "a.zarr"))))
    report = shell.run_line_magic("copytrace", "again = z[:100]")
    assert [path.direction for path in report.paths] == ["read"]
    assert shell.user_ns["again"].shape == (100, 503)


def test_options(shell: InteractiveShell, tmp_path: Path) -> None:
    trace = tmp_path / "my trace.copytrace"
    report = traced(shell, WRITE.format("{}"), f"-o '{trace}' --no-memray --no-native --min-bytes 1_000")
    assert not report.coverage.memray
    assert copytrace.load(trace).report.paths == report.paths
    with pytest.raises(UsageError, match="exists"):
        traced(shell, "1", f"-o '{trace}'")
    traced(shell, "1", f"-o '{trace}' -f")


@pytest.mark.parametrize(
    ("line", "cell", "message"),
    [
        ("--sideways", "1", "unrecognized arguments: --sideways"),
        ("--min-bytes few", "1", "invalid int value"),
        ("--min-bytes -1", "1", "negative"),
        ("'", "1", "No closing quotation"),
        ("", " \n", "no code to run"),
    ],
)
def test_misuse_is_one_line(shell: InteractiveShell, line: str, cell: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shell.run_cell_magic("copytrace", line, cell)


def test_errors_are_the_cells_own(shell: InteractiveShell) -> None:
    with pytest.raises(ZeroDivisionError):
        traced(shell, "before = 1\n1 / 0")
    assert shell.user_ns["before"] == 1
    with pytest.raises(SyntaxError):
        traced(shell, "1 +")


def test_cells_may_hold_magics_and_a_silent_end(shell: InteractiveShell) -> None:
    with capture_output() as shown:
        traced(shell, "here = %pwd\nquiet = 41 + 1\nquiet;")
    assert (shell.user_ns["quiet"], shell.user_ns["here"]) == (42, os.getcwd())
    assert "42" not in shown.stdout


def test_a_report_shows_itself() -> None:
    report = reportdata.everything()
    fragment = report._repr_html_()
    assert fragment.startswith('<div class="copytrace fragment">')
    assert "<script" not in fragment
    assert "alert(1)" in fragment
    assert "<body" not in fragment
    assert report._repr_markdown_() == report.to_markdown()


def test_a_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    cells = ["%load_ext copytrace", "%%copytrace" + WRITE.format("{}") + "z.shape", "_.paths[0].label", "z[0, 0]"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    executed: Any = client.execute()
    shown = [output["data"] for cell in executed.cells for output in cell.outputs if "data" in output]
    assert shown[0]["text/plain"] == "(211, 503)"
    assert shown[1]["text/html"].startswith('<div class="copytrace fragment">')
    assert "zarr.Array \u2192 " in shown[1]["text/html"]
    assert shown[1]["text/markdown"].startswith("**")
    assert shown[2]["text/plain"].startswith("'write . zarr.Array . ")
    assert "1." in shown[3]["text/plain"]
