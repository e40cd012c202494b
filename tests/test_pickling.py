"""What is pickled while a session is open is what would be pickled without one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import numcodecs
import pytest
from zarr.storage import LocalStore, MemoryStore

import copytrace

if TYPE_CHECKING:
    from pathlib import Path

cloudpickle = pytest.importorskip("cloudpickle")

PROGRAM = """
import sys
import cloudpickle
import copytrace
from zarr.storage import LocalStore

class Mine(LocalStore):
    async def set(self, key, value):
        await super().set(key, value)

    async def get(self, key, prototype, byte_range=None):
        return await super().get(key, prototype, byte_range)

with copytrace.session(memray=False) as s:
    assert Mine.set.__code__.co_filename == "copytrace"
    sent = cloudpickle.dumps(Mine(sys.argv[1]))
    assert sent == cloudpickle.dumps(Mine(sys.argv[1]))
    again = cloudpickle.loads(sent)
    assert type(again).set.__code__.co_filename != "copytrace"
with open(sys.argv[2], "wb") as file:
    file.write(sent)
"""
ELSEWHERE = """
import pickle, sys
sys.modules["copytrace"] = None
import asyncio, zarr
from zarr.core.buffer import default_buffer_prototype
with open(sys.argv[1], "rb") as file:
    store = pickle.load(file)
made = zarr.create_array(store, shape=(7,), chunks=(7,), dtype="u1", compressors=None, fill_value=0)
made[...] = 9
print(type(store).__name__, made[...].sum())
"""


def test_a_store_of_the_program_goes_by_value_without_what_stands_in_for_its_methods(tmp_path: Path) -> None:
    sent = tmp_path / "sent.pickle"
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "store"), str(sent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command = [sys.executable, "-c", ELSEWHERE, str(sent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("Mine 63\n", "")


def test_what_goes_by_reference_still_does(tmp_path: Path) -> None:
    values = (LocalStore(tmp_path), numcodecs.Zstd(3), LocalStore.get, MemoryStore.set)
    for dumps in (pickle.dumps, cloudpickle.dumps):
        alone = [dumps(value) for value in values]
        with copytrace.session(memray=False):
            assert [dumps(value) for value in (*values[:2], LocalStore.get, MemoryStore.set)] == alone


def test_afterwards_cloudpickle_is_as_it_was() -> None:
    before = cloudpickle.cloudpickle.Pickler._function_reduce
    with copytrace.session(memray=False):
        assert cloudpickle.cloudpickle.Pickler._function_reduce is not before
    assert cloudpickle.cloudpickle.Pickler._function_reduce is before
