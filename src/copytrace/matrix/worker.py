"""One write or one read of one stack: ``python -m copytrace.matrix.worker TASK.json RESULT.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import copytrace
from copytrace.matrix.drivers import DRIVERS
from copytrace.stacks import OWN_STACK

if TYPE_CHECKING:
    from copytrace.model import Trace

SEED = 20240601
DTYPE = "float32"


def main(arguments: list[str]) -> None:
    """Do the task: ``driver``, ``stage`` (write, read or fill), ``shape``, ``compressed``, ``path``, ``s3``, ``trace``.

    ``fill`` writes without a session. The result is JSON: the ``report`` and ``peak_bytes``, what the process held at
    most beyond what it had before.
    """
    task = json.loads(Path(arguments[0]).read_text())
    driver, stage, shape = DRIVERS[task["driver"]], task["stage"], tuple(task["shape"])
    writing = stage != "read"
    data = np.random.default_rng(SEED).random(shape, dtype=np.dtype(DTYPE).type)
    names: dict[str, Any] = {
        "np": np,
        "shape": shape,
        "dtype": DTYPE,
        "compressed": task["compressed"],
        "path": task["path"],
        "s3": task["s3"],
        "writing": writing,
    }
    if writing:
        names["data"] = data
    _run(driver.prepare + (driver.before_write if writing else driver.before_read), names, "prepare")
    if stage == "fill":
        _run(driver.write, names, "write")
        return
    with copytrace.session(label=task["label"]) as session:
        _run(driver.write if writing else driver.read, names, stage)
    if not writing and not np.array_equal(np.asarray(names["out"]), data):
        raise SystemExit(f"{task['driver']}: what was read is not what was written")
    session.save(task["trace"], overwrite=True)
    result = {"report": session.report.to_dict(), "peak_bytes": _peak(copytrace.load(task["trace"]).trace)}
    Path(arguments[1]).write_text(json.dumps(result))


def _peak(trace: Trace) -> int:
    """Bytes that all blocks of a trace but copytrace's own held at most, as memray's own peak is counted."""
    blocks = trace.allocations
    own = np.array([stack == OWN_STACK for stack in blocks.stacks] or [False], bool)
    kept = ~own[blocks.stack]
    size = blocks.size[kept].astype(np.int64)
    position = np.concatenate([blocks.born[kept], blocks.died[kept]])
    change = np.concatenate([size, -size])
    held = np.cumsum(change[np.lexsort((change, position))])
    return int(held.max(initial=0))


def _run(source: str, names: dict[str, Any], stage: str) -> None:
    exec(compile(source, f"<{stage}>", "exec"), names)


if __name__ == "__main__":
    main(sys.argv[1:])
