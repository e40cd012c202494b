"""Children of a traced process: each traced on request, one report, and no harm to the parent or to one another."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from jsonschema import Draft202012Validator

import copytrace
import reportdata
from copytrace import follow, trace, transfers
from copytrace.model import Process, Task
from copytrace.processes import distinct, merge
from copytrace.report import Report
from copytrace.reports import wording

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

keeps_marks = pytest.mark.skipif(
    transfers._extension()[0] is None, reason="without the native hook a killed process takes its last marks along"
)

SIZE = 1_000_003
HEAD = f"""
import multiprocessing, os, signal, subprocess, sys, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads, memray's own among them
import copytrace

def copies(k):
    data = bytearray({SIZE})
    with copytrace.operation("work", payload_bytes={SIZE}):
        for _ in range(k):
            bytes(data)
    return k
"""


def run(folder: Path, body: str, *arguments: str, follow: bool = True, status: int = 0) -> tuple[Report, str]:
    """The report of a script run in ``folder``, and what it printed; nothing may be left beside the trace."""
    (folder / "script.py").write_text(HEAD + dedent(body))
    options = ["-q", "-f", "-o", "out.copytrace", "--no-native", *(["--follow"] if follow else [])]
    command = [sys.executable, "-m", "copytrace", "run", *options, "script.py", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (status, ""), done.stdout
    assert not (folder / "out.copytrace.partial").exists()
    report = copytrace.load(folder / "out.copytrace").report
    Draft202012Validator(json.loads((files("copytrace") / "report.schema.json").read_text())).validate(report.to_dict())
    assert Report.from_json(report.to_json()) == report
    return report, done.stdout


def work(report: Report, most: float = 2) -> dict[str, list[tuple[int, int]]]:
    """Operations and copies of the payload in each process, by its name without the number that tells it from others
    of that name. Each held less than ``most`` copies at once.
    """
    (path,) = report.paths
    found: dict[str, list[tuple[int, int]]] = {}
    for share in path.processes:
        assert share.payload_bytes == share.operations * SIZE
        assert share.copied_bytes % SIZE == 0
        found.setdefault(share.process.split(" (")[0], []).append((share.operations, share.copied_bytes // SIZE))
        assert share.extra_at_peak_bytes < most * SIZE
    assert path.operations == sum(count for rows in found.values() for count, _ in rows)
    assert path.copied_bytes == sum(copied for rows in found.values() for _, copied in rows) * SIZE
    assert path.extra_at_peak_bytes == max(share.extra_at_peak_bytes for share in path.processes)
    return {name: sorted(rows) for name, rows in found.items()}


def statuses(report: Report) -> Mapping[str, str]:
    return {process.name: process.status for process in report.coverage.processes}


# --- how children are started ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_each_start_method(method: str, tmp_path: Path) -> None:
    body = """
    print("imported as", __name__, flush=True)
    if __name__ == "__main__":
        copies(1)
        context = multiprocessing.get_context(sys.argv[1])
        children = [context.Process(target=copies, args=(k,)) for k in (2, 3)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print([child.exitcode for child in children])
    """
    report, out = run(tmp_path, body, method)
    kind = {"fork": "Fork", "spawn": "Spawn", "forkserver": "ForkServer"}[method]
    assert work(report) == {"main": [(1, 1)], f"{kind}Process-1": [(1, 2)], f"{kind}Process-2": [(1, 3)]}
    assert set(statuses(report).values()) == {"complete"}
    assert {process.kind for process in report.coverage.processes[1:]} == {"started" if method == "spawn" else "forked"}
    plain = subprocess.run(
        [sys.executable, "script.py", method], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    for word in ("__mp_main__", "__main__", "[0, 0]"):
        assert out.count(word) == plain.stdout.count(word), "__main__ is imported as often as without"
    assert [note for note in report.coverage.notes if "moves were not recorded" not in note] == []


POOLS = """
def stay(name):
    open(name, "x").close()
    time.sleep(600)

if __name__ == "__main__":
    from concurrent.futures import ProcessPoolExecutor
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        print(sorted(pool.map(copies, [1, 2, 3, 4], chunksize=1)))
        pool.map_async(stay, ["first", "second"], chunksize=1)  # who waits for work may be told to end, and does
        while not (os.path.exists("first") and os.path.exists("second")):
            time.sleep(0.01)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        print(sorted(pool.map(copies, [5, 6, 7, 8])))
"""


@keeps_marks
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_pools(method: str, tmp_path: Path) -> None:
    """The workers of a Pool are terminated when its block ends; what they have done is there all the same."""
    report, out = run(tmp_path, POOLS, method)
    assert out == "[1, 2, 3, 4]\n[5, 6, 7, 8]\n"
    found = work(report)
    pool = [row for name, rows in found.items() if "PoolWorker" in name for row in rows]
    executor = [row for name, rows in found.items() if "PoolWorker" not in name for row in rows]
    assert [sum(column) for column in zip(*pool, strict=True)] == [4, 10]
    assert [sum(column) for column in zip(*executor, strict=True)] == [4, 26]
    for name, status in statuses(report).items():
        if name.startswith(("forked child", "python -c")):  # terminated before it had its name, or had begun
            assert status in ("cut-off", "untraced"), name
        else:
            assert status == ("cut-off" if "PoolWorker" in name else "complete"), name


def test_programs_that_start_programs(tmp_path: Path) -> None:
    """Grandchildren too; a sitecustomize that is there runs as before, and the environment is as it was in between."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('customized', __file__.rsplit('/', 1)[-1])")
    body = """
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    copies(1 + depth)
    ours = [entry for entry in sys.path if "startup" in entry]
    print("depth", depth, ours, "sitecustomize" in sys.modules, flush=True)
    if depth < 2:
        environment = {**os.environ}
        if depth == 0:
            environment["PYTHONPATH"] += os.pathsep + "site"
        subprocess.run([sys.executable, "-W", "ignore", "script.py", str(depth + 1)], check=True, env=environment)
    """
    report, out = run(tmp_path, body)
    assert work(report) == {"main": [(1, 1)], "script.py": [(1, 2), (1, 3)]}
    assert out == (
        "depth 0 [] False\ncustomized sitecustomize.py\ndepth 1 [] True\ncustomized sitecustomize.py\ndepth 2 [] True\n"
    )


