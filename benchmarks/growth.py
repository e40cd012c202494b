"""How the cost of a session grows with the number of chunks.

    python benchmarks/growth.py [--sizes 10000 100000 1000000] [--out docs/pictures/growth.png] [--folder DIR]

Chunks of 1 KiB are read from a MemoryStore, 1,000 by one call, bare and in a whole session, each in a process of its
own, until so many were read; then the trace is saved, and a report is made of it in another process. Printed are, for
each size: microseconds of the processor a chunk (bare; in the session, of its first tenth and of its last); by how
much more the resident memory of the traced process rose at most than that of the bare one, inside the session and with
closing and saving; seconds of the processor for these; the size of the trace; seconds and resident memory at most of
making the report. ``--out`` draws them. Spool and trace are in ``--folder``: a million chunks take gigabytes there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RECORD = """
import contextlib, json, sys, time
from pathlib import Path
import numpy as np, zarr
import copytrace
count, traced, out, batch = int(sys.argv[1]), sys.argv[2] == "traced", sys.argv[3], 1_000

def most():
    "The most resident memory so far, in bytes."
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10

array = zarr.create_array(zarr.storage.MemoryStore(), shape=(batch << 10,), chunks=(1 << 10,), dtype="u1",
                          compressors=None, config={"write_empty_chunks": True})
array[...] = np.random.default_rng(0).integers(1, 255, batch << 10, dtype="u1")
for _ in range(5):
    array[...]
session = copytrace.session() if traced else contextlib.nullcontext()
before, calls = most(), []
session.__enter__()
for _ in range(count // batch):
    began = time.process_time()
    array[...]
    calls.append((time.process_time() - began) / batch * 1e6)
inside = most() - before
began = time.process_time()
session.__exit__(None, None, None)
if traced:
    session.save(out)
tenth = max(len(calls) // 10, 1)
mean = lambda some: sum(some) / len(some)
print(json.dumps({"first": mean(calls[:tenth]), "last": mean(calls[-tenth:]), "mean": mean(calls), "inside": inside,
                  "closed": most() - before, "closing": time.process_time() - began}))
"""
REPORT = """
import json, resource, sys, time
import copytrace
began = time.process_time()
report = copytrace.load(sys.argv[1]).report
path, = report.paths
print(json.dumps({"chunks": path.chunks, "copies": path.copies, "spans": report.spans, "records": report.records,
                  "report": time.process_time() - began,
                  "most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}))
"""


def _python(code: str, *arguments: str) -> dict[str, float]:
    environment = {**os.environ, "TMPDIR": str(Path(arguments[-1]).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(count: int, folder: str | None) -> dict[str, float]:
    """The figures for ``count`` chunks."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        trace = Path(directory) / "run.copytrace"
        bare = _python(RECORD, str(count), "bare", str(trace))
        traced = _python(RECORD, str(count), "traced", str(trace))
        report = _python(REPORT, str(trace))
        assert report["chunks"] == count
        above = {name: traced[name] - bare["closed"] for name in ("inside", "closed")}
        return {**traced, **report, **above, "bare": bare["mean"], "count": count, "size": trace.stat().st_size}


def draw(rows: list[dict[str, float]], out: Path) -> None:
    """Time a chunk and memory over the number of chunks."""
    from matplotlib import pyplot

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    counts = [row["count"] for row in rows]
    for name, label in (("bare", "bare"), ("mean", "in a session")):
        time.plot(counts, [row[name] for row in rows], marker="o", label=label)
    for name, label in (("closing", "closing and saving"), ("report", "making the report")):
        time.plot(counts, [row[name] / row["count"] * 1e6 for row in rows], marker="o", label=label)
    time.set(xscale="log", xlabel="chunks read", ylabel="µs of the processor a chunk", ylim=(0, None))
    time.legend(fontsize="small")
    for name, label in (
        ("inside", "above bare, inside"),
        ("closed", "above bare, with closing"),
        ("most", "making the report"),
    ):
        memory.plot(counts, [row[name] / 1e6 for row in rows], marker="o", label=label)
    memory.set(xscale="log", xlabel="chunks read", ylabel="MB resident at most", ylim=(0, None))
    memory.legend(fontsize="small")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", help="a directory with room")
    options = parser.parse_args()
    rows = []
    for count in options.sizes:
        row = measured(count, options.folder)
        rows.append(row)
        print(
            f"{count:>9,} chunks  bare {row['bare']:.0f} us",
            f"session {row['mean']:.0f} us (first {row['first']:.0f}, last {row['last']:.0f})",
            f"above bare {row['inside'] / 1e6:+.0f} MB inside, {row['closed'] / 1e6:+.0f} MB with closing",
            f"closing {row['closing']:.1f} s, trace {row['size'] / 1e6:.1f} MB",
            f"report {row['report']:.1f} s, {row['most'] / 1e6:.0f} MB at most",
            f"{row['spans']:,} spans, {row['records']:,} records, copies {row['copies']}",
            sep="  ",
            flush=True,
        )
    if options.out:
        draw(rows, options.out)


if __name__ == "__main__":
    main()
