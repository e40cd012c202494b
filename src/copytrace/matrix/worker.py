"""One write or one read of one stack: ``python -m copytrace.matrix.worker TASK.json RESULT.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import copytrace
from copytrace.matrix.drivers import DRIVERS

SEED = 20240601
DTYPE = "float32"


def main(arguments: list[str]) -> None:
    """Do the task: ``driver``, ``stage`` (write, read or fill), ``shape``, ``compressed``, ``path``, ``s3``, ``trace``.

    ``fill`` writes without a session. The result is the report as JSON.
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
    if task["trace"]:
        session.save(task["trace"], overwrite=True)
    Path(arguments[1]).write_text(session.report.to_json(indent=None))


def _run(source: str, names: dict[str, Any], stage: str) -> None:
    exec(compile(source, f"<{stage}>", "exec"), names)


if __name__ == "__main__":
    main(sys.argv[1:])
