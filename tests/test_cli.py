"""The commands that read traces, as processes: what they print, where, and how they exit."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import select
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import cycle
from pathlib import Path
from unittest import mock

import pytest
from jsonschema import Draft202012Validator
from markdown_it import MarkdownIt

import copytrace
import reportdata
from copytrace.cli import main
from copytrace.report import Report

COMMAND = [sys.executable, "-m", "copytrace"]


def cli(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a ``copytrace`` process."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**clean_environment(), **environment},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def called(*arguments: str | Path) -> tuple[int, str, str]:
    """The same of a call in this process, which is faster."""
    out, err = StringIO(), StringIO()
    with (
        mock.patch.dict(os.environ, clean_environment(), clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as done,
    ):
        main([str(argument) for argument in arguments])
    return done.value.code or 0, out.getvalue(), err.getvalue()


def clean_environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "TERM": "xterm"}


@pytest.fixture
def example(tmp_path: Path) -> Path:
    file = tmp_path / "example.json"
    file.write_text(reportdata.everything().to_json())
    return file


def saved(folder: Path, name: str, report: Report) -> Path:
    file = folder / name
    file.write_text(report.to_json())
    return file


# --- report ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["path", "layer", "site"])
def test_report_prints_the_rendering(by: str, example: Path) -> None:
    report, name = reportdata.everything(), str(example)
    assert called("report", example, f"--by-{by}") == (0, report.to_text(by=by, file=name), "")
    assert called("report", example, f"--by-{by}", "--format", "markdown") == (0, report.to_markdown(by=by), "")
    assert called("report", f"--by-{by}", "--format=json", example) == (0, report.to_json() + "\n", "")


def test_report_is_by_path_when_not_told(example: Path) -> None:
    assert called("report", example) == called("report", example, "--by-path")


def test_report_reads_what_a_session_saved(tmp_path: Path) -> None:
    with copytrace.session("mine") as session, copytrace.operation("work", payload_bytes=1_000_003):
        bytes(bytearray(1_000_003))
    session.save(tmp_path / "work.copytrace")
    status, out, err = cli("report", "work.copytrace", "--format", "json", cwd=tmp_path)
    assert (status, err) == (0, "")
    assert Report.from_json(out) == session.report
    assert "copytrace report work.copytrace --by-site" in cli("report", "work.copytrace", cwd=tmp_path)[1]


def test_report_writes_a_file_only_once(example: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.md"
    assert called("report", example, "--format", "markdown", "-o", out) == (0, "", "")
    assert out.read_text() == reportdata.everything().to_markdown()
    out.write_text("precious")
    status, printed, err = called("report", example, "-o", out)
    assert (status, printed) == (1, "")
    assert err == f"copytrace: {out} exists; give another name with -o, or -f to overwrite it\n"
    assert out.read_text() == "precious"
    assert called("report", example, "-f", "-o", out) == (0, "", "")
    assert out.read_text() == reportdata.everything().to_text(file=str(example))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("folder", "folder is a directory; give a file with -o"),
        ("no/where.txt", "no: no such directory; make it, or give another name with -o"),
    ],
)
def test_report_says_where_it_cannot_write(
    name: str, words: str, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert called("report", example, "-f", "-o", name) == (1, "", f"copytrace: {words}\n")


def broken_files(folder: Path) -> dict[str, str]:
    """Name of a file that is no report -> what is said of it."""
    with copytrace.session("x") as session:
        pass
    session.save(folder / "good.copytrace")
    whole = (folder / "good.copytrace").read_bytes()
    (folder / "cut.copytrace").write_bytes(whole[: len(whole) // 2])
    (folder / "flipped.copytrace").write_bytes(whole[:60] + bytes(200) + whole[260:])
    (folder / "empty.copytrace").write_bytes(b"")
    (folder / "foreign.bin").write_bytes(b"\x89PNG\r\n" + bytes(range(256)))
    (folder / "foreign.json").write_text('{"schema": "other/1"}')
    (folder / "newer.json").write_text('{"schema": "copytrace.report/2"}')
    (folder / "cut.json").write_text(reportdata.everything().to_json()[:5000])
    (folder / "bytes.json").write_bytes(b'{"a": "\xff"}')
    (folder / "folder").mkdir()
    return {
        "missing.copytrace": "no such file",
        "cut.copytrace": "cut short",
        "flipped.copytrace": "damaged",
        "empty.copytrace": "not a copytrace trace",
        "foreign.bin": "not a copytrace trace",
        "foreign.json": "not a copytrace report",
        "newer.json": "made by another version",
        "cut.json": "not a JSON report",
        "bytes.json": "cannot be read",
        "folder": "not what a copytrace run leaves",
    }


def test_files_that_are_no_reports_are_refused_in_one_line_that_names_them(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    processes = ("cut.copytrace", "missing.copytrace", "cut.json")
    commands = cycle([["report"], ["check", "--max-copies", "1"], ["diff", str(example)]])
    for (name, words), command in zip(broken_files(tmp_path).items(), commands, strict=False):
        status, out, err = cli(*command, name, cwd=tmp_path) if name in processes else called(*command, name)
        assert (status, out) == (1, ""), name
        assert re.fullmatch(rf"copytrace: {re.escape(name)}: .*\n", err), err
        assert words in err, name


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = tmp_path / "loop"
    file.symlink_to("loop")
    status, _, err = called("report", file)
    assert status == 1
    assert re.fullmatch(r"copytrace: .*loop: .*\n", err)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["report"],
        ["nonsense"],
        ["report", "x", "--format", "yaml"],
        ["report", "x", "y"],
        ["report", "x", "--by-layer", "--by-site"],
        ["report", "x", "--by-color"],
        ["check", "x"],
        ["check", "x", "--max-copies", "few"],
        ["check", "x", "--max-copies", "-1"],
        ["diff", "x"],
        ["diff", "x", "y", "--format", "html"],
    ],
)
def test_misuse_exits_with_2(arguments: list[str]) -> None:
    status, out, err = called(*arguments)
    assert status == 2
    assert (out + err).strip()
    assert "Traceback" not in err


def test_a_report_for_an_issue_is_markdown_on_one_library(example: Path) -> None:
    status, out, err = called("report", example, "--issue", "icechunk")
    assert (status, err) == (0, "")
    assert out.startswith("**`read zarr.Array <- IcechunkStore bytes`: 2.0 of 2.0 copies avoidable, in ")
    assert "| `zarr.buffer` |" not in out
    assert called("report", example, "--issue", "icechunk", "--format", "html")[1].startswith("<!doctype html>")
    status, out, err = called("report", example, "--issue", "dask")
    assert (status, out, err.startswith("copytrace: --issue dask: it copies nothing here; ")) == (1, "", True)


def test_html_goes_to_a_file_and_to_the_browser(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = called("report", example, "--format", "html")
    assert (status, out.startswith("<!doctype html>"), err) == (0, True, "")
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: shown.append(url) or True)
    page = tmp_path / "out.html"
    assert called("report", example, "--open", "-o", page) == (0, f"the report is in {page}\n", "")
    assert (shown.pop(), page.read_text()) == (page.as_uri(), out)
    assert called("report", example, "--open", "-o", page)[0] == 1
    assert called("report", example, "--open", "--format", "json")[0] == 2
    assert called("report", example, "--open")[0] == 0
    temporary = Path(shown.pop().removeprefix("file://"))
    assert temporary.read_text() == out
    temporary.unlink()
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    status, out, err = called("report", example, "--open", "-f", "-o", page)
    assert (status, out, err) == (1, "", f"copytrace: no browser could be started; the report is in {page}\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in ["run", "report", "check", "diff", "doctor", "demo"])]
)
def test_help(arguments: list[str]) -> None:
    status, out, err = called(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: copytrace {'' if arguments[0] == '--help' else arguments[0]}".rstrip())
    assert max(map(len, out.splitlines())) <= 80


def test_version() -> None:
    assert cli("--version") == (0, f"copytrace {copytrace.__version__}\n", "")


# --- colour, width and pipes -----------------------------------------------------------------------------------------


def test_pipes_are_80_columns_without_color(example: Path) -> None:
    _, out, _ = cli("report", example)
    assert "\x1b" not in out
    assert out == reportdata.everything().to_text(width=80, file=str(example))


def test_columns_are_honoured(example: Path) -> None:
    assert cli("report", example, COLUMNS="120")[1] == reportdata.everything().to_text(width=120, file=str(example))


def test_color_can_be_forced_and_forbidden(example: Path) -> None:
    colored = reportdata.everything().to_text(color=True, file=str(example))
    assert cli("report", example, FORCE_COLOR="1")[1] == colored
    assert "\x1b" not in cli("report", example, NO_COLOR="1")[1]
    assert "\x1b" not in cli("report", example, NO_COLOR="1", FORCE_COLOR="1")[1]
    for kind in ("json", "markdown"):
        assert "\x1b" not in cli("report", example, "--format", kind, FORCE_COLOR="1")[1]


def test_a_terminal_without_unicode_is_no_error(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.json", reportdata.report(reportdata.hostile_read()))
    status, out, err = cli("report", file, PYTHONIOENCODING="ascii")
    assert (status, err) == (0, "")
    assert r"\u6570\u636e" in out


def on_terminal(arguments: list[str], **environment: str) -> str:
    """What a command writes to a terminal of 100 columns."""
    main, side = pty.openpty()
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    environment = {**kept, "COLUMNS": "100", "TERM": "xterm-256color", **environment}
    with subprocess.Popen([*COMMAND, *arguments], stdout=side, stderr=side, env=environment) as process:
        os.close(side)
        written = b""
        while select.select([main], [], [], 60)[0]:
            try:
                part = os.read(main, 65_536)
            except OSError:
                break
            if not part:
                break
            written += part
        assert process.wait(60) == 0
    os.close(main)
    return written.decode().replace("\r\n", "\n")


def test_a_terminal_gets_its_width_and_color(example: Path) -> None:
    report = reportdata.everything()
    assert on_terminal(["report", str(example)]) == report.to_text(width=100, color=True, file=str(example))
    plain = on_terminal(["report", str(example)], NO_COLOR="1")
    assert plain == report.to_text(width=100, file=str(example))


def test_long_work_is_told_on_a_terminal_and_wiped_away(tmp_path: Path) -> None:
    program = "import zarr; z = zarr.ones(999, store=zarr.storage.MemoryStore()); z[:]"
    trace = str(tmp_path / "program.copytrace")
    shown = on_terminal(["run", "-o", trace, "-c", program])
    for doing in (r"copytrace reads [\d.]+ \w+ of capture and resolves its names", "copytrace follows the payload"):
        assert re.search(doing, shown)
    *_, last = re.split(r"\x1b\[2K", shown)
    assert "copytrace follows" not in last
    assert "Next: copytrace report" in last
    assert "copytrace reads" not in on_terminal(["run", "-q", "-f", "-o", trace, "-c", program])
    assert f"copytracereads{trace}" in "".join(on_terminal(["report", trace]).split())


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    big = saved(tmp_path, "big.json", reportdata.report(reportdata.many_rows(2000)))
    with subprocess.Popen(
        [*COMMAND, "report", big], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


# --- check -----------------------------------------------------------------------------------------------------------


def check(file: Path, *arguments: str) -> tuple[int, str, str]:
    return called("check", file, *arguments)


def test_check_says_limit_actual_and_the_guilty_first(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.json", reportdata.report(reportdata.icechunk_read(), reportdata.clean_write()))
    status, out, err = check(file, "--max-copies", "0.5")
    assert (status, err) == (1, "")
    assert out.splitlines() == [
        "read . zarr.Array . IcechunkStore . bytes: 3.00 copies, limit 0.5",
        "  icechunk icechunk::asset_manager::async_reader_to_bytes: join 2,050 x 8.2 kB = 16.8 MB, 1.00 x, avoidable",
        "  icechunk _icechunk_python::store::PyStore::get: copy 16.8 MB, 1.00 x, avoidable",
        f"  and 1 more: copytrace report {file} --by-site",
    ]


def test_check_passes_at_the_limit_and_fails_below(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.json", reportdata.report(reportdata.icechunk_read(), reportdata.clean_write()))
    assert check(file, "--max-copies", "3") == (0, "2 paths within the limits\n", "")
    assert check(file, "--max-copies", "2.99")[0] == 1
    assert check(file, "--max-copies", "3", "--max-extra-at-peak", "2.54") == (0, "2 paths within the limits\n", "")
    status, out, _ = check(file, "--max-copies", "3", "--max-extra-at-peak", "2.53")
    assert status == 1
    assert out.splitlines()[0] == "read . zarr.Array . IcechunkStore . bytes: 2.54 x extra at peak, limit 2.53"
    assert out.splitlines()[1] == "  icechunk async_reader_to_bytes: 16.8 MB held at peak"


def test_check_compares_what_is_shown(tmp_path: Path) -> None:
    path = reportdata.zstd_read()
    for copies, status in ((2.004, 0), (2.006, 1)):
        file = saved(tmp_path, "a.json", reportdata.report(replace(path, copies=copies)))
        assert check(file, "--max-copies", "2")[0] == status


def test_check_looks_at_the_paths_that_fit(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.json", reportdata.report(reportdata.icechunk_read(), reportdata.clean_write()))
    assert check(file, "--max-copies", "0", "--path", "write*") == (0, "1 path within the limits\n", "")
    assert check(file, "--max-copies", "0", "--path", "*Icechunk*")[0] == 1
    status, out, err = check(file, "--max-copies", "9", "--path", "nothing*")
    assert (status, out) == (1, "")
    assert err == (
        "copytrace: --path nothing*: no path has such a label; there are 'read . zarr.Array . IcechunkStore . bytes', "
        "'write . zarr.Array . LocalStore . bytes'\n"
    )


def test_what_a_layer_holds_is_of_what_was_open_then(tmp_path: Path) -> None:
    one = reportdata.memory_write()
    two = dataclasses.replace(one, operations=2, payload_bytes=2 * one.payload_bytes)
    assert two.extra_at_peak == 1.0
    file = saved(tmp_path, "a.json", reportdata.report(two))
    held = ("--max-copies", "9", "--layer", "zarr", "--max-extra-at-peak")
    assert check(file, *held, "1")[0] == 0
    status, out, _ = check(file, *held, "0.99")
    assert status == 1
    assert "1.00 x extra at peak by zarr, limit 0.99" in out


def test_check_counts_one_layer_or_project(tmp_path: Path) -> None:
    file = saved(tmp_path, "a.json", reportdata.report(reportdata.icechunk_read(), reportdata.zstd_read()))
    assert check(file, "--max-copies", "1", "--layer", "zarr.buffer")[0] == 0
    assert check(file, "--max-copies", "0.99", "--layer", "zarr.buffer")[0] == 1
    assert check(file, "--max-copies", "0.99", "--layer", "zarr")[0] == 1
    status, out, _ = check(file, "--max-copies", "1.5", "--layer", "icechunk")
    assert status == 1
    assert out.startswith("read . zarr.Array . IcechunkStore . bytes: 2.00 copies by icechunk, limit 1.5\n")
    assert check(file, "--max-copies", "9", "--max-extra-at-peak", "0", "--layer", "zarr")[0] == 0
    status, out, _ = check(file, "--max-copies", "9", "--max-extra-at-peak", "0.9", "--layer", "obstore")
    assert (status, out) == (0, "2 paths within the limits\n")
    status, out, _ = check(file, "--max-copies", "9", "--max-extra-at-peak", "0.8", "--layer", "obstore")
    assert status == 1
    assert "0.89 x extra at peak by obstore, limit 0.8" in out
    status, out, err = check(file, "--max-copies", "0", "--layer", "icechnuk")
    assert (status, out) == (1, "")
    assert err == (
        "copytrace: --layer icechnuk: not in this report; there are icechunk, numcodecs, obstore, python, zarr, "
        "zarr.array, zarr.buffer\n"
    )


def test_check_never_passes_for_want_of_data(tmp_path: Path) -> None:
    nothing = saved(tmp_path, "a.json", reportdata.report())
    assert check(nothing, "--max-copies", "9")[0] == 1
    empty = saved(tmp_path, "b.json", reportdata.report(reportdata.empty_write()))
    assert check(empty, "--max-copies", "9") == (1, "", "copytrace: --path *: the paths that fit moved no payload\n")
    noted = reportdata.report(reportdata.clean_write(), notes=("the run did not end",))
    file = saved(tmp_path, "d.json", noted)
    assert check(file, "--max-copies", "0") == (0, "1 path within the limits\n  the run did not end\n", "")
    blind = replace(reportdata.COVERAGE, memray=False, transfers=False, lost_transfers=2)
    file = saved(tmp_path, "c.json", reportdata.report(reportdata.clean_write(), coverage=blind))
    assert (
        check(file, "--max-copies", "0")[1] == "1 path within the limits (transfers were inferred, 2 transfers lost)\n"
    )
    status, _, err = check(file, "--max-copies", "0", "--max-extra-at-peak", "0")
    assert status == 1
    assert err == "copytrace: --max-extra-at-peak: allocations were not recorded; run without --no-memray\n"


# --- diff ------------------------------------------------------------------------------------------------------------


def test_diff_tells_what_changed_and_exits_with_0(tmp_path: Path) -> None:
    fixed = replace(reportdata.multipart_write(), steps=reportdata.multipart_write().steps[2:], copies=0.0)
    old = saved(tmp_path, "old.json", reportdata.report(reportdata.multipart_write()))
    new = saved(tmp_path, "new.json", reportdata.report(fixed))
    status, out, err = called("diff", old, new)
    assert (status, err) == (0, "")
    assert out.startswith("2 copies went (obstore) on 1 path.\n")
    assert called("diff", old, new, "--fail-on-new")[0] == 0
    assert called("diff", new, old)[0] == 0
    assert called("diff", new, old, "--fail-on-new")[0] == 1
    assert called("diff", new, old, "--format", "json")[1].startswith('{\n  "schema": "copytrace.diff/1"')
    out_file = tmp_path / "diff.md"
    assert called("diff", old, new, "--format", "markdown", "-o", out_file) == (0, "", "")
    assert "- went: " in out_file.read_text()
    assert called("diff", old, new, "-o", out_file)[0] == 1


# --- doctor and demo -------------------------------------------------------------------------------------------------


def test_doctor_tells_of_every_probe_and_site() -> None:
    status, out, err = cli("doctor")
    assert (status, err) == (0, "")
    assert out.startswith("Python 3.")
    assert "allocations: memray" in out
    assert "transfers: " in out
    assert re.search(r"^zarr \S+  attached$", out, re.MULTILINE), out
    assert re.search(r"^\d+ of \d+ probes attached\.$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80


def test_demo_shows_paths_and_leaves_nothing_behind(tmp_path: Path) -> None:
    status, out, err = cli("demo", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert (status, err) == (0, "")
    for heading in ("write  zarr.Array -> LocalStore", "read  zarr.Array <- LocalStore", "MemoryStore", "zstd"):
        assert heading in out
    assert max(map(len, out.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


def test_demo_can_be_saved_and_reported(tmp_path: Path) -> None:
    assert cli("demo", "-o", "demo.copytrace", cwd=tmp_path)[0] == 0
    status, out, _ = cli("report", "demo.copytrace", "--format", "json", cwd=tmp_path)
    assert status == 0
    schema = Path(copytrace.__file__).with_name("report.schema.json")
    Draft202012Validator(json.loads(schema.read_text())).validate(json.loads(out))
    assert cli("demo", "-o", "demo.copytrace", cwd=tmp_path)[0] == 1
    _, markdown, _ = cli("report", "demo.copytrace", "--format", "markdown", cwd=tmp_path)
    assert [token.tag for token in MarkdownIt().parse(markdown)].count("h3") >= 3 * 2 * 2


def test_demo_does_without_zarr(monkeypatch: pytest.MonkeyPatch) -> None:
    from copytrace import demo

    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    report = demo.trace().report
    nbytes = demo.SHAPE[0] * demo.SHAPE[1] * 4
    assert [(path.api, path.payload_bytes) for path in report.paths] == [
        ("transpose and serialise", nbytes),
        ("split and join", nbytes),
    ]
    assert [round(path.copied_bytes / nbytes, 5) for path in report.paths] == [1, 2]
