"""A report for one library, and the reproducer that goes with it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import copytrace
import reportdata
from copytrace.errors import CopytraceError
from copytrace.reports.issue import LONGEST_PROGRAM, narrow, reproducer
from copytrace.runner import Program

if TYPE_CHECKING:
    from pathlib import Path

    from copytrace.report import Report


def test_only_the_layers_own_figures_are_left() -> None:
    report = narrow(reportdata.everything(), "icechunk")
    (path,) = report.paths
    payload = path.payload_bytes
    assert [(step.kind, step.layer) for step in path.steps] == [
        (kind, "icechunk") for kind in ("fetch", "join", "copy")
    ]
    assert (path.copied_bytes, path.copies, path.avoidable, path.best_achievable) == (2 * payload, 2.0, 2.0, 0)
    assert path.extra_at_peak_bytes == 8192 + 2 * payload + 9_000_000
    assert path.notes[-1] == "copied by others on this path: zarr.buffer 1.00 x"
    assert {buffer.id for buffer in path.buffers} == {"b1", "b2", "b3", "b5"}
    assert [total.layer for total in report.layers] == ["icechunk"]


def test_a_project_has_all_its_layers() -> None:
    report = narrow(reportdata.everything(), "zarr")
    assert {step.layer for path in report.paths for step in path.steps} == {"zarr.buffer", "zarr.storage"}
    decoded = next(path for path in report.paths if "zstd" in path.label)
    assert (decoded.copies, decoded.avoidable) == (1.0, 1.0)
    assert decoded.notes[-1] == "copied by others on this path: numcodecs 1.00 x"


def test_every_rendering_takes_a_narrowed_report() -> None:
    report = narrow(reportdata.everything(), "obstore")
    assert report.to_markdown().startswith(
        "**`write zarr.Array -> ObjectStore(LocalStore) bytes`: 2.0 of 2.0 copies avoidable"
    )
    assert "numcodecs" not in report.to_text().split("What could be seen")[0]
    assert "obstore" in report.to_html()
    assert type(report).from_json(report.to_json()) == report


def test_a_layer_that_copies_nothing_is_refused() -> None:
    with pytest.raises(CopytraceError, match=r"--issue dask: it copies nothing here; layers that do: .*numcodecs"):
        narrow(reportdata.everything(), "dask")


def environment(text: object, **changes: object) -> dict[str, object]:
    return {**reportdata.ENVIRONMENT, "program": {"kind": "script", "text": text}, **changes}


def metadata(script: str) -> dict[str, object]:
    """The inline metadata of a script, read as PEP 723 says."""
    lines = script.splitlines()
    start = lines.index("# /// script")
    end = lines.index("# ///", start)
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[start + 1 : end]))


def test_a_reproducer_pins_what_was_installed() -> None:
    script = reproducer(environment("#!/usr/bin/env python\nimport zarr\n\nzarr.open('a`b')\n"))
    assert metadata(script) == {
        "requires-python": ">=3.12",
        "dependencies": ["zarr==3.3.0", "numcodecs==0.17.1", "obstore==0.11.0", "numpy==2.3.1"],
    }
    assert script.startswith("#!/usr/bin/env python\n# /// script\n")
    assert script.endswith("# ///\nimport zarr\n\nzarr.open('a`b')")
    compile(script, "script", "exec")


def test_tools_are_pinned_only_where_the_program_imports_them() -> None:
    packages = {"memray": "1.20.0", "copytrace": "0.1.0", "evil": '1"]\nimport os'}
    assert metadata(reproducer(environment("print()", packages=packages))) == {"requires-python": ">=3.12"}
    with_tracker = reproducer(environment("if 1:\n  from memray import Tracker", packages=packages))
    assert metadata(with_tracker)["dependencies"] == ["memray==1.20.0"]


def test_a_script_keeps_its_own_metadata() -> None:
    script = '# /// script\n# dependencies = ["zarr"]\n# ///\nimport zarr'
    assert reproducer(environment(script)) == script


@pytest.mark.parametrize("text", ["", " \n", None, 3, "x" * (LONGEST_PROGRAM + 1)])
def test_without_a_program_there_is_no_reproducer(text: object) -> None:
    assert reproducer(environment(text)) == ""
    assert reproducer(reportdata.ENVIRONMENT) == ""


def with_program(text: str) -> Report:
    return replace(reportdata.everything(), environment=environment(text))


def test_markdown_holds_the_reproducer_whatever_is_in_it() -> None:
    text = "doc = '''\n```\n</details>\n````\n'''\n"
    markdown = with_program(text).to_markdown()
    start = markdown.index("<summary>Reproducer</summary>\n\n`````python\n# /// script\n")
    assert text in markdown[start:]
    assert markdown.index("\n`````\n", start + 40) > markdown.index("</details>\n````", start)
    assert len(with_program("x = 1\n" * 3000).to_markdown()) <= 65_536


def test_a_programs_text_names_no_directory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    script = tmp_path / "script.py"
    script.write_text(
        f"# -*- coding: latin-1 -*-\na = '{tmp_path}/a.zarr'\nb = '/home/somebody/b.zarr'\nc = 'é'\n", "latin-1"
    )
    assert (
        Program("script", "script.py").text() == "# -*- coding: latin-1 -*-\na = './a.zarr'\nb = '~/b.zarr'\nc = 'é'\n"
    )
    assert Program("code", "print(1)").text() == "print(1)"
    assert Program("module", "this").text() == ""
    assert Program("script", "-").text() == ""
    assert Program("script", ".").text() == ""
    script.write_bytes(b"# -*- coding: nonsense -*-\n")
    assert Program("script", "script.py").text() == ""


def test_a_run_keeps_its_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import pathlib\npathlib.Path('script.py').write_text('changed')\n")
    command = [sys.executable, "-m", "copytrace", "run", "-q", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    program = copytrace.load(tmp_path / "script.copytrace").report.environment["program"]
    assert program == {"kind": "script", "text": "import pathlib\npathlib.Path('script.py').write_text('changed')\n"}
