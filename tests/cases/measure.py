"""Runs every program and prints a JSON object: ``python measure.py counter`` or ``python measure.py sessions``."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases.programs import PROGRAMS, Prepare

WAYS: dict[str, dict[str, bool]] = {
    "hook": {},
    "inferred": {"transfers": False},
    "no memray": {"memray": False},
    "inferred, no native stacks": {"transfers": False, "native": False},
}


def count(prepare: Prepare) -> dict[str, int]:
    from oracle.counter import counted

    with tempfile.TemporaryDirectory() as directory:
        run = prepare(Path(directory))
        with tempfile.TemporaryDirectory() as other:
            found = counted(run, Path(other) / "counted.tsv")
    return dict(found)


def trace(prepare: Prepare) -> dict[str, Any]:
    import copytrace
    from copytrace.model import COPY_KINDS

    told: dict[str, Any] = {}
    for way, options in WAYS.items():
        with tempfile.TemporaryDirectory() as directory:
            run = prepare(Path(directory))
            with copytrace.session(**options) as session:
                run()
        report = session.report
        steps = [step for path in report.paths for step in path.steps]
        told[way] = {
            "copied": sum(path.copied_bytes for path in report.paths),
            "payload": sum(path.payload_bytes for path in report.paths),
            "unattributed": report.coverage.unattributed_bytes,
            "explained": report.coverage.explained,
            "by_kind": {
                kind: sum(step.bytes for step in steps if step.kind == kind) for kind in {step.kind for step in steps}
            },
            "layers": sorted({step.layer for step in steps if step.kind in COPY_KINDS}),
            "moved": int(session.trace.transfers.rows["nbytes"][session.trace.transfers.rows["kind"] == 0].sum()),
        }
    return told


def main(what: str) -> None:
    warnings.simplefilter("ignore")
    for prepare in PROGRAMS.values():
        with tempfile.TemporaryDirectory() as directory:
            prepare(Path(directory))()
    measure = count if what == "counter" else trace
    print(json.dumps({name: measure(prepare) for name, prepare in PROGRAMS.items()}))


if __name__ == "__main__":
    main(sys.argv[1])