@keeps_marks
def test_forks_of_forks_and_other_ends(tmp_path: Path) -> None:
    """os._exit, the end of the interpreter, an error, another program in the same process, fork in an operation."""
    body = """
    with copytrace.operation("outer", payload_bytes=0):
        first = os.fork()
        if first == 0:
            copies(1)
            second = os.fork()
            if second == 0:
                copies(2)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == 7
    if first == 0:
        sys.exit(3)
    print(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
    pid = os.fork()
    if pid == 0:
        copies(4)
        sys.stderr = open(os.devnull, "w")
        1 / 0
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    pid = os.fork()
    if pid == 0:
        copies(5)
        os.execv(sys.executable, [sys.executable, "-c", "import copytrace; print('another', flush=True)"])
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(subprocess.run(["/bin/echo", "echo"], preexec_fn=lambda: None, capture_output=True, text=True).stdout, end="")
    """
    report, out = run(tmp_path, body)
    assert out == "3\n1\nanother\n0\necho\n"
    paths = {path.label: path for path in report.paths}
    assert set(paths) == {"outer", "work"}
    assert [(share.process, share.operations) for share in paths["outer"].processes] == [("main", 1)]
    assert work(replace(report, paths=(paths["work"],))) == {"forked child": [(1, 1), (1, 2), (1, 4), (1, 5)]}
    assert sorted(statuses(report).items()) == [
        ("forked child", "complete"),
        ("forked child (2)", "complete"),
        ("forked child (3)", "complete"),
        ("forked child (4)", "cut-off"),
        ("main", "complete"),
        ("python -c", "complete"),
    ]


# --- children that die, stay, or cannot be traced --------------------------------------------------------------------


@keeps_marks
def test_a_killed_child_does_not_lose_the_others(tmp_path: Path) -> None:
    body = """
    def child(k, killed):
        copies(k)
        copies(k)
        if killed:
            with copytrace.operation("work", payload_bytes=1):
                os.kill(os.getpid(), signal.SIGKILL)
        copies(k)

    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=child, args=(k, k == 3)) for k in (2, 3, 5)]
        for one in children:
            one.start()
        for one in children:
            one.join()
        print([one.exitcode for one in children])
        copies(1)
    """
    report, out = run(tmp_path, body)
    assert out == "[0, -9, 0]\n"
    assert work(report) == {
        "main": [(1, 1)],
        "ForkProcess-1": [(3, 6)],
        "ForkProcess-2": [(2, 6)],
        "ForkProcess-3": [(3, 15)],
    }
    assert statuses(report)["ForkProcess-2"] == "cut-off"
    assert "cut-off: ForkProcess-2 (it was terminated, killed or crashed" in " ".join(report.to_text().split())


