"""Spans made by the extension and in Python are the same."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copytrace import spans
from copytrace.extents import extents
from copytrace.model import SiteInfo
from copytrace.recorder import native, recorder, thread_state
from copytrace.spans import Plan
from spooled import recording

HERE = Path(__file__).parent
needs_extension = pytest.mark.skipif(native is None, reason="the extension is not built: everything else ran in Python")

BLOCKED = "import sys; sys.modules['copytrace._spans'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"


@needs_extension
def test_all_about_calls_holds_without_the_extension() -> None:
    files = [str(HERE / name) for name in ("test_probes_calls.py", "test_probes_python.py", "test_recorder.py")]
    command = [sys.executable, "-c", BLOCKED, "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " skipped" not in done.stdout


@needs_extension
@pytest.mark.parametrize(
    "value",
    [
        b"x" * 1009,
        bytearray(1009),
        memoryview(b"abc")[::2],
        np.zeros((3, 5)),
        np.zeros((3, 5), order="F"),
        np.zeros((6, 5))[::-2, 1:3],
        np.broadcast_to(np.zeros(4), (7, 4)),
        np.zeros(3, "M8[ns]"),
        np.zeros(3, "O"),
        np.zeros(3, [("a", "i4"), ("b", "U3")]),
        np.array(3.0),
        np.empty((0, 4)),
        [b"a" * 10, np.zeros(3), None],
        None,
        "text",
    ],
)
def test_extension_sees_the_same_extents(tmp_path: Path, value: Any) -> None:
    with recording(tmp_path, attached=False):
        recorder.see(7, 2, value)
        recorder._see(7, 2, value)
        rows = bytes(recorder.seen)
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]
    assert len(rows) == 2 * 34 * len(extents(value))


@needs_extension
@pytest.mark.skipif(sys.platform != "linux", reason="memray's stream of allocations is read")
def test_to_see_an_array_allocates_nothing(tmp_path: Path) -> None:
    """Each block would be one whose native stack memray takes."""
    program = """
    import sys, memray, numpy as np
    from pathlib import Path
    from copytrace.recorder import native
    native.set_mark(lambda span: 0)
    arrays = [np.zeros((6, 5))[::-2, 1:3], np.zeros(7), np.array(3.0)]
    with memray.Tracker(sys.argv[1]):
        for _ in range(1000):
            for array in arrays:
                native.see(7, 0, array)
    print(memray.FileReader(sys.argv[1]).metadata.total_allocations)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "seen.bin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300


@needs_extension
def test_extension_refuses_what_is_no_plan(tmp_path: Path) -> None:
    assert native is not None
    with recording(tmp_path, attached=False):
        for plan in (("too", "short"), [1], None):
            with pytest.raises(TypeError, match="a Plan, a tuple and a dict are needed"):
                native.enter(plan, (), {})
            with pytest.raises(TypeError, match="a Plan, a tuple and a dict are needed"):
                native.begin(plan, (), {})
        with pytest.raises(TypeError):
            native.enter(Plan("p", 0), ())
        with pytest.raises(TypeError):
            native.see(1, 2)
        with pytest.raises(TypeError):
            native.Span()
        assert thread_state().current == 0


@pytest.mark.parametrize("entered", ["enter", "begin"])
def test_not_recording_there_is_no_span(entered: str) -> None:
    assert getattr(spans, entered)(Plan("p", 0), (), {}) is None


def test_span_knows_whether_it_runs(tmp_path: Path) -> None:
    with recording(tmp_path, attached=False):
        site = recorder.site(SiteInfo("p", "", "context"))
        unstarted = spans.Unstarted(Plan("p", site), iter([]), (), {})
        _, span = unstarted.start()
        assert (span.running, span.done) == (True, False)
        span.finish(False)
        assert (span.running, span.done) == (False, True)


def test_every_thread_has_its_own_state() -> None:
    states: list[Any] = []

    def look() -> None:
        states.append(thread_state())
        assert thread_state() is states[-1]
        assert states[-1].ident == threading.get_ident()

    started = [threading.Thread(target=look) for _ in range(3)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    look()
    assert len({id(state) for state in states}) == 4


plain = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=260)


@needs_extension
@given(st.text(max_size=12) | plain, st.sampled_from(["LocalStore", 'a "store"', "é"]) | plain)
def test_a_request_is_described_as_in_python_or_not_at_all(key: str, store: str) -> None:
    rows = bytearray(b"{}\n")
    assert native is not None
    added = native.request(rows, key, store)
    line = json.dumps({"key": key, "store": store}) + "\n"
    assert rows == b"{}\n" + (line.encode() if added else b"")
    easy = json.dumps(key)[1:-1] == key and json.dumps(store)[1:-1] == store
    assert added == easy or len(line) > 480
