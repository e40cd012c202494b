"""A pytest plugin that runs a whole suite in one session and writes every outcome, for ``peers.py``.

``COPYTRACE_PEERS`` is the file for the outcomes; with ``COPYTRACE_PEERS_SESSION=1`` there is a session.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import copytrace

outcomes: dict[str, str] = {}
session = copytrace.session("peers", native=False) if os.environ.get("COPYTRACE_PEERS_SESSION") == "1" else None


def pytest_sessionstart() -> None:
    if session is not None:
        session.__enter__()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        expected = hasattr(report, "wasxfail")
        outcomes[report.nodeid] = f"{'x' if expected else ''}{report.outcome} in {report.when}"


def pytest_sessionfinish() -> None:
    operations, swallowed = 0, []
    if session is not None:
        session.__exit__(None, None, None)
        found = session.report
        operations = sum(path.operations for path in found.paths)
        swallowed = [note for note in (*found.coverage.notes, *found.notes) if "swallowed" in note]
    told = {"outcomes": outcomes, "operations": operations, "swallowed": swallowed}
    Path(os.environ["COPYTRACE_PEERS"]).write_text(json.dumps(told))