@keeps_marks
def test_forks_while_threads_run(tmp_path: Path) -> None:
    body = """
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            copies(1)
            with copytrace.session():
                pass
    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(6):
        pid = os.fork()
        if pid == 0:
            copies(3)
            os._exit(0)
        deadline = time.monotonic() + 60
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                sys.exit("a child hangs")
            time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    """
    report, _ = run(tmp_path, body)
    found = work(report, most=float("inf"))  # what is freed while captures change seems to live on
    assert found["forked child"] == [(1, 3)] * 6
    ((operations, copied),) = found["main"]
    assert operations == copied > 0
    assert set(statuses(report).values()) == {"complete"}


@pytest.mark.slow
def test_children_that_nobody_waits_for(tmp_path: Path) -> None:
    """The interpreter joins those of multiprocessing at its end, and the trace waits for that."""
    body = """
    def late(k):
        time.sleep(1)
        copies(k)
    if __name__ == "__main__":
        multiprocessing.get_context("fork").Process(target=late, args=(2,)).start()
        copies(1)
    """
    report, _ = run(tmp_path, body)
    assert work(report) == {"main": [(1, 1)], "ForkProcess-1": [(1, 2)]}
    assert set(statuses(report).values()) == {"complete"}


def test_a_child_that_begins_when_the_program_is_over(tmp_path: Path) -> None:
    body = """
    from copytrace import follow
    record = follow.record
    follow.record = lambda *arguments: (time.sleep(0.5), record(*arguments))  # nothing tells of it until then
    if __name__ == "__main__":
        multiprocessing.get_context("fork").Process(target=copies, args=(2,)).start()
        copies(1)
    """
    report, _ = run(tmp_path, body)
    assert work(report) == {"main": [(1, 1)], "ForkProcess-1": [(1, 2)]}


@keeps_marks
def test_a_child_that_goes_on(tmp_path: Path) -> None:
    body = """
    child = subprocess.Popen([sys.executable, "-W", "ignore", "child.py"], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=open("stderr", "w"))
    assert child.stdout.readline() == "done\\n"
    child.returncode = 0  # nobody waits for it
    """
    (tmp_path / "child.py").write_text(
        HEAD + "copies(2)\nprint('done', flush=True)\nsys.stdin.read()\ncopies(1)\nopen('end', 'x')"
    )
    report, _ = run(tmp_path, body)
    assert work(report) == {"child.py": [(1, 2)]}
    assert statuses(report) == {"main": "complete", "child.py": "running"}
    for _ in range(600):
        if (tmp_path / "end").exists():
            break
        time.sleep(0.05)
    assert (tmp_path / "end").exists(), "it goes on when the session is over"
    time.sleep(0.5)
    assert (tmp_path / "stderr").read_text() == ""


def test_what_cannot_be_traced_is_told(tmp_path: Path) -> None:
    """A Python for which copytrace is not installed."""
    (tmp_path / "other" / "copytrace").mkdir(parents=True)
    (tmp_path / "other" / "copytrace" / "__init__.py").write_text("raise ImportError('not for this one')")
    body = """
    copies(1)
    path = os.environ["PYTHONPATH"] + os.pathsep + "other"
    program = [sys.executable, "-c", "print('runs')"]
    print(subprocess.run(program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True))
    """
    report, out = run(tmp_path, body)
    assert "stdout='runs\\n', stderr=''" in out
    (process,) = [process for process in report.coverage.processes if process.status == "untraced"]
    assert process.reason == "copytrace cannot be imported there: not for this one"
    assert process.reason in " ".join(report.to_text(width=200).split())


