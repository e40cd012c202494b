"""Files and names that are made to harm: nothing is run, overwritten or without end. ``fuzz.py`` tries more of them."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import MemoryStore, WrapperStore

import copytrace
import fuzz
from copytrace.report import Report
from copytrace.reports import diff
from oracle.stores import is_chunk, raw_array
from test_reports import OURS, page_of

NAMES = sorted(fuzz.seeds())
CRAFTED = fuzz.crafted()
EXAMPLES = int(os.environ.get("COPYTRACE_EXAMPLES", "25"))
"""How many changes of each file are tried; give more for a thorough run."""


@cache
def originals() -> dict[str, Report]:
    with tempfile.TemporaryDirectory() as directory:
        return fuzz.load_all(Path(directory))


def test_the_corpus_is_read_whole() -> None:
    names = {"whole.copytrace", "whole_without_memray.copytrace", "stretches.copytrace", "whole.partial", "whole.json"}
    assert set(originals()) == names
    for report in originals().values():
        assert {path.direction for path in report.paths} >= {"write", "read"}
        assert sum(path.payload_bytes for path in report.paths) == 3 * 20_011


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=EXAMPLES, derandomize=EXAMPLES == 25, suppress_health_check=list(HealthCheck))
def test_a_changed_file_is_refused_or_read(name: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"input{Path(name).suffix}"
        fuzz.write(fuzz.change(name, fuzz.seeds()[name], random.Random(seed)), path)
        before = sorted(Path(directory).rglob("*"))
        assert fuzz.examine(path, originals()[name]) in ("refused", "read")
        assert sorted(Path(directory).rglob("*")) == before


@pytest.mark.parametrize("name", list(CRAFTED))
def test_a_crafted_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(CRAFTED[name]())
    assert fuzz.examine(path, originals()["whole.copytrace"]) == "refused"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("what", ["run a program", "write a file", "run a text", "take too long"])
def test_the_guard_sees_what_it_must(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 1)

    def misbehave() -> None:
        if what == "run a program":
            import subprocess

            subprocess.run(["true"], check=False)
        elif what == "write a file":
            (tmp_path / "file").write_text("x")
        elif what == "run a text":
            exec("1 + 1")
        else:
            while True:
                pass

    with pytest.raises(fuzz.MisdeedError), fuzz.guarded():
        misbehave()
    assert list(tmp_path.iterdir()) == []


# --- names -----------------------------------------------------------------------------------------------------------

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>|`b`\n# c\r\x1b[31m\u202e](javascript:alert(3))&amp;'\""


@pytest.fixture(scope="module")
def hostile() -> Report:
    """The report of real operations, stores, functions and files with a hostile name."""
    size = 60_013
    source = np.random.default_rng(2).integers(1, 255, size, dtype="u1")
    program = "def copies(value):\n    return bytes(memoryview(value))\n"
    space: dict[str, Any] = {}
    exec(compile(program, f"/somewhere/{EVIL.replace('/', '_')}.py", "exec"), space)
    copies = space["copies"]
    copies.__code__ = copies.__code__.replace(co_name=EVIL, co_qualname=EVIL)

    async def put(self: Any, key: str, value: Any) -> None:
        if is_chunk(key):
            value = type(value).from_bytes(copies(value.as_numpy_array()))
        await asyncio.sleep(0)
        await self._store.set(key, value)

    kind = type(EVIL, (WrapperStore,), {"set": put, "__module__": EVIL})
    array = raw_array(kind(MemoryStore()), size)
    with copytrace.session(EVIL) as session:
        array[:] = source
        with copytrace.operation(EVIL, payload_bytes=size):
            copies(source)
    report = session.report
    assert {path.copied_bytes for path in report.paths} >= {size}
    assert "alert(1)" in report.to_json()
    return report


class Elements(HTMLParser):
    """Names of the elements of a page, and of attributes that run something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.handlers += [value for name, value in attrs if name in ("href", "src") and "javascript:" in str(value)]  # type: ignore[misc]


@pytest.mark.parametrize("by", ["path", "layer", "site"])
def test_a_terminal_is_not_driven_by_names(hostile: Report, by: str) -> None:
    text = hostile.to_text(by=by, width=100)  # type: ignore[arg-type]
    assert not set(text) & {"\x1b", "\r", "\u202e"}
    assert not [line for line in text.splitlines() if line.startswith("# c")]


@pytest.mark.parametrize("by", ["path", "layer", "site"])
def test_markdown_holds_no_elements_of_names(hostile: Report, by: str) -> None:
    page = page_of(hostile.to_markdown(by=by))  # type: ignore[arg-type]
    assert set(page.elements) <= OURS
    assert "h1" not in page.elements


def test_a_page_holds_no_elements_of_names(hostile: Report) -> None:
    page = Elements()
    page.feed(hostile.to_html())
    assert page.names.count("script") == 1
    assert "img" not in page.names
    assert page.handlers == []


def test_a_comparison_holds_no_elements_of_names(hostile: Report) -> None:
    nothing = Report.from_data(replace(hostile, paths=(), layers=()))
    for found in (diff.compare(nothing, hostile), diff.compare(hostile, nothing)):
        assert not set(diff.to_text(found)) & {"\x1b", "\r", "\u202e"}
        assert set(page_of(diff.to_markdown(found)).elements) <= OURS
