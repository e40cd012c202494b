"""``copytrace run`` beside plain ``python``: the program must not see a difference, and what was recorded is kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest

import copytrace
from copytrace.runner import Program

PLAIN = [sys.executable]
COMMAND = [sys.executable, "-m", "copytrace", "run"]
TRACED = [*COMMAND, "-q", "-f", "-o", "out.copytrace"]
FAST = ["-q", "--no-memray", "--no-transfers"]
LEAN = [*TRACED, *FAST]
"""Starts and ends faster; for what does not depend on the recorders."""


def start(command: list[str], folder: Path, **options) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, **pipes, **options)


def run(command: list[str], folder: Path, stdin: str = "") -> tuple[int, str, str]:
    with start(command, folder) as process:
        out, err = process.communicate(stdin, timeout=120)
        return process.returncode, out, err


def assert_same(arguments: list[str], folder: Path, stdin: str = "", traced: list[str] = LEAN) -> tuple[int, str, str]:
    """Both ways of running give the same status and the same output; it is returned."""
    with start([*PLAIN, *arguments], folder) as one, start([*traced, *arguments], folder) as two:
        (out, err), (out_again, err_again) = (process.communicate(stdin, timeout=120) for process in (one, two))
    err = re.sub(r'  File "<frozen runpy>", .*\n', "", err)
    times = re.compile(r"Previous line repeated \d+ more times")
    assert (two.returncode, out_again, times.sub("", err_again)) == (one.returncode, out, times.sub("", err))
    return one.returncode, out, err


def write(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(text))
    return name


# --- the same status, the same output --------------------------------------------------------------------------------

ENDINGS = {
    "nothing": ("x = 1", 0),
    "exit": ("import sys; sys.exit()", 0),
    "exit 3": ("import sys; sys.exit(3)", 3),
    "exit 263": ("import sys; sys.exit(263)", 7),
    "exit text": ("import sys; print('out'); sys.exit('a text')", 1),
    "exit tuple": ("raise SystemExit((1, 2))", 1),
    "raise": ("def f():\n    raise ValueError('a\\nb')\nf()", 1),
    "chain": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e", 1),
    "group": ("raise ExceptionGroup('g', [ValueError(1), TypeError(2)])", 1),
    "own class": ("class Odd(BaseException):\n    pass\nraise Odd('x')", 1),
    "syntax": ("x = (", 1),
    "deep": ("def f(n): return f(n + 1)\nf(0)", 1),
    "interrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "os exit": ("import os; os._exit(5)", 5),
    "hook": (
        "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t, v, tb.tb_lineno)\n\nraise ValueError(7)",
        1,
    ),
    "broken hook": ("import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError(7)", 1),
    "atexit": ("import atexit\natexit.register(print, 'bye')\nraise ValueError(7)", 1),
    "warning": ("import warnings\nwarnings.warn('old', DeprecationWarning)", 0),
    "thread": ("import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()", 0),
    "no copytrace error": ("from copytrace.errors import CopytraceError\nraise CopytraceError('mine')", 1),
}


FULL = {"nothing", "exit 3", "chain", "interrupt"}
"""Tried with all recorders on."""


@pytest.mark.parametrize("name", ENDINGS)
def test_endings(name: str, tmp_path: Path) -> None:
    code, status = ENDINGS[name]
    script = write(tmp_path, "script.py", code)
    got, _, err = assert_same([script], tmp_path, traced=TRACED if name in FULL else LEAN)
    assert got == status, err
    if name != "os exit":
        assert copytrace.load(tmp_path / "out.copytrace").report.paths == ()
        assert not (tmp_path / "out.copytrace.partial").exists()


SEES = """
import __main__, os, sys
def f(): pass
print(__name__, __file__, __package__, __spec__ and __spec__.name, __doc__, type(__loader__).__name__, __builtins__)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals(), __main__.f is f)
print(sorted(globals()), f.__module__, f.__globals__ is globals())
print(sys.stdin.read(), os.getcwd(), sys.excepthook is sys.__excepthook__)
"""


@pytest.mark.parametrize("where", ["script.py", "sub folder/script.py", "./no_suffix"])
def test_what_a_script_sees(where: str, tmp_path: Path) -> None:
    write(tmp_path, where, SEES)
    _, out, _ = assert_same([where, "a", "--flag", "-o", "x", "--", "-q", ""], tmp_path, "typed in")
    assert "'--flag', '-o', 'x', '--', '-q', ''" in out
    assert "typed in" in out


def test_what_a_script_behind_a_link_sees(tmp_path: Path) -> None:
    write(tmp_path, "real/script.py", "import neighbour\n" + SEES)
    write(tmp_path, "real/neighbour.py", "")
    (tmp_path / "link.py").symlink_to("real/script.py")
    assert assert_same(["link.py"], tmp_path)[0] == 0


def test_what_a_module_sees(tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/helper.py", "value = 7")
    write(tmp_path, "package/tool.py", "from .helper import value\nprint(value, __spec__.name)" + SEES)
    write(tmp_path, "package/__main__.py", "from . import helper\nprint('package', __spec__.name)" + SEES)
    write(tmp_path, "single.py", "print('single')" + SEES + "\nraise ValueError('with a traceback')")
    assert "7 package.tool" in assert_same(["-m", "package.tool", "-x", "--flag"], tmp_path)[1]
    assert "package package.__main__" in assert_same(["-m", "package", "--help"], tmp_path)[1]
    assert assert_same(["-m", "single"], tmp_path)[0] == 1


def test_what_code_sees(tmp_path: Path) -> None:
    write(tmp_path, "neighbour.py", "value = 8")
    code = "import sys, neighbour; print(sys.argv, repr(sys.path[0]), neighbour.value, sorted(globals()), __spec__)"
    assert "['-c', '-m', '--flag', '-c']" in assert_same(["-c", code, "-m", "--flag", "-c"], tmp_path)[1]
    assert assert_same(["-c", "def f():\n    1 / 0\nf()"], tmp_path)[0] == 1
    assert assert_same(["-c", "import sys; sys.exit(4)"], tmp_path)[0] == 4


def test_a_program_on_standard_input(tmp_path: Path) -> None:
    code = "import sys\nprint(sys.argv, repr(sys.path[0]), __name__)\nsys.exit(9)\n"
    assert assert_same(["-", "x"], tmp_path, code)[:2] == (9, "['-', 'x'] '' __main__\n")


def test_a_folder_and_a_zip(tmp_path: Path) -> None:
    write(tmp_path, "app/__main__.py", "import helper, sys\nprint(helper.value, sys.argv, sys.path[0], __name__)")
    write(tmp_path, "app/helper.py", "value = 6")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for name in ("__main__.py", "helper.py"):
            archive.write(tmp_path / "app" / name, name)
    assert assert_same(["app", "-x"], tmp_path)[1].startswith("6 ['app', '-x']")
    assert assert_same(["app.zip", "-x"], tmp_path)[1].startswith("6 ['app.zip', '-x']")


def test_source_encodings_and_future_imports(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('é'), __file__[-8:])".encode("latin-1"))
    assert assert_same(["latin.py"], tmp_path)[1].startswith("'\\xe9'")
    write(tmp_path, "eager.py", "def f(x: print('evaluated')): pass")
    assert assert_same(["eager.py"], tmp_path)[1] == "evaluated\n"
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    status, _, err = run([*LEAN, "bad.py"], tmp_path)
    assert status == 1
    assert "SyntaxError" in err
    assert "Traceback" not in err


def test_pickle_and_source_of_what_main_defines(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import inspect, pickle
        class Point:
            x = 1
        print(pickle.loads(pickle.dumps(Point())).x, inspect.getsource(Point))
        """,
    )
    assert "class Point" in assert_same([script], tmp_path)[1]


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_child_processes(method: str, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import multiprocessing, sys
        print("imported as", __name__, flush=True)
        def square(x):
            return x * x, "copytrace.cli" in sys.modules
        if __name__ == "__main__":
            with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
                print([x for x, _ in pool.map(square, [1, 2, 3])])
                print(any(traced for _, traced in pool.map(square, [1])))
        """,
    )
    status, out, err = run([*PLAIN, script, method], tmp_path)
    again = run([*TRACED, script, method], tmp_path)
    assert (status, err) == (0, "")
    assert again[0] == 0, again[2]
    assert again[1] == (out.replace("False", "True") if method == "fork" else out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.copytrace", "script.py"]


def test_a_forked_child_that_ends_by_itself_leaves_the_trace_alone(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")  # of threads that numpy and memray start
        for ending in (lambda: None, lambda: sys.exit(3), lambda: 1 / 0):
            pid = os.fork()
            if pid == 0:
                sys.stderr = open(os.devnull, "w")
                ending()
                sys.exit(4)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        """,
    )
    assert assert_same([script], tmp_path)[1] == "4\n3\n1\n"
    copytrace.load(tmp_path / "out.copytrace")


