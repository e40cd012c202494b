"""How the cost of a session grows with the number of chunks.

    python benchmarks/growth.py [--sizes 10000 30000 100000] [--out growth.png]

Chunks of 1 KiB are read from a MemoryStore, 10,000 by one call, with a whole session and bare, each in a process of its
own; then a report is made of the trace in another. Printed are, for each size: microseconds of the processor a chunk
inside (of the first call, of the last, and bare), and by how much the resident memory grew inside and after closing;
seconds and bytes at most of making the report. ``--out`` draws time and memory a chunk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = """
import contextlib, json, os, sys, time
import numpy as np, zarr
import copytrace
count, traced, out, batch = int(sys.argv[1]), sys.argv[2] == "traced", sys.argv[3], 10_000
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
array = zarr.create_array(zarr.storage.MemoryStore(), shape=(batch << 10,), chunks=(1 << 10,), dtype="u1",
                          compressors=None, config={"write_empty_chunks": True})
array[...] = np.random.default_rng(0).integers(1, 255, batch << 10, dtype="u1")
array[...]
session = copytrace.session() if traced else None
before, calls = resident(), []
with session or contextlib.nullcontext():
    for _ in range(count // batch):
        began = time.process_time()
        array[...]
        calls.append((time.process_time() - began) / batch * 1e6)
    inside = resident()
closed = resident()
if session:
    session.save(out)
print(json.dumps({"first": calls[0], "last": calls[-1], "mean": sum(calls) / len(calls), "inside": inside - before,
                  "closed": closed - before}))
"""
REPORT = """
import json, resource, sys, time
import copytrace
began = time.process_time()
path = copytrace.load(sys.argv[1]).report.paths[0]
print(json.dumps({"chunks": path.chunks, "seconds": time.process_time() - began,
                  "most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))
"""


def _python(code: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(count: int) -> dict[str, float]:
    """The figures for ``count`` chunks."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.copytrace"
        bare = _python(RECORD, str(count), "bare", "")
        traced = _python(RECORD, str(count), "traced", str(trace))
        report = _python(REPORT, str(trace))
        assert report["chunks"] == count
        return {"bare": bare["mean"], **traced, "report": report["seconds"], "most": report["most"], "count": count}


def draw(rows: list[dict[str, float]], out: Path) -> None:
    """Time and memory a chunk over the number of chunks."""
    from matplotlib import pyplot

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    counts = [row["count"] for row in rows]
    for name, label in (("bare", "bare"), ("mean", "in a session")):
        time.plot(counts, [row[name] for row in rows], marker="o", label=label)
    time.set(xscale="log", xlabel="chunks", ylabel="µs of the processor a chunk", ylim=(0, None))
    time.legend()
    for name, label in (("inside", "inside"), ("closed", "after closing"), ("most", "making the report")):
        memory.plot(counts, [row[name] / 1e6 for row in rows], marker="o", label=label)
    memory.set(xscale="log", yscale="log", xlabel="chunks", ylabel="MB")
    memory.legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for count in options.sizes:
        row = measured(count)
        rows.append(row)
        print(
            f"{count:>9,} chunks  bare {row['bare']:.0f} us",
            f"session {row['mean']:.0f} us (first {row['first']:.0f}, last {row['last']:.0f})",
            f"inside {row['inside'] / 1e6:+.0f} MB, closed {row['closed'] / 1e6:+.0f} MB",
            f"report {row['report']:.1f} s, {row['most'] / 1e6:.0f} MB at most",
            sep="  ",
        )
    if options.out:
        draw(rows, options.out)


if __name__ == "__main__":
    main()
