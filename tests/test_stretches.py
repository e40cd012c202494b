"""A long trace in stretches says what the whole says, and no more than one of them is in memory."""

from __future__ import annotations

import gc
import json
import os
import zipfile
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import copytrace
from copytrace import export, stretches, trace
from copytrace.cli import main
from copytrace.errors import CopytraceError
from copytrace.model import SEEN_DTYPE, SPAN_DTYPE
from copytrace.pending import Spooled
from copytrace.processes import own_of_each
from copytrace.spool import Lines, Table
from copytrace.trace import LoadedTrace, Stored
from stretched import DATA, PROGRAMS, memory, recorded, resolve_all
from test_processes import SIZE, run, work

if TYPE_CHECKING:
    from pathlib import Path

    from copytrace.model import Trace
    from copytrace.report import Report

OUT = "out.copytrace"
OPTIONS: dict[str, dict[str, Any]] = {"all": {}, "no hook": {"transfers": False}, "no memray": {"memray": False}}


def told(report: Report) -> Any:
    """All that a report says but the course of one operation, of which a stretch has what lies in it."""
    data = json.loads(report.to_json())
    for path in data["paths"]:
        path["timeline"] = path["timeline"] and path["timeline"]["payload_bytes"]
        for step in path["steps"]:
            step["held_ms"] = step["held_ms"] is not None
    return data


def report_of(what: Trace) -> Report:
    return LoadedTrace(what).report


# --- the same report -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_stretches_say_what_the_whole_says(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = recorded(PROGRAMS[name], tmp_path, 30, monkeypatch, **options)
    assert len(read.parts.parts) >= 4
    whole, parts = told(report_of(read.whole)), told(report_of(read.parts))
    assert whole["paths"]
    assert parts == whole


def test_the_smallest_stretches_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = recorded(PROGRAMS["cache"], tmp_path, 1, monkeypatch)
    operations = sum(path.operations for path in report_of(read.whole).paths)
    assert len(read.parts.parts) + 1 >= operations == 21
    assert told(report_of(read.parts)) == told(report_of(read.whole))


def test_what_earlier_stretches_hold_counts_at_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("memray")
    read = recorded(PROGRAMS["cache"], tmp_path, 1, monkeypatch)
    (path,) = (path for path in report_of(read.parts).paths if path.direction == "read")
    (kept,) = (step for step in path.steps if step.site.function.endswith("Keeps.get") and step.kind == "copy")
    assert (kept.count, kept.bytes, kept.at_peak_bytes) == (10, DATA.nbytes, DATA.nbytes)
    assert DATA.nbytes <= path.extra_at_peak_bytes < 1.5 * DATA.nbytes


def test_stretches_share_out_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = recorded(memory, tmp_path, 30, monkeypatch)
    parts = [replace(read.parts, parts=()), *read.parts.parts]
    for table in ("spans", "seen"):
        joined = np.concatenate([getattr(part, table) for part in parts])
        assert len(joined) == len(getattr(read.whole, table)) > 100
    assert sum(len(part.transfers.rows) for part in parts) == len(read.whole.transfers.rows)
    for part, after in pairwise(parts):
        assert part.spans["exit"].max() < after.spans["enter"].min()
        assert len(part.spans) >= 30
        assert (after.continued, after.probes, after.notes) == (True, (), ())
    for part in parts:
        assert set(np.unique(part.spans["site"])) == set(range(len(part.sites)))
        assert set(np.unique(part.spans["attributes"])) == set(range(len(part.attributes)))


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> copytrace.Session:
    resolve_all(monkeypatch)
    monkeypatch.setattr(stretches, "LEAST", 30)
    with copytrace.session("long") as session:
        memory(tmp_path)
    return session


def test_a_long_trace_is_in_a_file_of_its_own_that_goes_with_it(long_session: copytrace.Session) -> None:
    parts = long_session.trace.parts
    assert isinstance(parts, Stored)
    assert [part.continued for part in parts] == [True] * len(parts)
    assert np.array_equal(parts[-1].spans, parts[len(parts) - 1].spans)
    assert len(parts[1:3]) == 2
    with pytest.raises(IndexError):
        parts[len(parts)]
    source = parts.source
    assert source.exists()
    del parts
    long_session._trace = None
    gc.collect()
    assert not source.exists()