@keeps_marks
def test_a_run_that_is_killed_leaves_the_traces_of_all(tmp_path: Path) -> None:
    body = """
    pid = os.fork()
    copies(2 if pid == 0 else 1)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "script.py").write_text(HEAD + dedent(body))
    command = [sys.executable, "-m", "copytrace", "run", "-q", "--no-native", "--follow", "script.py"]
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=60).returncode == -signal.SIGKILL
    report = copytrace.load(tmp_path / "script.copytrace.partial").report
    assert work(report) == {"main": [(1, 1)], "forked child": [(1, 2)]}
    assert "the run did not end" in report.coverage.notes[0]


# --- not followed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["os.waitpid(os.fork() or os._exit(0), 0)", "subprocess.run(['/bin/true'])", "None"])
def test_children_that_are_not_followed_are_noted(start: str, tmp_path: Path) -> None:
    report, _ = run(tmp_path, f"copies(1)\n{start}", follow=False)
    notes = [note for note in report.coverage.notes if "not followed" in note]
    assert len(notes) == (0 if start == "None" else 1)
    assert report.coverage.processes == report.paths[0].processes == ()


def test_a_child_that_leaves_the_block_of_its_parent(tmp_path: Path) -> None:
    """Neither ends the parent's session nor takes its files away; its own memray and session are its own."""
    script = """
    import memray
    spool = set()
    with copytrace.session(native=False) as outer:
        copies(1)
        pid = os.fork()
        if pid == 0:
            with memray.Tracker("own.bin"):
                bytes(bytearray(77_777))
            with copytrace.session(native=False) as inner:
                copies(3)
            assert inner.report.paths[0].copies == 3
    if pid == 0:
        try:
            outer.report
        except copytrace.errors.CopytraceError:
            sys.exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print([(path.operations, path.copies) for path in outer.report.paths])
    print(sorted(r.size for r in memray.FileReader("own.bin").get_allocation_records() if r.size > 70_000))
    """
    (tmp_path / "script.py").write_text(HEAD + "import copytrace.errors\n" + dedent(script))
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("5\n[(1, 1.0)]\n[77778, 77810]\n", "", 0)


def test_a_session_follows_and_puts_the_environment_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    (tmp_path / "child.py").write_text(HEAD + "copies(4)")
    before, path = dict(os.environ), list(sys.path)
    with copytrace.session(native=False, follow=True) as session:
        assert os.environ["PYTHONPATH"].endswith(f"{os.pathsep}somewhere")
        subprocess.run([sys.executable, "-W", "ignore", "child.py"], cwd=tmp_path, check=True, timeout=60)
        with copytrace.session(native=False, follow=True) as inner:
            pass
    assert dict(os.environ) == before
    assert sys.path == path
    assert work(session.report) == {"child.py": [(1, 4)]}
    assert inner.trace.parts == ()
    session.save(tmp_path / "kept.copytrace")
    assert copytrace.load(tmp_path / "kept.copytrace").report.to_dict() == session.report.to_dict()


def test_a_session_inside_one_that_does_not_follow_says_so() -> None:
    with copytrace.session(memray=False), copytrace.session(memray=False, follow=True) as inner:
        pass
    assert [note for note in inner.report.coverage.notes if "were not followed" in note]
    assert follow.VARIABLE not in os.environ


# --- one file, one report --------------------------------------------------------------------------------------------


def test_files_of_before_there_were_parts_are_read(tmp_path: Path) -> None:
    with copytrace.session(memray=False, transfers=False) as session:
        pass
    session.save(tmp_path / "new.copytrace")
    with (
        zipfile.ZipFile(tmp_path / "new.copytrace") as new,
        zipfile.ZipFile(tmp_path / "old.copytrace", "w") as old,
    ):
        for name in new.namelist():
            data = new.read(name)
            if name == "trace.json":
                header = json.loads(data)
                for key in ("process", "parts", "untraced"):
                    del header[key]
                data = json.dumps(header).encode()
            old.writestr(name, data)
    loaded = copytrace.load(tmp_path / "old.copytrace")
    assert (loaded.trace.process, loaded.trace.parts, loaded.trace.untraced) == (Process("main"), (), ())
    assert loaded.report.coverage.processes == ()


def test_a_file_that_announces_parts_it_does_not_have(tmp_path: Path) -> None:
    with copytrace.session(memray=False, transfers=False) as session:
        pass
    part = replace(session.trace, process=Process("child", "forked", "cut-off", "it was killed"))
    trace.save(replace(session.trace, parts=(part, part), untraced=(Process("x", "started"),)), tmp_path / "all")
    loaded = copytrace.load(tmp_path / "all").trace
    assert [each.process for each in loaded.parts] == [part.process] * 2
    assert loaded.untraced == (Process("x", "started"),)
    with zipfile.ZipFile(tmp_path / "all") as whole, zipfile.ZipFile(tmp_path / "less", "w") as less:
        for name in whole.namelist():
            if not name.startswith("processes/1/"):
                less.writestr(name, whole.read(name))
    with pytest.raises(copytrace.errors.CopytraceError, match="damaged copytrace trace"):
        copytrace.load(tmp_path / "less")


