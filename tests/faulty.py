"""Runs faults alone and traced, and says what differed, stayed behind or was lost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import copytrace
from faults import Ending, Fault, Scene
from oracle.snapshot import attributes, changes

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Verdict:
    """``steps`` ended in a session, of which ``lost`` are in no report; ``wrong`` is all that should not be. A process
    that is killed between the end of a step and telling of it has one step more in its report.
    """

    steps: int
    lost: int
    wrong: tuple[str, ...]
    notes: tuple[str, ...]


def try_fault(fault: Fault, where: Path, seed: int = 1) -> Verdict:
    """Both runs in this process."""
    scenes = {}
    before = attributes()
    for name in ("alone", "traced"):
        (where / name).mkdir(parents=True)
        scenes[name] = Scene(where / name, name == "traced", seed)
        before = attributes() if name == "traced" else before
        fault.work(scenes[name])
    alone, traced = scenes["alone"], scenes["traced"]
    wrong = [
        f"{one} became {other}" for one, other in zip(alone.outcomes, traced.outcomes, strict=False) if one != other
    ]
    if len(alone.outcomes) != len(traced.outcomes):
        wrong.append(f"{len(alone.outcomes)} outcomes became {len(traced.outcomes)}")
    if alone.did != traced.did:
        wrong.append(f"{alone.did} steps became {traced.did}")
    changed = [name for name in changes(before, attributes()) if not name.endswith(fault.stays or ("\0",))]
    wrong += [f"{name} was not put back" for name in changed]
    wrong += [note for note in traced.notes if "swallowed" in note]
    if fault.says and not any(fault.says in note for note in traced.notes):
        wrong.append(f"no note says {fault.says!r}")
    return Verdict(traced.did, traced.did - traced.recorded, tuple(wrong), tuple(traced.notes))


def try_ending(ending: Ending, where: Path, seed: int = 1) -> Verdict:
    """Both runs as processes of their own; the traced one under ``copytrace run``."""
    done = {}
    program = [str(HERE / "faults.py"), ending.work.__name__]
    temporary = where / "tmp"
    temporary.mkdir(parents=True)
    for name, command in {
        "alone": [sys.executable, *program, "alone", str(seed)],
        "traced": [
            sys.executable,
            "-m",
            "copytrace",
            "run",
            "-q",
            "-o",
            "out.copytrace",
            *program,
            "traced",
            str(seed),
        ],
    }.items():
        (where / name).mkdir()
        done[name] = subprocess.run(
            command,
            cwd=where / name,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
    alone, traced = done["alone"], done["traced"]
    wrong = [] if alone.returncode == ending.status else [f"status {alone.returncode}, expected {ending.status}"]
    if traced.returncode != alone.returncode:
        wrong.append(f"status {alone.returncode} became {traced.returncode}")
    if traced.stderr != alone.stderr and not ending.varies:
        wrong.append(f"{alone.stderr!r} became {traced.stderr!r}")
    wrong += [f"{left.name} is left in the directory for temporary files" for left in temporary.iterdir()]
    steps = traced.stdout.count("step\n")
    trace = where / "traced" / ("out.copytrace.partial" if ending.left else "out.copytrace")
    if not trace.exists():
        return Verdict(steps, steps, (*wrong, f"there is no {trace.name}"), ())
    try:
        report = copytrace.load(trace).report
    except copytrace.CopytraceError as error:
        return Verdict(steps, steps, (*wrong, f"not readable: {error}"), ())
    recorded = sum(path.operations for path in report.paths if path.api == "step")
    notes = (*report.coverage.notes, *report.notes)
    if ending.left and not any("did not end" in note for note in notes):
        wrong.append("the report does not say that the run did not end")
    return Verdict(steps, max(steps - recorded, 0), tuple(wrong), notes)
