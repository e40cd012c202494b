"""The matrix: its table, its results kept and resumed, its Markdown; one row run for real."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from copytrace.errors import CopytraceError
from copytrace.matrix import pages, runner, tables
from copytrace.matrix.compare import load_pair
from copytrace.matrix.configurations import TABLES, select
from copytrace.matrix.drivers import DRIVERS
from copytrace.matrix.results import Copied, Figures, Held, Results, failed, figures, fingerprint, key_of
from copytrace.matrix.runner import Matrix, shape_of
from copytrace.reports import diff

DOCS = Path(__file__).parents[1] / "docs"

SIZE = 1_000_000


def _report(direction: str = "write", *, extra: int = SIZE) -> dict[str, Any]:
    site = {"function": "numcodecs.zstd.compress", "file": "numcodecs/zstd.pyx", "line": 7, "url": ""}
    callers = [{"function": f"zarr.codecs.{name}", "file": "", "line": 0, "url": ""} for name in "abcdef"]
    step = {
        "kind": "encode",
        "layer": "numcodecs",
        "site": site,
        "called_from": callers,
        "count": 1,
        "bytes": SIZE * 89 // 100,
        "avoidable_bytes": 0,
        "at_peak_bytes": extra * 3 // 4,
        "evidence": "pointer",
        "remedy": "",
        "remedy_url": "",
        "ratio": 0.89,
    }
    small = {**step, "kind": "copy", "ratio": 0.009}
    flush = {**step, "kind": "flush", "layer": "zarr.storage"}
    buffers = [
        {"role": "extra", "layer": "numcodecs", "site": site, "peak_bytes": extra * 3 // 4},
        {"role": "temporary", "layer": "", "site": {"function": ""}, "peak_bytes": extra // 4},
        {"role": "source", "layer": "", "site": {"function": ""}, "peak_bytes": SIZE},
    ]
    path = {
        "direction": direction,
        "payload_bytes": SIZE,
        "copies": 0.89,
        "extra_at_peak": extra / SIZE,
        "extra_at_peak_bytes": extra,
        "best_achievable": 1,
        "buffers": buffers,
        "steps": [step, small, flush],
    }
    packages = {"zarr": "3.3.0", "numpy": "2.5.5", "pip": "1"}
    environment = {"python": "3.12.1", "packages": packages}
    return {"paths": [path], "environment": environment, "coverage": {"transfers": True}}


def test_every_row_has_a_driver_and_a_name_of_its_own() -> None:
    names = set()
    for table in TABLES:
        for row in select(table):
            assert row.driver in DRIVERS
            assert (row.table, row.name) not in names
            names.add((row.table, row.name))
            if table != "latest":
                assert any("==" in requirement for requirement in row.requirements)
            else:
                assert not any("==" in requirement for requirement in row.requirements)
    assert len(names) == 51


def test_the_current_table_has_the_published_figures() -> None:
    published = {row.name: (row.published_write, row.published_read) for row in select("current") if row.published_read}
    assert published == {
        "zarr-local": ((0, 1), (1, 2)),
        "zarr-obstore": ((0, 1), (1, 2)),
        "zarr-icechunk": ((1, 2), (2, 2)),
        "zarrista-local": ((1, 1), (0, 1)),
        "zarrista-obstore": ((1, 1), (0, 1)),
        "zarrista-icechunk": (None, (1, 1)),
    }


@pytest.mark.parametrize("stage", ["prepare", "write", "read", "before_write", "before_read"])
def test_drivers_are_python(stage: str) -> None:
    for name, driver in DRIVERS.items():
        compile(getattr(driver, stage), name, "exec")


def test_a_row_that_is_not_there_is_said_with_those_that_are() -> None:
    with pytest.raises(CopytraceError, match=r"--only 'x\*' matches no row of s3: there are zarr-s3fs-http"):
        select("s3", "x*")
    with pytest.raises(CopytraceError, match="table 'old' is not known: choose one of current, latest, legacy, s3"):
        select("old")


@pytest.mark.parametrize(("nbytes", "side"), [(4, 1), (15, 1), (16, 2), (100_000_000, 5000)])
def test_the_array_is_a_square_of_at_most_the_size(nbytes: int, side: int) -> None:
    assert shape_of(nbytes) == (side, side)


def test_an_array_of_nothing_is_refused() -> None:
    with pytest.raises(CopytraceError, match="--size 3: give at least 4 bytes"):
        shape_of(3)


def test_figures_are_read_off_a_report() -> None:
    one = figures("row", "write", True, "mark", _report(), SIZE + 7)
    assert (one.copies, one.extra_at_peak, one.best, one.named, one.payload_bytes) == (0.89, 1.0, 1, 0.75, SIZE)
    assert one.process_at_peak == (SIZE + 7) / SIZE
    assert one.held == (
        Held("extra", "numcodecs", "numcodecs.zstd.compress", 750_000),
        Held("temporary", "", "", 250_000),
    )
    callers = tuple(f"zarr.codecs.{name}" for name in "abcd")
    assert one.copied == (
        Copied(
            *("encode", "numcodecs", "numcodecs.zstd.compress", "numcodecs/zstd.pyx:7", "", callers),
            *(1, 890_000, 0, 750_000, "pointer", "", ""),
        ),
    )
    assert one.versions == {"python": "3.12.1", "zarr": "3.3.0", "numpy": "2.5.5"}
    assert figures("row", "read", True, "mark", _report("read"), SIZE + 7).process_at_peak == 7 / SIZE


def test_the_share_that_is_named_is_not_given_where_next_to_nothing_is_held() -> None:
    assert figures("row", "write", True, "m", _report(extra=9_999), 0).named is None
    assert figures("row", "write", True, "m", _report(extra=10_000), 0).named == 0.75


def test_a_report_without_the_path_is_a_failure_of_that_run_only() -> None:
    assert figures("row", "read", False, "m", _report("write"), 0).error == "the report has no path in this direction"


def test_results_are_kept_and_resumed(tmp_path: Path) -> None:
    results = Results(tmp_path, "current")
    one = figures("row", "write", True, "mark", _report(), SIZE)
    results.add(one)
    again = Results(tmp_path, "current")
    assert again.found == {one.key: one}
    assert again.has(key_of("row", "write", True), "mark")
    assert not again.has(key_of("row", "write", True), "another")
    again.add(replace(one, error="it broke"))
    assert not Results(tmp_path, "current").has(one.key, "mark")


def test_results_of_another_table_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    Results(tmp_path, "current").add(figures("row", "write", True, "mark", _report(), SIZE))
    (tmp_path / "current.json").rename(tmp_path / "s3.json")
    with pytest.raises(CopytraceError, match=r"s3\.json: holds table 'current'; choose another directory"):
        Results(tmp_path, "s3")
    (tmp_path / "s3.json").write_text('{"schema": "copytrace.matrix/1", "table": "s3", "figures": [{}]}')
    with pytest.raises(CopytraceError, match=r"s3\.json: damaged \(KeyError\); remove it to begin anew"):
        Results(tmp_path, "s3")


def test_results_are_a_run_a_line(tmp_path: Path) -> None:
    results = Results(tmp_path, "current")
    for stage in ("write", "read"):
        results.add(figures("row", stage, True, "mark", _report(stage), SIZE))
    lines = (tmp_path / "current.json").read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line.removesuffix(","))["stage"] for line in lines[1:3]] == ["write", "read"]


def test_a_fingerprint_changes_with_the_row_the_size_and_the_day() -> None:
    row = select("current")[0]
    marks = {
        fingerprint(row, (2, 2), ""),
        fingerprint(row, (3, 3), ""),
        fingerprint(row, (2, 2), "2026-01-01"),
        fingerprint(replace(row, requirements=("zarr",)), (2, 2), ""),
    }
    assert len(marks) == 4
    assert fingerprint(row, (2, 2), "") == fingerprint(replace(row), (2, 2), "")


def test_markdown_has_the_form_of_the_published_table() -> None:
    row = select("current", "zarr-local")[0]
    best = replace(
        figures(row.name, "write", True, "m", _report(), SIZE), versions={"zarr": "3.3.0", "numcodecs": "0.17.1"}
    )
    worse = replace(best, compressed=False, best=0, extra_at_peak=0.53, copies=2.0)
    broken = failed(row.name, "read", False, "m", "no space left")
    text = tables.render([row], {one.key: one for one in (best, worse, broken)}, "current")
    cells = "1 (0.530; published 0) | 2.00 | **1** (1.000; published 1) | **0.89**"
    line = f"| local | LocalStore | zarr 3.3.0, numcodecs 0.17.1 | 3 | {cells} |"
    assert line in text.splitlines()
    assert "| local | LocalStore |  | 3 | failed | failed | - | - |" in text.splitlines()
    assert "- read, uncompressed: failed: no space left" in text
    copied = "0.89 encode by numcodecs `zstd.compress`, called from `codecs.a`"
    held = "0.75 by numcodecs `zstd.compress`; 0.25 by ? ? (temporary)"
    assert f"- write, compressed: {copied}. Held at peak: {held}." in text.splitlines()


def test_a_row_that_fails_does_not_take_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    ran: list[str] = []

    def process(_self: Matrix, row: Any, stage: str, compressed: bool, *_rest: Any) -> dict[str, Any]:
        ran.append(key_of(row.name, stage, compressed))
        if row.name == "zarr-local" and stage == "write":
            raise CopytraceError("it broke")
        return {"report": _report(stage), "peak_bytes": SIZE}

    monkeypatch.setattr(runner, "environment", lambda *_a, **_k: tmp_path)
    monkeypatch.setattr(Matrix, "_process", process)
    first = Matrix("current", tmp_path / "out", only="zarr-[lo]*", cache=tmp_path, tell=told.append)
    found = first.run()
    assert len(found) == 4 * len(first.rows)
    assert {one.row for one in found if one.error} == {"zarr-local"}
    assert [one.error for one in found if one.row != "zarr-local"] == [""] * 4 * (len(first.rows) - 1)
    assert [one.error for one in found[2:4]] == ["nothing was written to read"] * 2
    assert "zarr-local read uncompressed" not in ran
    assert any("failed: it broke" in line for line in told)
    ran.clear()
    Matrix("current", tmp_path / "out", only="zarr-[lo]*", cache=tmp_path).run()
    assert ran == [key_of("zarr-local", "write", flag) for flag in (False, True)]
    (tmp_path / "out" / "current.md").unlink(missing_ok=True)
    saved, markdown = Matrix("current", tmp_path / "out", only="zarr-local", cache=tmp_path).save()
    assert "### zarr-obstore" in markdown.read_text()
    assert json.loads(saved.read_text())["table"] == "current"
    assert markdown.read_text().startswith("# Copies of an array by stack: current\n")


def test_the_committed_pages_are_those_of_the_committed_results(tmp_path: Path) -> None:
    pages.write(DOCS / "results", tmp_path)
    for name in ("results.md", "findings.md"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), name


@pytest.mark.parametrize("table", TABLES)
def test_the_committed_results_are_of_all_rows_and_round_to_the_published_figures(table: str) -> None:
    found = pages.load_tables(DOCS / "results")[table]
    for row in select(table):
        for stage, wanted, published in (
            ("write", row.writes, row.published_write),
            ("read", row.reads, row.published_read),
        ):
            for compressed in (False, True) if wanted else ():
                one = found[key_of(row.name, stage, compressed)]
                assert (one.error, one.payload_bytes, one.recorded) == ("", 100_000_000, True)
                assert one.named is None or one.named >= 0.99, one.key
                if published and table == "current":
                    assert round(one.extra_at_peak) == published[compressed], one.key


def test_a_finding_has_its_code_path_and_remedy() -> None:
    text = (DOCS / "findings.md").read_text()
    start = text.index("### `NDBuffer.__setitem__` (reads)")
    lines = text[start : text.index("\n###", start + 1)].splitlines()
    assert lines[2].startswith(
        "- Code path: `zarr.core.buffer.cpu.NDBuffer.__setitem__` called from "
        "`zarr.core.codec_pipeline.BatchedCodecPipeline.read_batch` called from "
    )
    assert "- Desired: no scatter. Actual: 1.00 x" in lines
    (remedy,) = [line for line in lines if line.startswith("- Remedy: ")]
    for number in (3429, 2904):
        assert f"(https://github.com/zarr-developers/zarr-python/issues/{number})" in remedy


def test_pages_without_results_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(CopytraceError, match=r"holds no results; run copytrace matrix -o .* first"):
        pages.write(tmp_path, tmp_path)


def _save(directory: Path, *runs: Figures) -> str:
    directory.mkdir()
    results = Results(directory, "current")
    for run in runs:
        results.add(run)
    return str(results.path)


def test_two_matrices_are_compared_run_by_run(tmp_path: Path) -> None:
    copying = replace(figures("row", "write", False, "m", _report(), SIZE), versions={"zarr": "3.3.0"})
    silent = replace(copying, copied=(), copies=0.0, extra_at_peak=0.0, versions={"zarr": "3.4.2"})
    broken = failed("other", "read", True, "m", "no space left")
    old, new = _save(tmp_path / "old", copying, broken), _save(tmp_path / "new", silent)
    pair = load_pair(old, new)
    assert pair is not None
    found = diff.compare(*pair)
    assert [(change.verb, change.path, change.layers) for change in found.changes] == [
        ("went", "row write uncompressed", "numcodecs")
    ]
    assert found.paths[0].copies == (0.89, 0.0)
    assert found.versions == {"zarr": ("3.3.0", "3.4.2")}
    assert found.said == ("old: other read compressed failed: no space left",)
    assert "no space left" in diff.to_text(found)
    assert load_pair(str(DOCS / "results.md"), str(DOCS / "findings.md")) is None
    with pytest.raises(CopytraceError, match=r"findings\.md: holds no results of a matrix, and the other file does"):
        load_pair(old, str(DOCS / "findings.md"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_a_row_runs_in_an_environment_of_its_own(tmp_path: Path) -> None:
    matrix = Matrix(
        "current", tmp_path / "out", only="zarr-local", nbytes=16_000_000, keep=True, cache=tmp_path / "cache"
    )
    found = {one.key: one for one in matrix.run()}
    assert [one.error for one in found.values()] == [""] * 4
    read = found["zarr-local read uncompressed"]
    assert (read.copies, read.payload_bytes) == (1.0, 16_000_000)
    assert read.versions["zarr"] == "3.3.0"
    assert read.extra_at_peak == pytest.approx(1.0, abs=0.05)
    assert found["zarr-local write uncompressed"].copies == 0.0
    kept = tmp_path / "out" / "traces" / "current"
    assert {file.name for file in kept.iterdir()} == {
        f"zarr-local-{stage}-{setting}.{kind}"
        for stage in ("write", "read")
        for setting in ("compressed", "uncompressed")
        for kind in ("copytrace", "json")
    }