def test_a_forked_child_leaves_the_file(long_session: copytrace.Session) -> None:
    parts = long_session.trace.parts
    assert isinstance(parts, Stored)
    trace._remove(parts.source, os.getpid() + 1)
    assert parts.source.exists()


def test_a_long_trace_survives_files(long_session: copytrace.Session, tmp_path: Path) -> None:
    expected = told(long_session.report)
    first, second = tmp_path / "first.copytrace", tmp_path / "second.copytrace"
    long_session.save(first)
    loaded = copytrace.load(first)
    trace.save(loaded.trace, second)
    again = copytrace.load(second)
    assert len(again.trace.parts) == len(loaded.trace.parts) == len(long_session.trace.parts) >= 4
    assert told(loaded.report) == told(again.report) == expected
    with pytest.raises(CopytraceError, match="the file exists"):
        long_session.save(first)
    names = zipfile.ZipFile(first).namelist()
    assert len(names) == len(set(names))
    spans = json.loads(export.chrome_trace(loaded.trace))["traceEvents"]
    assert sum(event["ph"] == "X" for event in spans) == long_session.report.spans


def test_what_a_killed_run_left_is_read_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = recorded(memory, tmp_path, 30, monkeypatch)
    found = copytrace.load(read.spool)
    assert isinstance(found.trace.parts, Stored)
    assert [path.copied_bytes for path in found.report.paths] == [
        path.copied_bytes for path in report_of(read.whole).paths
    ]
    assert any("did not end" in note for note in found.report.coverage.notes)


def _changed(source: Path, target: Path, member: str, change: Any) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name != member:
                new.writestr(name, data)
            elif (changed := change(data)) is not None:
                new.writestr(name, changed)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-3],
        lambda data: data.replace(b"'<u8'", b"'<i2'", 1),
        lambda _: b"",
        lambda _: None,
    ],
    ids=["cut short", "another type", "empty", "missing"],
)
def test_a_damaged_part_is_told_when_it_is_read(
    long_session: copytrace.Session, change: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole.copytrace", tmp_path / "broken.copytrace"
    long_session.save(whole)
    _changed(whole, broken, "processes/2/spans/enter.npy", change)
    loaded = copytrace.load(broken)
    assert len(loaded.trace.parts[1].spans)
    for read in (lambda: loaded.report, lambda: loaded.trace.parts[2], lambda: list(loaded.trace.parts)):
        with pytest.raises(CopytraceError, match=rf"^{broken}: damaged copytrace trace .*$"):
            read()
    with pytest.raises(SystemExit) as ended:
        main(["report", str(broken)])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"copytrace: {broken}: damaged copytrace trace (")


def test_a_part_that_is_not_there_is_told_at_once(long_session: copytrace.Session, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.copytrace", tmp_path / "broken.copytrace"
    long_session.save(whole)
    _changed(whole, broken, "processes/2/trace.json", lambda _: None)
    with pytest.raises(CopytraceError, match=rf"^{broken}: damaged copytrace trace .*$"):
        copytrace.load(broken)


def test_processes_have_stretches_of_their_own(long_session: copytrace.Session) -> None:
    first = replace(long_session.trace, parts=())
    rest = list(long_session.trace.parts)
    child = [replace(part, process=replace(part.process, name="child", kind="forked")) for part in (first, *rest)]
    both = replace(first, parts=(*rest, *child))
    assert [[part.continued for part in own] for own in own_of_each(both)] == [[False] + [True] * len(rest)] * 2
    alone, found = long_session.report, report_of(both)
    assert [process.name for process in found.coverage.processes] == ["main", "child"]
    for one, two in zip(alone.paths, found.paths, strict=True):
        assert two.copied_bytes == 2 * one.copied_bytes
        assert [(share.operations, share.copied_bytes) for share in two.processes] == [
            (one.operations, one.copied_bytes)
        ] * 2


CHILDREN = """
from copytrace import stretches
stretches.LEAST = 3

def several(k):
    for _ in range(k):
        copies(2)

if __name__ == "__main__":
    several(5)
    child = multiprocessing.get_context("fork").Process(target=several, args=(4,), name="child")
    child.start()
    child.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_followed_process_has_stretches(tmp_path: Path) -> None:
    report, _ = run(tmp_path, CHILDREN)
    assert work(report) == {"main": [(5, 10)], "child": [(4, 8)]}
    own, childs = ([part.continued for part in each] for each in own_of_each(copytrace.load(tmp_path / OUT).trace))
    assert own == [False, True, True, True, True]
    assert childs == [False, True, True, True]
    assert report.coverage.processes[1].kind == "forked"


def test_a_run_has_stretches(tmp_path: Path) -> None:
    report, _ = run(tmp_path, CHILDREN.partition("    child =")[0], follow=False)
    (path,) = report.paths
    assert (path.operations, path.copied_bytes, path.processes) == (5, 10 * SIZE, ())
    assert report.spans == 15
    assert report.coverage.processes == ()
    assert len(copytrace.load(tmp_path / OUT).trace.parts) == 4


# --- where it is cut -------------------------------------------------------------------------------------------------


def _spans(intervals: list[tuple[int, int]]) -> Any:
    spans = np.zeros(len(intervals), SPAN_DTYPE)
    spans["enter"], spans["exit"] = np.array(intervals, "u8").reshape(-1, 2).T
    return spans


@st.composite
def closed_spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Spans of several threads, in about the order in which they closed; no two marks are one."""
    count = draw(st.integers(1, 60))
    marks = draw(st.permutations(range(1, 2 * count + 1)))
    reach = draw(st.sampled_from([2, 6, 2 * count]))
    left, spans = sorted(marks), []
    while left:
        enter = left.pop(0)
        spans.append((enter, left.pop(draw(st.integers(0, min(reach, len(left)) - 1)))))
    spans.sort(key=lambda span: span[1])
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(spans) - 1))
        spans.insert(draw(st.integers(0, len(spans) - 1)), spans.pop(place))
    return spans


