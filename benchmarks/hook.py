"""What the native hook costs a copy, and what a mark costs.

    python benchmarks/hook.py [--rounds 15]

Copies of several sizes run bare and recorded in turn, in one thread's processor time; a mark is compared with a call of
``id``. Printed are medians, in nanoseconds.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    copies(arguments.rounds)
    marks(arguments.rounds)


if __name__ == "__main__":
    main()
