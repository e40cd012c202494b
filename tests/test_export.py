"""Hand-offs to other tools: cubed's figures, Chrome traces, memray's flame graph."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import jsonschema
import numpy as np
import pytest

import copytrace
import reportdata
from copytrace import cli, export, flamegraph
from copytrace.errors import CopytraceError
from copytrace.matrix.environments import cache_directory, environment
from copytrace.model import SPAN_DTYPE, SiteInfo

if TYPE_CHECKING:
    from pathlib import Path as FilePath

    from copytrace.model import Path, Trace

PROGRAM = """
import numpy as np, zarr
data = np.ones((1009, 1013), "f4")
z = zarr.create_array("a.zarr", shape=data.shape, chunks=data.shape, dtype="f4", compressors=None)
z[:] = data
out = z[:]
"""
NBYTES = 1009 * 1013 * 4


def called(*arguments: object) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


@pytest.fixture
def kept(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> FilePath:
    """A trace with its capture, recorded in a process of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "copytrace", "run", "-q", "--keep-capture", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return tmp_path / "program.copytrace"


# --- cubed -----------------------------------------------------------------------------------------------------------


def held(path: Path, extra: float, **changes: object) -> Path:
    return replace(path, extra_at_peak=extra, **changes)


def buffer_copies(source: str) -> dict[str, tuple[int, int]]:
    """What cubed would get: the source is run with a stand-in for its class."""
    lines = source.splitlines()
    assert lines[0] == "from cubed.primitive.memory import BufferCopies"
    names: dict[str, object] = {"BufferCopies": lambda read, write: (read, write)}
    exec("\n".join(lines[1:]), names)
    found: dict[str, tuple[int, int]] = names["buffer_copies"]  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    ("extra", "copies"), [(0.0, 0), (0.05, 0), (0.06, 1), (0.69, 1), (1.04, 1), (1.06, 2), (2.0, 2)]
)
def test_extra_memory_counts_as_whole_copies(extra: float, copies: int) -> None:
    write, read = held(reportdata.multipart_write(), 0.0), held(reportdata.zstd_read(), extra)
    assert buffer_copies(export.cubed(reportdata.report(write, read))) == {"ObjectStore(LocalStore)": (copies, 0)}


def test_each_store_has_its_worst_path() -> None:
    read = reportdata.zstd_read()
    report = reportdata.report(
        held(read, 0.2),
        held(read, 2.9, label="other"),
        held(reportdata.icechunk_read(), 2.54, chunks=4),
        reportdata.memory_write(),
    )
    source = export.cubed(report)
    assert buffer_copies(source) == {"ObjectStore(LocalStore)": (3, 1), "IcechunkStore": (3, 1), "MemoryStore": (1, 1)}
    assert source.count("was recorded: 1 is what cubed assumes") == 3
    assert "# read . zarr.Array . IcechunkStore . bytes: 2.54 x the payload held at peak; its operations span" in source


@pytest.mark.slow
def test_the_real_cubed_plans_with_the_figures() -> None:
    """What cubed 0.28 projects for a task that reads and writes one chunk: the chunks, and the copies told."""
    read, write = held(reportdata.zstd_read(), 1.97), held(reportdata.multipart_write(), 0.58)
    ask = """
from cubed.primitive.memory import calculate_projected_mem
(copies,) = buffer_copies.values()
print(type(copies).__module__, calculate_projected_mem(0, [1000], 0, 1000, copies))
"""
    python = environment(("cubed==0.28.0",), cache=cache_directory(), traced=False) / "python"
    source = export.cubed(reportdata.report(read, write)) + ask
    done = subprocess.run([str(python), "-"], input=source, capture_output=True, text=True, check=True)
    assert done.stdout == f"cubed.primitive.memory {1000 * (1 + 2) + 1000 * (1 + 1)}\n"


