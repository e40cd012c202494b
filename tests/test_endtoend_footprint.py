"""What a session itself takes of memory, and that none of it is on a path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("hosts") / "footprint.py"
MOST = 64 << 20


def measured(tmp_path: Path, chunk: int, native: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(chunk), native, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc")
@pytest.mark.parametrize("native", ["native", "python"])
@pytest.mark.parametrize("chunk", [25_000_000, 16_384], ids=["one chunk", "1,526 chunks"])
def test_a_session_takes_little_of_memory_and_none_of_it_is_on_a_path(tmp_path: Path, chunk: int, native: str) -> None:
    found = measured(tmp_path, chunk, native)
    marks = found["marks"]
    assert marks["inside"] - marks["alone"] <= MOST
    assert max(marks["left"], marks["reported"]) - marks["after inside"] <= MOST
    assert found["own"] == []
    edge = 2 * 4 * chunk if 25_000_000 % chunk else 0
    assert 100_000_000 <= found["copied"] <= 100_000_000 + edge
