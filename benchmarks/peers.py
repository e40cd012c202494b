"""What a session costs beside memray alone and Scalene, each run in a process of its own, in turn.

    python benchmarks/peers.py [--chunks 2048] [--rounds 7] [VARIANT ...]

Chunks of 64 KiB are written to a LocalStore and read back, uncompressed. Variants: bare, probes (a session without
memray and hook), session (all of it), memray (with native traces), scalene (its memory mode; where it is installed).
Printed are medians of the seconds that the work itself took, their ratios to bare, and the most memory that the
process held.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PROGRAM = """
import contextlib, json, resource, sys, time
import numpy as np, zarr
variant, folder, chunks = sys.argv[1], sys.argv[2], int(sys.argv[3])
if variant == "memray":
    import memray
    around = memray.Tracker(folder + "/memray.bin", native_traces=True)
elif variant in ("probes", "session"):
    import copytrace
    around = copytrace.session(memray=variant == "session", transfers=variant == "session")
else:
    around = contextlib.nullcontext()
data = np.random.default_rng(0).integers(1, 255, chunks << 16, dtype="u1")
with around:
    array = zarr.create_array(folder + "/a.zarr", shape=data.shape, chunks=(1 << 16,), dtype="u1", compressors=None,
                              config={"write_empty_chunks": True})
    began = time.perf_counter()
    array[...] = data
    array[...]
    seconds = time.perf_counter() - began
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
open(folder + "/result.json", "w").write(json.dumps([seconds, most]))
"""
VARIANTS = ("bare", "probes", "session", "memray", *(["scalene"] if find_spec("scalene") else []))


def once(variant: str, chunks: int) -> tuple[float, int]:
    """Seconds of the work, and bytes that were resident at most."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        command = [str(program), variant, folder, str(chunks)]
        if variant == "scalene":
            command = [
                "-m",
                "scalene",
                "run",
                "--memory",
                "-o",
                f"{folder}/profile.json",
                str(program),
                "---",
                *command[1:],
            ]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder)
        try:
            seconds, most = json.loads((Path(folder) / "result.json").read_text())
        except OSError:
            sys.exit(f"{variant} did not end as it should:\n{done.stderr[-2000:]}")
        return float(seconds), int(most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=VARIANTS)
    parser.add_argument("--chunks", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in options.variants}
    for number in range(options.rounds):
        for name in options.variants[:: -1 if number % 2 else 1]:
            found[name].append(once(name, options.chunks))
            print(f"round {number + 1}  {name:<8} {found[name][-1][0]:.3f} s", file=sys.stderr)
    seconds = {name: statistics.median(taken for taken, _ in runs) for name, runs in found.items()}
    for name, runs in found.items():
        ratios = [f"{seconds[name] / seconds[base]:.3f} x {base}" for base in ("bare", "memray") if base in seconds]
        most = statistics.median(held for _, held in runs)
        print(f"{name:<8} {seconds[name]:.3f} s  {', '.join(ratios)}  {most / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