def test_frames_of_probes_are_not_in_tracebacks(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import sys, zarr
        class Broken(zarr.storage.MemoryStore):
            async def get(self, key, *args, **kwargs):
                if "c" in key.split("/"):
                    raise RuntimeError("broken store")
                return await super().get(key, *args, **kwargs)
        z = zarr.create_array(Broken(), shape=(4,), dtype="u1", fill_value=1)
        z[:] = 2
        z[:]
        """,
    )
    status, _, err = run([*PLAIN, script], tmp_path)
    again = run([*LEAN, script], tmp_path)
    assert status == again[0] == 1
    assert err.endswith("RuntimeError: broken store\n")
    assert re.findall(r'File "([^"]*)", line \d+, in (\S+)', again[2]) == re.findall(
        r'File "([^"]*)", line \d+, in (\S+)', err
    )


# --- signals ---------------------------------------------------------------------------------------------------------

WAITS = """
import sys, time
import copytrace
data = bytearray(100_003)
for _ in range(2_000):
    with copytrace.operation("before", payload_bytes=100_003):
        bytes(data)
print("ready", flush=True)
time.sleep(60)
"""


def wait_until_it_sleeps(pid: int) -> None:
    """The traceback of an interrupt shows where the program was."""
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "S":
        assert time.monotonic() < until
        time.sleep(0.01)


def signalled(number: int, folder: Path, traced: bool) -> tuple[int, str]:
    script = write(folder, "script.py", WAITS)
    command = [*TRACED, script] if traced else [*PLAIN, script]
    with start(["env", "--default-signal=INT", *command], folder) as process:  # a background job ignores it
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_until_it_sleeps(process.pid)
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=60)
        return process.returncode, err


def test_interrupt_keeps_its_status_and_the_trace(tmp_path: Path) -> None:
    assert signalled(signal.SIGINT, tmp_path, True) == signalled(signal.SIGINT, tmp_path, False)
    [path] = copytrace.load(tmp_path / "out.copytrace").report.paths
    assert (path.api, path.operations, path.payload_bytes) == ("before", 2_000, 2_000 * 100_003)
    assert path.copies == pytest.approx(1, abs=0.002)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_run_recorded_can_be_read(number: int, tmp_path: Path) -> None:
    assert signalled(number, tmp_path, True) == (-number, "")
    assert not (tmp_path / "out.copytrace").exists()
    [path] = copytrace.load(tmp_path / "out.copytrace.partial").report.paths
    assert path.api == "before"
    assert 1_000 < path.operations <= 2_000
    assert path.copies is not None
    assert 0.5 < path.copies < 1.002
    status, out, _ = run([sys.executable, "-m", "copytrace", "report", "out.copytrace.partial"], tmp_path)
    assert status == 0
    assert "the run did not end" in " ".join(out.split())
    status, _, err = run([sys.executable, "-m", "copytrace", "report", "out.copytrace"], tmp_path)
    assert (status, err) == (
        1,
        "copytrace: out.copytrace: no such file; the run did not end, but left out.copytrace.partial\n",
    )
    status, _, err = run([*COMMAND, "-o", "out.copytrace", "script.py"], tmp_path)
    assert status == 1
    assert err.startswith("copytrace: out.copytrace.partial is left from a run that did not end")
    script = write(tmp_path, "short.py", "print('again')")
    assert run([*LEAN, script], tmp_path) == (0, "again\n", "")


def test_a_handler_of_the_program_is_called(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import os, signal, sys
        print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(11))
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    assert assert_same([script], tmp_path)[0] == 11
    copytrace.load(tmp_path / "out.copytrace")


# --- the trace and its name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["sub/my.script.py"], "my.script.copytrace"),
        (["-c", "pass"], "code.copytrace"),
        (["-m", "sub.tool"], "sub.tool.copytrace"),
        (["-"], "stdin.copytrace"),
        (["-o", "x/y.trace", "sub/my.script.py"], "x/y.trace"),
    ],
)
def test_names_of_traces(arguments: list[str], name: str, tmp_path: Path) -> None:
    write(tmp_path, "sub/my.script.py", "print('ran')")
    write(tmp_path, "sub/tool.py", "print('ran')")
    (tmp_path / "x").mkdir()
    status, _, err = run([*COMMAND, "--no-memray", "--no-transfers", *arguments], tmp_path)
    assert status == 0, err
    assert err.splitlines()[-1] == "Next: copytrace doctor"
    copytrace.load(tmp_path / name)


def test_a_trace_is_not_overwritten_and_the_program_is_not_run(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "print('ran')")
    (tmp_path / "script.copytrace").write_text("precious")
    status, out, err = run([*COMMAND, script], tmp_path)
    assert (status, out) == (1, "")
    assert err == "copytrace: script.copytrace exists; give another name with -o, or -f to overwrite it\n"
    assert (tmp_path / "script.copytrace").read_text() == "precious"
    assert run([*COMMAND, "-f", *FAST, script], tmp_path) == (0, "ran\n", "")
    copytrace.load(tmp_path / "script.copytrace")


def test_a_trace_that_cannot_be_written_is_said_before_the_program_runs(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "print('ran')")
    status, out, err = run([*COMMAND, "-o", "nowhere/x.copytrace", script], tmp_path)
    assert (status, out) == (1, "")
    assert err == "copytrace: nowhere: no such directory; make it, or give another name with -o\n"


def test_a_trace_appears_in_the_folder_where_the_run_began(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    script = write(tmp_path, "script.py", "import os; os.chdir('other')")
    assert run([*COMMAND, *FAST, script], tmp_path) == (0, "", "")
    assert (tmp_path / "script.copytrace").exists()
    assert list((tmp_path / "other").iterdir()) == []


def test_a_trace_that_cannot_be_saved_in_the_end_changes_the_status_of_success_only(tmp_path: Path) -> None:
    for code, status in (("", 1), ("raise SystemExit(3)", 3)):
        script = write(tmp_path, "script.py", f"import os; os.mkdir('script.copytrace'); {code}")
        got, _, err = run([*COMMAND, *FAST, script], tmp_path)
        assert got == status
        assert re.fullmatch(r"copytrace: script.copytrace: .*; what was recorded is in script.copytrace.partial\n", err)
        copytrace.load(tmp_path / "script.copytrace.partial")
        run(["rm", "-r", "script.copytrace", "script.copytrace.partial"], tmp_path)


def test_a_summary_and_the_next_command(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import copytrace
        data = bytearray(3_000_001)
        with copytrace.operation("hand over", payload_bytes=3_000_001):
            bytes(data)
        with copytrace.operation("hold", payload_bytes=3_000_001):
            memoryview(data)
        """,
    )
    status, out, err = run([*COMMAND, script], tmp_path)
    assert (status, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].startswith("1 of 2 paths copy more than they need; most: hand over")
    assert [line.split(":")[0] for line in lines if line.startswith("  h")] == ["  hand over", "  hold"]
    assert lines[-1] == "Next: copytrace report script.copytrace"
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Usage: copytrace run"),
        (["-m"], "Usage: copytrace run"),
        (["-m", "-c", "x"], "-m and -c exclude each other"),
        (["missing.py"], "missing.py: no such file; give a script, -m MODULE or -c CODE"),
        (["--nonsense", "x.py"], "No such option"),
        (["--min-bytes", "-1", "x.py"], "--min-bytes"),
        (["--min-bytes", "many", "x.py"], "--min-bytes"),
    ],
)
def test_misuse_exits_with_2(arguments: list[str], words: str, tmp_path: Path) -> None:
    status, out, err = run([*COMMAND, *arguments], tmp_path)
    assert (status, out) == (2, "")
    assert words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "no_such_module"], "copytrace: -m no_such_module: no module of that name\n"),
        (["-m", "no_package.module"], "copytrace: -m no_package.module: No module named 'no_package'\n"),
        (["empty"], "copytrace: empty: no __main__ module in it\n"),
    ],
)
def test_a_program_that_does_not_exist_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run([*COMMAND, *FAST, *arguments], tmp_path) == (1, "", words)


def test_options_reach_the_session(tmp_path: Path) -> None:
    code = "import copytrace; copytrace.operation"
    run([*COMMAND, "-q", "-o", "a", "--no-memray", "--no-transfers", "-c", code], tmp_path)
    run([*COMMAND, "-q", "-o", "b", "--no-native", "--min-bytes", "77", "-c", code], tmp_path)
    first, second = (copytrace.load(tmp_path / name) for name in "ab")
    assert not first.report.coverage.memray
    assert not first.report.coverage.transfers
    assert second.report.coverage.memray
    assert not second.report.coverage.native
    assert second.trace.min_bytes == 77


def test_a_program_is_kept_without_its_credentials() -> None:
    code = (
        'store = S3Store("b", access_key_id="AKIA1", secret_access_key = \'hush\', region="eu")\n'
        'options = {"token": "t0k", "key": "c/0", "url": "https://me:pw@host/x"}\n'
        'TOKEN = "abc"\n'
    )
    text = Program("code", code).text()
    for secret in ("AKIA1", "hush", "t0k", "me:pw", "abc"):
        assert secret not in text
    for kept in ('region="eu"', '"key": "c/0"', 'access_key_id="..."', "https://...@host/x"):
        assert kept in text
