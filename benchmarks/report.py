"""How fast a report is built, against ``memray stats`` on the same capture.

    python benchmarks/report.py [--chunks 4096] [--rounds 3]

Records a session that writes and reads chunks of 64 KiB, keeps its spool, and builds the trace and the report from it
in fresh processes, in turn with ``memray stats`` on the session's own memray capture. Prints medians, memray records a
second, and bytes of the trace file a span.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORD = """
import json, sys, numpy as np, zarr, copytrace
from copytrace import session as module
from pathlib import Path
spool, chunks = Path(sys.argv[1]), int(sys.argv[2])
data = np.random.default_rng(0).integers(1, 255, chunks << 16, dtype="u1")
with copytrace.session(spool=spool) as s:
    array = zarr.create_array(str(spool.parent / "a.zarr"), shape=data.shape, chunks=(1 << 16,), dtype="u1",
                              compressors=None, config={"write_empty_chunks": True})
    array[...] = data
    array[...]
s.save(spool.parent / "run.copytrace")
print(json.dumps({"spans": len(s.trace.spans), "records": s.trace.allocations.records}))
"""

BUILD = """
import sys, time
from pathlib import Path
from copytrace.assemble import recover
from copytrace.trace import LoadedTrace, joined
import memray, numpy
began = time.perf_counter(), time.process_time()
stretches = recover(Path(sys.argv[1]))
trace = joined(next(stretches), stretches)
assembled = time.perf_counter(), time.process_time()
LoadedTrace(trace).report.to_text()
ended = time.perf_counter(), time.process_time()
print(*(b - a for a, b in zip(began + assembled, assembled + ended)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spool = Path(folder) / "spool"
        facts = json.loads(_python(RECORD, str(spool), str(options.chunks)))
        captures = sorted(spool.glob("memray-*.bin"))
        built: list[list[float]] = []
        stats: list[tuple[float, float]] = []
        for _ in range(options.rounds):
            built.append([*map(float, _python(BUILD, str(spool)).split())])
            stats.append(_spent([sys.executable, "-m", "memray", "stats", *map(str, captures)]))
        size = (Path(folder) / "run.copytrace").stat().st_size
    reading, reading_cpu, judging, judging_cpu = (statistics.median(column) for column in zip(*built, strict=True))
    peer, peer_cpu = (statistics.median(column) for column in zip(*stats, strict=True))
    records = facts["records"]
    print(f"spans {facts['spans']}, memray records {records}, trace {size / facts['spans']:.0f} bytes a span")
    print(
        f"reading {reading:.3f} s ({reading_cpu:.3f} s of the processor), attributing {judging:.3f} ({judging_cpu:.3f})"
    )
    for what, own, other in (
        ("elapsed", reading + judging, peer),
        ("of the processor", reading_cpu + judging_cpu, peer_cpu),
    ):
        print(f"report {own:.3f} s {what}: {records / own:,.0f} records a second, {own / other:.2f} x memray stats")


def _spent(command: list[str]) -> tuple[float, float]:
    """Seconds elapsed and of the processor."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return time.perf_counter() - began, used


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