@pytest.mark.parametrize(
    "facts", ["", "[1]", "{}", '{"name": [1], "kind": {}, "started": "x", "first_span": 1e99, "ended": []}', "[" * 9999]
)
def test_damaged_leftovers_of_a_child(facts: str, tmp_path: Path) -> None:
    place = tmp_path / "01-2"
    place.mkdir()
    (place / "process.json").write_text(facts)
    untraced: list[Process] = []
    assert list(follow.collect(tmp_path, untraced)) == []
    (process,) = untraced
    assert process.status == "untraced"
    assert str(tmp_path) not in process.reason


def test_paths_of_processes_are_added_and_peaks_are_not() -> None:
    one = reportdata.report(reportdata.zstd_read())
    (path,) = one.paths
    higher = replace(path, extra_at_peak_bytes=path.extra_at_peak_bytes * 3, extra_at_peak=9.5)
    two = replace(one, paths=(replace(higher, label=path.label),))
    found = merge([Process("a"), Process("a", "forked")], [one, two])
    (merged,) = found.paths
    assert [process.name for process in found.coverage.processes] == ["a", "a (2)"]
    for name in ("operations", "chunks", "payload_bytes", "copied_bytes", "fetched_bytes", "flushed_bytes"):
        assert getattr(merged, name) == 2 * getattr(path, name), name
    for name in ("copies", "avoidable", "best_achievable", "read_amplification", "decode_amplification"):
        assert getattr(merged, name) == pytest.approx(getattr(path, name)), name
    assert (merged.extra_at_peak_bytes, merged.extra_at_peak) == (3 * path.extra_at_peak_bytes, 9.5)
    assert [step.bytes for step in merged.steps] == [2 * step.bytes for step in path.steps]
    assert [step.ratio for step in merged.steps] == pytest.approx([step.ratio for step in path.steps])
    assert [buffer.bytes for buffer in merged.buffers] == [2 * buffer.bytes for buffer in path.buffers]
    assert [buffer.peak_bytes for buffer in merged.buffers] == [buffer.peak_bytes for buffer in path.buffers]
    assert {(step.source, step.destination) for step in merged.steps} == {
        (step.source, step.destination) for step in path.steps
    }
    assert [(share.process, share.extra_at_peak) for share in merged.processes] == [
        ("a", path.extra_at_peak),
        ("a (2)", 9.5),
    ]
    assert {total.layer: total.bytes for total in found.layers} == {
        total.layer: 2 * total.bytes for total in one.layers
    }


def test_names_are_told_apart() -> None:
    names = [process.name for process in distinct([Process("x"), Process("y"), Process("x"), Process("x")])]
    assert names == ["x", "y", "x (2)", "x (3)"]


def test_a_child_that_begins_after_the_end_is_no_fault(tmp_path: Path) -> None:
    environment = {**os.environ, follow.VARIABLE: str(tmp_path / "gone"), "PYTHONPATH": follow._STARTUP}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print('numpy' in sys.modules, 'sitecustomize' in sys.modules)"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert time.monotonic() - started < 30
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("render", [Report.to_text, Report.to_markdown])
def test_processes_and_tasks_are_shown(render: Callable[..., str]) -> None:
    one = reportdata.report(reportdata.zstd_read())
    (path,) = one.paths
    key = "x\x1b[31m|`<script>`"
    task = Task(
        key, operations=1, payload_bytes=1000, copied_bytes=2500, peak_bytes=7_000_000, projected_bytes=6_000_000
    )
    busy = replace(one, tasks=(task,))
    lost = Process("lost", "worker", "cut-off", "it was killed")
    found = Report.from_data(
        merge([Process("first", "worker"), lost], [busy, busy], [Process("other", status="untraced")])
    )
    assert [(each.process, each.attempt) for each in found.tasks] == [("first", 1), ("lost", 2)]
    text = render(found, by="process")
    flat = " ".join(html.unescape(text.replace("\\", "")).split())
    assert "\x1b" not in text
    assert "lost (worker): cut-off, it was killed" in flat
    assert "(attempt 2)" in flat
    assert "2.50 x" in flat
    assert "7.0 MB" in flat
    assert "3 processes, complete: first" in flat
    assert "2 tasks held more than was projected" in flat
    several = " ".join(render(found).replace("\\", "").split())
    assert f"2 processes, each with a peak of its own: first {wording.size(path.extra_at_peak_bytes)}" in several
    assert render(one, by="process").count("One process.") == 1
