"""How fast a report is built, against ``memray stats`` on the same capture.

    python benchmarks/report.py [--chunks 4096] [--rounds 3]

Records a session that writes and reads chunks of 64 KiB, keeps its spool, and builds the trace and the report from it
in fresh processes, in turn with ``memray stats`` on the session's own memray capture. Prints medians, memray records a
second, and bytes of the trace file a span.
"""

from __future__ import annotations

import argparse
import json
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
from copytrace.trace import LoadedTrace
import memray, numpy
began = time.perf_counter()
trace = recover(Path(sys.argv[1]))
assembled = time.perf_counter()
LoadedTrace(trace).report.to_text()
print(assembled - began, time.perf_counter() - assembled)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spool = Path(folder) / "spool"
        made = _python(RECORD, str(spool), str(options.chunks))
        facts = json.loads(made)
        captures = sorted(spool.glob("memray-*.bin"))
        reading: list[float] = []
        judging: list[float] = []
        stats: list[float] = []
        for _ in range(options.rounds):
            first, second = map(float, _python(BUILD, str(spool)).split())
            reading.append(first)
            judging.append(second)
            began = time.perf_counter()
            for capture in captures:
                subprocess.run([sys.executable, "-m", "memray", "stats", str(capture)], check=True, capture_output=True)
            stats.append(time.perf_counter() - began)
        size = (Path(folder) / "run.copytrace").stat().st_size
    total = statistics.median(a + b for a, b in zip(reading, judging, strict=True))
    peer = statistics.median(stats)
    print(f"spans {facts['spans']}, memray records {facts['records']}, trace {size / facts['spans']:.0f} bytes a span")
    print(f"reading {statistics.median(reading):.3f} s, attributing {statistics.median(judging):.3f} s")
    print(f"report {total:.3f} s: {facts['records'] / total:,.0f} records a second")
    print(f"memray stats {peer:.3f} s: the report takes {total / peer:.2f} x as long")


def _python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