def test_hostile_stores_stay_strings() -> None:
    source = export.cubed(reportdata.report(reportdata.hostile_read()))
    assert list(buffer_copies(source)) == [reportdata.hostile_read().store]
    assert "\x1b" not in source


def test_cubed_needs_a_peak() -> None:
    with pytest.raises(CopytraceError, match="no read or write"):
        export.cubed(reportdata.report())
    blind = reportdata.report(reportdata.zstd_read(), coverage=replace(reportdata.COVERAGE, memray=False))
    with pytest.raises(CopytraceError, match="allocations were not recorded"):
        export.cubed(blind)


# --- Chrome trace ----------------------------------------------------------------------------------------------------


def with_spans(trace: Trace, times: list[tuple[int, int, int]]) -> Trace:
    """``trace`` with spans of (thread, start, end) instead of its own."""
    spans = np.zeros(len(times), SPAN_DTYPE)
    for row, (thread, started, ended) in enumerate(times):
        spans[row]["id"], spans[row]["thread"] = row + 1, thread
        spans[row]["started"], spans[row]["ended"] = started, ended
    return replace(trace, spans=spans, sites=(SiteInfo("f", "lib", "copy"),), attributes=({"key": "k", "store": ""},))


def test_spans_of_a_lane_lie_in_each_other(kept: FilePath) -> None:
    trace = with_spans(
        copytrace.load(kept).trace,
        [(7, 5_000, 9_000), (7, 1_000, 4_000), (7, 2_000, 3_000), (7, 2_500, 6_000), (8, 1_000, 2_000)],
    )
    events = json.loads(export.chrome_trace(trace))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["ts"], event["dur"], event["tid"]) for event in spans] == [
        (0.0, 3.0, 1),
        (0.0, 1.0, 2),
        (1.0, 1.0, 1),
        (1.5, 3.5, 3),
        (4.0, 4.0, 1),
    ]
    assert spans[0]["args"] == {"key": "k"}
    assert {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"} == {
        1: "thread 1",
        2: "thread 2",
        3: "thread 1, lane 2",
    }
    assert json.loads(export.chrome_trace(with_spans(trace, [])))["traceEvents"] == []


TRACE_EVENTS = {
    "type": "object",
    "required": ["traceEvents"],
    "additionalProperties": False,
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    {
                        "required": ["name", "cat", "ph", "ts", "dur", "pid", "tid", "args"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string", "minLength": 1},
                            "cat": {"type": "string"},
                            "ph": {"const": "X"},
                            "ts": {"type": "number", "minimum": 0},
                            "dur": {"type": "number", "minimum": 0},
                            "pid": {"type": "integer"},
                            "tid": {"type": "integer"},
                            "args": {"type": "object"},
                        },
                    },
                    {
                        "required": ["name", "ph", "pid", "tid", "args"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"const": "thread_name"},
                            "ph": {"const": "M"},
                            "pid": {"type": "integer"},
                            "tid": {"type": "integer"},
                            "args": {
                                "type": "object",
                                "required": ["name"],
                                "properties": {"name": {"type": "string"}},
                            },
                        },
                    },
                ]
            },
        },
    },
}
"""The parts of the Trace Event Format that are used: complete events and names of threads, in JSON's object form."""


def strictly(text: str) -> object:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_chrome_trace_keeps_to_the_format(kept: FilePath) -> None:
    page = kept.with_name("spans.json")
    assert called("export", "--chrome-trace", kept, "-o", page) == 0
    text = page.read_text()
    jsonschema.validate(strictly(text), TRACE_EVENTS)
    events = json.loads(text)["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {
        event["tid"] for event in events if event["ph"] == "M"
    }


