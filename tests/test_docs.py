"""Every command and program in the documentation is run, and what it is said to print is compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs_blocks import Block, blocks, pattern

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
RUN = [name for name, page in PAGES.items() if any(not block.why for block in blocks(page.read_text("utf-8")))]
SLOW = {"docs/tutorial.md": "makes environments with two releases of obstore"}

REASONS = {
    "it runs this test",
    "it takes minutes",
    "it needs a shell with a browser",
    "it needs a cluster",
    "tests/test_distributed.py does so with each executor",
}

VARYING = (
    (r"\d+\.\d [kM]B held at peak", "# MB held at peak"),
    (r"\d+\.\d x extra at peak", "# x extra at peak"),
    (r"(?m)(\d\.\d\d x) +\d+\.\d [kM]B$", r"\1 #"),
    (r"extra at peak \d+\.\d\d x -> \d+\.\d\d x", "extra at peak # x -> # x"),
    (r"[\d,]+\.\d [kM]B in [\d,]+ moves", "# MB in # moves"),
    (r"in \d+\.\d\ds", "in # s"),
    (r"not imported here: .*", "not imported here: #"),
    (r"(?m)^  *#? x extra at peak$", "  # x extra at peak"),
)
"""What differs: parts in flight at the peak, what imports move, times, and which probes there are."""

SHIM = """#!{python}
import os, sys
from pathlib import Path
name, arguments = Path(sys.argv[0]).name, sys.argv[1:]
if name == "pip":
    sys.exit(arguments != ["install", "copytrace"])
if name == "uv":
    arguments = [{root!r} if word == "copytrace" else word for word in arguments]
    os.environ["UV_PYTHON"] = {python!r}
    os.execv({uv!r}, ["uv", *arguments])
os.execv({python!r}, [{python!r}, *(["-m", name] if name != "python" else []), *arguments])
"""


def normal(text: str) -> str:
    for varies, stands in VARYING:
        text = re.sub(varies, stands, text)
    return text


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with the commands of the documentation, as installed here."""
    folder = tmp_path / "programs"
    folder.mkdir()
    shim = SHIM.format(python=sys.executable, root=str(ROOT), uv=shutil.which("uv") or "uv")
    for name in ("copytrace", "python", "pytest", "pip", "uv"):
        (folder / name).write_text(shim)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RUN])
def test_a_page_does_what_it_says(name: str, programs: Path, tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))}
    variables |= {"PATH": f"{programs}{os.pathsep}{variables['PATH']}", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "docs_blocks.py"), str(PAGES[name])],
        cwd=place,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    printed = json.loads(done.stdout.rpartition("\0")[2])
    for block, out in zip(blocks(PAGES[name].read_text("utf-8")), printed, strict=True):
        if block.prints is not None:
            wanted, got = pattern(normal(block.prints)), normal(out)
            assert re.search(wanted, got if got.endswith("\n") else f"{got}\n"), f"{block.code}\nprinted\n{out}"


def test_what_is_not_run_says_why() -> None:
    left_out = [block for page in PAGES.values() for block in blocks(page.read_text("utf-8")) if block.why]
    assert {block.why for block in left_out} == REASONS


def test_blocks_of_a_page() -> None:
    page = """
```sh
a
```

```text
1
...
2
```

text

```text
not of a
```

<!-- setup:
x = 1
-->
```python title="f.py"
b
```

<!-- not run: it takes minutes -->
```sh
c
```
```toml
d
```
"""
    assert blocks(page) == [
        Block("sh", "a\n", prints="1\n...\n2\n"),
        Block("setup", "x = 1\n"),
        Block("file", "b\n", "f.py"),
        Block("sh", "c\n", why="it takes minutes"),
    ]
    wanted = pattern("1\n...\n2\n")
    assert [bool(re.search(wanted, text)) for text in ("1\n2\n", "1\nx\ny\n2 \n", "1\n", "1\n2\n3\n", "01\n2\n")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_pages_lead_to_each_other() -> None:
    """Every link to a file leads to one; ``mkdocs build --strict`` says the same of the site's pages."""
    for name, page in PAGES.items():
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{name}: {target}"
