"""Every test begins and ends with nothing patched, hooked or tracked; errors inside probes are errors here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator


# How long an example takes says nothing on a machine that others use, too.
settings.register_profile("copytrace", deadline=None)
settings.load_profile("copytrace")


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from copytrace.recorder import forget_thread

    monkeypatch.setenv("COPYTRACE_STRICT", "1")
    forget_thread()  # a test may have been interrupted anywhere
    _assert_clean()
    yield
    _assert_clean()


def _assert_clean() -> None:
    from copytrace import _session
    from copytrace.recorder import recorder

    assert _session._collector is None, "a session is still open"
    assert recorder.mark is None, "the recorder is still recording"
    tools = [sys.monitoring.get_tool(tool) for tool in range(6)]
    assert not [name for name in tools if name and "copytrace" in name], "a monitoring tool id is still taken"
    memray = sys.modules.get("memray")
    if memray is not None:
        assert not hasattr(memray.Tracker, "_copytrace"), "memray.Tracker is still a stand-in"
