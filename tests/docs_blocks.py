"""The blocks of a Markdown page: what is to be run, and what it is said to print.

A ``sh`` block is run by bash, a ``python`` block by the interpreter of its page, in order and in one directory. A block
with ``title="name"`` is a file of that name. A ``text`` block after one that was run is what it printed; a line ``...``
there stands for any lines. A comment ``<!-- setup: code -->`` is run and not shown; ``<!-- not run: why -->`` before a
block leaves it out.

As a program: ``python docs_blocks.py PAGE`` runs a page in the working directory and prints what each block printed, as
JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PARTS = re.compile(
    r"^```(?P<kind>\w+)(?P<info>[^\n]*)\n(?P<code>.*?)^```$"
    r"|^<!-- setup:\s*(?P<setup>.*?)-->$|^<!-- not run: (?P<why>[^\n]*) -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    """One block: ``kind`` is sh, python, file or setup; ``prints`` is what it is said to print, None for nothing."""

    kind: str
    code: str
    name: str = ""
    prints: str | None = None
    why: str = ""


def blocks(text: str) -> list[Block]:
    """The blocks of a page, those that are left out with their reason."""
    found: list[Block] = []
    why = ""
    last: Block | None = None
    end = 0
    for part in _PARTS.finditer(text):
        near = not text[end : part.start()].strip()
        if part["why"]:
            why = part["why"]
        elif part["setup"]:
            found.append(Block("setup", part["setup"]))
        elif part["kind"] == "text":
            if last is not None and near and not last.why and last.kind in ("sh", "python"):
                last.prints = part["code"]
            last = None
        else:
            title = re.search(r'title="([^"]+)"', part["info"])
            kind = "file" if title else part["kind"]
            last = Block(kind, part["code"], title[1] if title else "", why=why)
            why = ""
            if kind in ("file", "sh", "python"):
                found.append(last)
        end = part.end()
    return found


def run(page: Path) -> list[str]:
    """Run the blocks of a page in the working directory; what each printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for block in blocks(page.read_text("utf-8")):
        out = ""
        if block.why:
            pass
        elif block.kind == "file":
            Path(block.name).parent.mkdir(parents=True, exist_ok=True)
            Path(block.name).write_text(block.code, "utf-8")
        elif block.kind == "sh":
            done = subprocess.run(
                ["bash", "-ec", block.code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            out = done.stdout
            assert done.returncode == 0, f"{block.code}\n{out}"
        else:
            stream = io.StringIO()
            code = compile(block.code, f"{page.name}: {block.code.splitlines()[0]}", "exec")
            with contextlib.redirect_stdout(stream):
                exec(code, names)
            out = stream.getvalue()
        printed.append(out)
    return printed


def pattern(prints: str) -> str:
    """A regular expression for what a page says is printed; trailing blanks do not count."""
    lines = [line.rstrip() for line in prints.strip("\n").split("\n")]
    made = "".join(r"(?:[^\n]*\n)*?" if line.strip() == "..." else re.escape(line) + r"[ \t]*\n" for line in lines)
    return rf"\A{made}\Z"


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    print("\0" + json.dumps(run(Path(sys.argv[1]))))
