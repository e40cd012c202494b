"""A script that measures with memray itself. Usage: tracked.py MODE..."""

import sys
import tempfile
from pathlib import Path

import memray
import numpy as np
import zarr
from memray import FileDestination, FileFormat, FileReader, Tracker
from zarr.storage import MemoryStore

source = np.arange(3_000_017, dtype="f4")
array = zarr.create_array(MemoryStore(), shape=source.shape, chunks=source.shape, dtype="f4", compressors=None)


def measure(tracker, file):
    with tracker:
        array[:] = source
    print(FileReader(file).metadata.peak_memory)


for number, mode in enumerate(sys.argv[1:]):
    profile = Path(f"profile {number}.bin")
    if mode == "plain":
        measure(Tracker(profile, native_traces=True), profile)
    elif mode == "without native traces":
        measure(Tracker(str(profile)), profile)
    elif mode == "destination":
        measure(Tracker(destination=FileDestination(profile, overwrite=True), native_traces=True), profile)
    elif mode == "aggregated":
        measure(Tracker(profile, file_format=FileFormat.AGGREGATED_ALLOCATIONS, native_traces=True), profile)
    elif mode == "by attribute":
        measure(memray.Tracker(file_name=profile, native_traces=True, follow_fork=False), profile)
    elif mode == "temporary":
        with tempfile.TemporaryDirectory() as directory:
            gone = Path(directory) / "gone.bin"
            measure(Tracker(gone, native_traces=True), gone)
    elif mode == "outside":
        array[:] = source
    elif mode == "raises":
        try:
            with Tracker(profile, native_traces=True):
                array[:] = source
                raise KeyError("inside")
        except KeyError:
            print(FileReader(profile).metadata.peak_memory)
            raise
    elif mode == "exists":
        profile.write_bytes(b"in the way")
        measure(Tracker(profile, native_traces=True), profile)
    elif mode == "two at once":
        with Tracker(profile, native_traces=True):
            measure(Tracker("second.bin", native_traces=True), "second.bin")
    else:
        sys.exit(f"no such mode: {mode}")
sys.exit(3)
