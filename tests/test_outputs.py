"""Every output of one real run, by the means of those who read it: schema, CommonMark parser, browser, 80 columns."""

from __future__ import annotations

import getpass
import json
import re
import socket
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jsonschema import Draft202012Validator
from markdown_it import MarkdownIt

import browser
import copytrace
import reportdata
from copytrace.reports.markdown import LIMIT
from copytrace.reports.text import columns

if TYPE_CHECKING:
    from copytrace.report import Report

PROGRAM = """
import numpy as np
import zarr
from obstore.store import LocalStore

data = np.random.default_rng(0).random((1009, 1013))
stores = [zarr.storage.LocalStore("a.zarr"), zarr.storage.ObjectStore(LocalStore("b.zarr", mkdir=True))]
for store in stores:
    z = zarr.create_array(store, shape=data.shape, chunks=data.shape, dtype=data.dtype)
    z[:] = data
    assert (z[:] == data).all()
"""
BY = ("path", "layer", "site")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("run")
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "copytrace", "run", "-q", "program.py"]
    subprocess.run(command, cwd=folder, check=True)
    return copytrace.load(folder / "program.copytrace").report


def test_json_follows_the_published_schema(report: Report) -> None:
    schema = json.loads((files("copytrace") / "report.schema.json").read_text("utf-8"))
    Draft202012Validator(schema).validate(json.loads(report.to_json()))
    assert type(report).from_json(report.to_json()) == report


@pytest.mark.parametrize("by", BY)
def test_markdown_is_read_by_a_commonmark_parser(report: Report, by: str) -> None:
    text = report.to_markdown(by=by)  # type: ignore[arg-type]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    steps = sum(len(path.steps) + 2 for path in report.paths)
    packages = len(report.environment["packages"]) + 5
    rows = [token.type for token in tokens].count("tr_open")
    assert rows == steps + packages if by == "path" else rows > packages
    folded = [token.content for token in tokens if token.type == "html_block" and "<summary>" in token.content]
    assert [re.findall("<summary>(.*)</summary>", one)[0] for one in folded] == ["Environment", "Reproducer", "Stacks"]
    (program,) = [token for token in tokens if token.type == "fence"]
    assert program.info == "python"
    assert program.content.endswith(PROGRAM)
    assert text.count("https://github.com/zarr-developers/zarr-python/blob/v") >= 2


@pytest.mark.skipif(browser.find() is None, reason="no Chromium here")
def test_html_opens_without_a_word_on_the_console(report: Report, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(report.to_html(), "utf-8")
    with browser.Browser(tmp_path / "profile") as chromium:
        for dark in (False, True):
            chromium.open(page, dark=dark)
            assert chromium.run("document.querySelectorAll('details.path').length") == 4
            assert chromium.problems == []


@pytest.mark.parametrize("by", BY)
def test_80_columns_end_with_the_verdicts_and_the_next_command(report: Report, by: str) -> None:
    lines = report.to_text(by=by, file="program.copytrace").splitlines()  # type: ignore[arg-type]
    assert max(map(columns, lines)) <= 80
    assert lines[-1].startswith("Next: copytrace report program.copytrace --")
    screen = "\n".join(lines[-24:])
    assert re.search(r"\d of 4\s+paths copy more than they need", screen)
    told = re.findall(r"(?m)^  (?:write|read)  zarr.Array (?:->|<-) ", screen)
    assert len(told) == (4 if len(lines) > 24 else 0)


def test_no_output_names_a_directory_a_user_or_a_host(report: Report) -> None:
    outputs = [report.to_text(by=by) for by in BY]  # type: ignore[arg-type]
    outputs += [report.to_markdown(by=by) for by in BY]  # type: ignore[arg-type]
    outputs += [report.to_html(), report.to_json()]
    machine = [str(Path.home()), sys.prefix, tempfile.gettempdir(), socket.gethostname()]
    for output in outputs:
        for name in machine:
            assert name not in output
        assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", output) or getpass.getuser() in PROGRAM
        assert not re.search(r"(?<![\w.:/>])/(?:home|root|usr|tmp|var|opt|Users)/", output)


def test_forty_rows_stay_readable_within_an_issue() -> None:
    text = reportdata.report(reportdata.many_rows(40)).to_markdown()
    assert len(text) <= LIMIT
    rows = re.findall(r"(?m)^\| `layer\d* *[^|]*\|.*$", text)
    assert len(rows) == 40
    assert max(map(len, rows)) < 250