def test_a_real_trace_shows_its_operations(kept: FilePath, capsys: pytest.CaptureFixture[str]) -> None:
    assert called("export", "--chrome-trace", kept) == 0
    events = [event for event in json.loads(capsys.readouterr().out)["traceEvents"] if event["ph"] == "X"]
    operations = [event for event in events if event["args"].get("payload_bytes")]
    assert [event["args"]["payload_bytes"] for event in operations] == [NBYTES, NBYTES]
    assert {"zarr.Array.__setitem__", "zarr.Array.__getitem__"} <= {event["name"] for event in events}
    for lane in {event["tid"] for event in events}:
        open_ends: list[float] = []
        for event in (one for one in events if one["tid"] == lane):
            while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
                open_ends.pop()
            open_ends.append(event["ts"] + event["dur"])
            assert all(outer >= inner - 1e-3 for outer, inner in pairwise(open_ends))


# --- memray's flame graph --------------------------------------------------------------------------------------------


def test_the_flame_graph_of_a_path_holds_what_the_path_held(kept: FilePath, capsys: pytest.CaptureFixture[str]) -> None:
    trace = copytrace.load(kept).trace
    at_peak, _ = flamegraph._at_peak(trace, "read*")
    sizes = trace.allocations.size[np.isin(trace.allocations.born, at_peak.astype(np.uint64))]
    assert sorted(sizes.tolist())[-2:] == [pytest.approx(NBYTES, abs=64)] * 2
    assert int(sizes.sum()) == pytest.approx(2 * NBYTES, rel=0.02)
    assert called("flamegraph", kept, "--path", "read*") == 0
    page = kept.with_name("program.copytrace.flamegraph.html")
    assert capsys.readouterr().out == f"the flame graph is in {page}\n"
    text = page.read_text()
    assert "_get_selection" in text
    assert "set_basic_selection" not in text
    assert called("flamegraph", kept) == 1
    assert called("flamegraph", kept, "-f") == 0
    assert "copytrace" in page.read_text()
    assert called("flamegraph", kept, "--path", "nothing*", "-f") == 1
    assert "no path has such a label" in capsys.readouterr().err


def test_a_flame_graph_needs_the_capture_of_this_run(kept: FilePath, capsys: pytest.CaptureFixture[str]) -> None:
    (capture,) = flamegraph.captures(kept)
    capture.write_bytes(capture.read_bytes()[: capture.stat().st_size // 2])
    assert called("flamegraph", kept, "--path", "read*") == 1
    capture.write_bytes(b"nonsense")
    assert called("flamegraph", kept) == 1
    capture.unlink()
    assert called("flamegraph", kept) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert errors[-1].endswith("no capture; run the program with copytrace run --keep-capture")


def test_a_flame_graph_is_shown_in_the_browser(
    kept: FilePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: shown.append(url) or True)
    page = kept.with_name("graph.html")
    assert called("flamegraph", kept, "--open", "-o", page) == 0
    assert shown == [page.as_uri()]
    assert "copytrace" in page.read_text()
    assert called("flamegraph", kept, "--open", "-o", page) == 1
    assert len(shown) == 1
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    assert called("flamegraph", kept, "--open", "-f", "-o", page) == 1
    refused, unopened = capsys.readouterr().err.splitlines()
    assert refused == f"copytrace: {page} exists; give another name with -o, or -f to overwrite it"
    assert unopened.startswith("copytrace: no browser could be started; ")


def test_a_kept_capture_is_not_overwritten(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = flamegraph.directory("program.copytrace")
    folder.mkdir()
    (folder / "memray-0.bin").write_bytes(b"kept")
    assert called("run", "-q", "--keep-capture", "-o", "program.copytrace", "-c", "raise SystemExit(7)") == 1
    wanted = f"copytrace: {folder} exists; give another name with -o, or -f to overwrite it\n"
    assert capsys.readouterr().err == wanted
    assert [one.read_bytes() for one in folder.iterdir()] == [b"kept"]
    assert not (tmp_path / "program.copytrace").exists()


@pytest.mark.parametrize("arguments", [[], ["--cubed", "--chrome-trace"]])
def test_export_wants_one_form(arguments: list[str]) -> None:
    assert called("export", "x", *arguments) == 2
