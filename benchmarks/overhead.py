"""What a session costs: reading and writing many small chunks, bare and traced, alternating in one run.

    python benchmarks/overhead.py [--chunks N] [--chunk-bytes N] [--rounds N] [--store local|memory] [VARIANT ...]

Variants: bare, hook (alone), probes (no memray, no hook), transfers (hook and probes, no memray), memray (memray with
native traces alone), all (a full session). Each round runs every variant once, in turn; printed are medians and ratios
of medians: hook, probes and transfers over bare, all over memray.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zarr
from zarr.storage import LocalStore, MemoryStore

import copytrace
from copytrace.transfers import Recording

if TYPE_CHECKING:
    from collections.abc import Iterator

OVER = {"hook": "bare", "probes": "bare", "transfers": "bare", "all": "memray"}


@contextlib.contextmanager
def variant(name: str, folder: Path) -> Iterator[None]:
    """Run the block the way ``name`` says."""
    if name == "bare":
        yield
    elif name == "memray":
        import memray

        with memray.Tracker(folder / "memray.bin", native_traces=True):
            yield
    elif name == "hook":
        recording = Recording(folder / "spool")
        recording.start()
        try:
            yield
        finally:
            recording.stop()
    else:
        with copytrace.session(memray=name == "all", transfers=name != "probes"):
            yield


def work(store: LocalStore | MemoryStore, data: np.ndarray[tuple[int], np.dtype[np.uint8]], chunk: int) -> float:
    """Seconds to write ``data`` in chunks of ``chunk`` bytes and read it back."""
    array = zarr.create_array(
        store, shape=data.shape, chunks=(chunk,), dtype="u1", compressors=None, config={"write_empty_chunks": True}
    )
    began = time.perf_counter()
    array[...] = data
    array[...]
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", default=["bare", "hook", "probes", "transfers", "memray", "all"])
    parser.add_argument("--chunks", type=int, default=4096)
    parser.add_argument("--chunk-bytes", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--store", choices=("local", "memory"), default="local")
    options = parser.parse_args()
    data = np.random.default_rng(0).integers(1, 255, options.chunks * options.chunk_bytes, dtype="u1")
    seconds: dict[str, list[float]] = {name: [] for name in options.variants}
    for number in range(options.rounds):
        order = options.variants if number % 2 == 0 else options.variants[::-1]
        for name in order:
            folder = Path(tempfile.mkdtemp())
            store = LocalStore(folder / "a.zarr") if options.store == "local" else MemoryStore()
            taken: list[float] = []
            with variant(name, folder):
                taken.append(work(store, data, options.chunk_bytes))
            seconds[name].append(taken[0])
            shutil.rmtree(folder)
            print(f"round {number + 1}  {name:<10} {taken[0]:.3f} s", file=sys.stderr)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        base = OVER.get(name)
        ratio = f"  {median / medians[base]:.3f} x {base}" if base in medians else ""
        print(f"{name:<10} {median:.3f} s  {median / (2 * options.chunks) * 1e6:.0f} us a chunk{ratio}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
