"""A program that works while the disk that its trace is written to is full, alone or in a session.

    python tests/full_disk.py DIRECTORY FREE before|within alone|traced

``DIRECTORY`` is on a file system of its own, of which all but ``FREE`` bytes are taken before the session or within it.
Prints as JSON what the work came to, and what a session says.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.storage import MemoryStore

import copytrace
from copytrace.errors import CopytraceError

STEPS, FIRST = 200, 20
N = 50_021


def take_all_but(free: int, directory: Path) -> None:
    """Leave ``free`` bytes of the file system."""
    disk = os.statvfs(directory)
    with (directory / "taken").open("ab") as file:
        os.posix_fallocate(file.fileno(), file.tell(), max(disk.f_bavail * disk.f_frsize - free, 1))


def steps(count: int) -> str:
    """What ``count`` rounds of writes, reads and codecs come to."""
    source = np.random.default_rng(3).integers(1, 255, N, dtype="u1")
    array = zarr.create_array(MemoryStore(), shape=(N,), chunks=(N // 2 + 1,), dtype="u1", compressors=None)
    codec, seen = numcodecs.Zstd(), hashlib.sha256()
    for number in range(count):
        with copytrace.operation("step", payload_bytes=N):
            kept = bytes(memoryview(source))
        array[:] = source + np.uint8(number % 3)
        seen.update(array[:].tobytes() + codec.decode(codec.encode(kept)))
    return seen.hexdigest()


def main() -> None:
    directory, free, when, traced = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "traced"
    found: dict[str, Any] = {"results": [], "error": "", "saved": ""}
    steps(1)
    if when == "before":
        take_all_but(free, directory)
    session = copytrace.session("full", spool=directory / "spool")
    with contextlib.ExitStack() as stack:
        try:
            if traced:
                stack.enter_context(session)
        except CopytraceError as error:
            found["error"] = str(error)
        found["results"].append(steps(FIRST))
        if when == "within":
            take_all_but(free, directory)
        found["results"].append(steps(STEPS - FIRST))
    if traced and not found["error"]:
        report = session.report
        found["steps"] = sum(path.operations for path in report.paths if path.api == "step")
        found["notes"] = [*report.coverage.notes, *report.notes]
        found["lost"] = report.coverage.lost_transfers
        take_all_but(0, directory)
        try:
            session.save(directory / "out.copytrace")
        except CopytraceError as error:
            found["saved"] = str(error)
        found["left"] = sorted(path.name for path in directory.iterdir())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
