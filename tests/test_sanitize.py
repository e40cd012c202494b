"""The recorder under AddressSanitizer and UndefinedBehaviorSanitizer; ``sanitize/run.py`` runs others by command."""

from __future__ import annotations

import platform
import re

import pytest

from sanitize.run import available, run

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the recorder is for Linux on x86-64 and aarch64",
)


@pytest.mark.skipif(not available("address"), reason="the C compiler has no AddressSanitizer")
def test_address_and_undefined_behaviour() -> None:
    done = run("address", 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    sessions, moves, loads, forks = map(int, re.findall(r"\d+", done.stdout))
    assert min(sessions, moves, loads, forks) > 0