@given(closed_spans(), st.integers(1, 20), st.integers(1, 70))
@settings(max_examples=300)
def test_no_span_is_open_where_a_trace_is_cut(spans: list[tuple[int, int]], least: int, block: int) -> None:
    table = _spans(spans)
    cuts = stretches.begins((table[start : start + block] for start in range(0, len(table), block)), least)
    assert cuts == sorted(set(cuts))
    for cut in cuts:
        assert not [span for span in spans if span[0] < cut <= span[1]]
    enters = np.sort(table["enter"])
    counts = np.diff(np.searchsorted(enters, [0, *cuts, 1 << 62]))
    assert sum(counts) == len(spans)
    assert not cuts or min(counts) >= least
    if least == 1:
        assert cuts == sorted(enter for enter, _ in spans if not any(a < enter <= b for a, b in spans))[1:]


def test_nothing_is_cut_where_there_is_nothing() -> None:
    assert stretches.begins([], 1) == []
    assert stretches.begins([_spans([])], 1) == []
    assert stretches.begins([_spans([(1, 100)] + [(n, n + 1) for n in range(2, 90, 3)])], 1) == []


# --- reading a part at a time ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300), max_size=80), st.integers(0, 300), st.integers(0, 300), st.integers(1, 9))
def test_rows_are_found_by_a_column(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], first: int, until: int, rows: int
) -> None:
    spool = tmp_path_factory.mktemp("spool")
    table = np.zeros(len(keys), SEEN_DTYPE)
    table["span"], table["nbytes"] = keys, range(len(keys))
    (spool / "seen.bin").write_bytes(table.tobytes() + b"cut off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("copytrace.spool._ROWS", rows)
        read = Table(Spooled(spool, 1, "seen.bin"), SEEN_DTYPE, "span")
        assert np.array_equal(np.concatenate([table[:0], *read.blocks()]), table)
        assert np.array_equal(read.between(first, until), table[(table["span"] >= first) & (table["span"] < until)])


@given(st.lists(st.text(max_size=6), max_size=40), st.sets(st.integers(0, 39)), st.integers(1, 7), st.integers(1, 50))
def test_lines_are_found_by_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], numbers: set[int], lines: int, nbytes: int
) -> None:
    spool = tmp_path_factory.mktemp("spool")
    written = [{"key": text} for text in texts]
    (spool / "attributes.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in written) + '{"cut')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("copytrace.spool._LINES", lines)
        patch.setattr("copytrace.spool._BYTES", nbytes)
        read = Lines(Spooled(spool, 2, "attributes.jsonl"))
        chosen = sorted(number for number in numbers if number < len(texts))
        assert read.count == len(texts)
        assert read.chosen(chosen) == [written[number] for number in chosen]
