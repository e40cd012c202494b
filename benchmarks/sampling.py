"""What a session costs that is left on: reads of one chunk, bare, sampled and all recorded, in turn in one process.

    python benchmarks/sampling.py [--calls 5000] [--rounds 7] [--sample 100]

Chunks of 64 KiB are read from a MemoryStore, one by each call, without memray. Printed are medians of the processor's
time a call, and ratios to bare.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import zarr
from zarr.storage import MemoryStore

import copytrace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sample", type=int, default=100)
    options = parser.parse_args()
    size = 1 << 16
    array = zarr.create_array(MemoryStore(), shape=(64 * size,), chunks=(size,), dtype="u1", compressors=None)
    array[...] = np.arange(64 * size, dtype="u1")

    def around(name: str) -> AbstractContextManager[object]:
        if name == "bare":
            return contextlib.nullcontext()
        every = 1 if name == "recorded" else options.sample
        return copytrace.session(memray=False, transfers=name != "sampled, no hook", sample=every)

    names = ("bare", "sampled, no hook", "sampled", "recorded")
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names[:: -1 if number % 2 else 1]:
            with around(name):
                began = time.process_time()
                for call in range(options.calls):
                    array[(call % 64) * size : (call % 64 + 1) * size]
                taken[name].append((time.process_time() - began) / options.calls * 1e6)
    bare = statistics.median(taken["bare"])
    for name, each in taken.items():
        print(f"{name:<17} {statistics.median(each):7.1f} us a call  {statistics.median(each) / bare:.3f} x bare")


if __name__ == "__main__":
    main()
