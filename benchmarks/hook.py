"""What the native hook costs a copy, what a mark costs, and what the hook costs zarr.

    python benchmarks/hook.py [--rounds 15] [--chunks 4096]

Copies of several sizes run bare and recorded in turn, in one thread's processor time; a mark is compared with a call of
``id``. Printed are medians, in nanoseconds. Then chunks of 64 KiB are written to a MemoryStore and read back, bare and
with the hook alone in turn, in one process and its processor time: medians in seconds, and the median of the ratios of
neighbours.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import movers
from copytrace.transfers import Recording

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (16, 512, 4096, 65_536, 4 << 20)
MARKS = 2_000


def recorded[T](work: Callable[[Recording], T], *, moves: bool = True) -> T:
    """The result of ``work`` while moves are recorded to a temporary directory."""
    directory = Path(tempfile.mkdtemp(prefix="copytrace-"))
    recording = Recording(directory / "spool", moves=moves)
    recording.start()
    try:
        return work(recording)
    finally:
        recording.stop()
        shutil.rmtree(directory)


def copies(rounds: int) -> None:
    library, memory = movers.load(), movers.Memory(4 << 20)
    for size in SIZES:
        step = movers.copy(memory.source, memory.destination, size)
        times = max(100, min(50_000, (100 << 20) // size))
        bare, hooked = [], []
        for _ in range(rounds):
            bare.append(library.moves_nanoseconds(ctypes.byref(step), times))
            hooked.append(recorded(lambda _, s=step, n=times: library.moves_nanoseconds(ctypes.byref(s), n)))
        before, after = statistics.median(bare), statistics.median(hooked)
        print(f"copy of {size:>9,} bytes  {before:>11,.1f}  recorded {after:>11,.1f}  {after - before:+.1f}")


def marks(rounds: int) -> None:
    def spent(call: Callable[[int], object]) -> float:
        started = time.thread_time_ns()
        for _ in range(MARKS):
            call(5)
        return (time.thread_time_ns() - started) / MARKS

    print(f"a call of id  {statistics.median(spent(id) for _ in range(rounds)):,.1f}")

    def one(recording: Recording, markers: bool) -> float:
        recording.set_markers(markers)
        return spent(recording.mark)

    for title, markers in (("a mark", False), ("a mark that allocates", True)):
        taken = [recorded(lambda recording, m=markers: one(recording, m)) for _ in range(rounds)]
        print(f"{title}  {statistics.median(taken):,.1f}")


def through_zarr(rounds: int, chunks: int) -> None:
    import numpy as np
    import zarr

    data = np.random.default_rng(0).integers(1, 255, chunks << 16, dtype="u1")

    def spent(recording: Recording | None = None) -> float:
        del recording
        started = time.process_time()
        array = zarr.create_array(
            zarr.storage.MemoryStore(),
            shape=data.shape,
            chunks=(1 << 16,),
            dtype="u1",
            compressors=None,
            config={"write_empty_chunks": True},
        )
        array[...] = data
        array[...]
        return time.process_time() - started

    spent()
    bare, hooked = [], []
    for number in range(rounds):
        turns = [lambda: bare.append(spent()), lambda: hooked.append(recorded(spent))]
        for turn in turns[:: 1 if number % 2 else -1]:
            turn()
    print(
        f"{chunks} chunks through a MemoryStore: bare {statistics.median(bare):.3f} s, hooked "
        f"{statistics.median(hooked):.3f} s, {statistics.median(hooked) / statistics.median(bare):.3f} x; neighbours "
        f"{statistics.median(after / before for before, after in zip(bare, hooked, strict=True)):.3f} x; fastest "
        f"{min(hooked) / min(bare):.3f} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", type=int, default=4096)
    arguments = parser.parse_args()
    through_zarr(arguments.rounds, arguments.chunks)
    copies(arguments.rounds)
    marks(arguments.rounds)


if __name__ == "__main__":
    main()
