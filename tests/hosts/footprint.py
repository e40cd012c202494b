"""Writes and reads 100 MB, alone and in a session, and prints as JSON the high-water marks of the process in bytes.

Usage: footprint.py ELEMENTS_A_CHUNK NATIVE DIRECTORY.
"""

import json
import sys

import numpy as np
import zarr

import copytrace

chunk, native, directory = int(sys.argv[1]), sys.argv[2] == "native", sys.argv[3]
source = np.arange(25_000_000, dtype="f4")
marks = {}


def mark(name):
    """Note the most memory that was resident since the last mark."""
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    marks[name] = int(found["VmHWM"].split()[0]) << 10
    marks[f"after {name}"] = int(found["VmRSS"].split()[0]) << 10
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def work(name, size=25_000_000):
    options = {"compressors": None, "config": {"write_empty_chunks": True}}
    array = zarr.create_array(f"{directory}/{name}", shape=(size,), chunks=(min(size, chunk),), dtype="f4", **options)
    array[...] = source[:size]
    assert array[...][-1] == source[size - 1]


work("warm", 1000)
mark("before")
work("alone")
mark("alone")
session = copytrace.session(native=native)
with session:
    work("traced")
    mark("inside")
mark("left")
report = session.report
mark("reported")
own = [buffer.label for path in report.paths for buffer in path.buffers if "copytrace" in buffer.layer + buffer.label]
print(json.dumps({"marks": marks, "own": own, "copied": sum(path.copied_bytes for path in report.paths)}))
