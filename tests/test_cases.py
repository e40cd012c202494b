"""The answer with the hook, the one inferred without it, the one without memray, and a preloaded counter that shares
nothing with copytrace: where they part, the table says which is right and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from cases.programs import PROGRAMS
from copytrace.transfers import _extension
from oracle.counter import build, environment

N = 2_000_003
RAMP = SQUARE = 2_000_000
LARGE = 12_000_007
INDEX = 84  # bytes of a shard's index of 5 chunks with its checksum
MEASURE = Path(__file__).with_name("cases") / "measure.py"
HOOKED = _extension()[0] is not None
MULTIPART = version("obstore") == "0.11.0"


@dataclass(frozen=True)
class Agreed:
    """Bytes. ``told`` is right; ``counter`` is what memcpy and memmove were called for, ``blind`` what a way tells that
    cannot see all; ``why`` is due where they differ.
    """

    told: int
    counter: int
    why: str = ""
    blind: dict[str, int] = field(default_factory=dict)
    layers: tuple[str, ...] = ("zarr.buffer",)


CODEC = "a codec writes its output with loops of its own, told by the call; the counter sees no move"
STRIDED = "elements are moved one by one, told by the call; the counter sees no move"
ENCODED = -1  # what the codec made of it: told, inferred and without memray agree to the byte

TABLE: dict[str, Agreed] = {
    "local_write": Agreed(0, 0, layers=()),
    "local_read": Agreed(N, N),
    "local_write_zstd": Agreed(ENCODED, 0, CODEC, layers=("numcodecs",)),
    "local_read_zstd": Agreed(2 * RAMP, RAMP, CODEC, layers=("numcodecs", "zarr.buffer")),
    "blosc_write": Agreed(ENCODED, 0, CODEC, layers=("numcodecs",)),
    "fsspec_write": Agreed(N, N, layers=("zarr.storage",)),
    "zip_write": Agreed(N, N, layers=("zarr.storage",)),
    "obstore_write_multipart": Agreed(
        2 * LARGE if MULTIPART else 0,
        2 * LARGE if MULTIPART else 0,
        "without memray nobody knows obstore's own buffers, and the move from one to the next has no end on the path",
        {"no memray": LARGE if MULTIPART else 0},
        ("obstore",) if MULTIPART else (),
    ),
    "obstore_read": Agreed(N, N),
    "memory_write": Agreed(N, N, layers=("zarr.storage",)),
    "sharded_write": Agreed(
        SQUARE + INDEX,
        SQUARE,
        "the counter leaves moves of less than 4 KiB out, and so does the hook: the index joins uncounted",
        {"inferred": SQUARE + 2 * INDEX},
        ("zarr.buffer", "zarr.codecs"),
    ),
    "sharded_read": Agreed(2 * SQUARE, 2 * SQUARE),
    "partial_read": Agreed(20_001, 20_001),
    "fortran_write": Agreed(
        SQUARE,
        0,
        f"{STRIDED}; without memray the size of what a primitive returns is not known either",
        {"no memray": 0},
        ("zarr.codecs",),
    ),
    "big_endian_write": Agreed(SQUARE, 0, STRIDED),
    "many_chunks_read": Agreed(N, N),
    "async_write": Agreed(0, 0, layers=()),
    "store_raises": Agreed(N, N, layers=("user",)),
    "numcodecs_encode": Agreed(ENCODED, 0, CODEC, layers=("numcodecs",)),
}


def measured(what: str, variables: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, str(MEASURE), what]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    library = build(tmp_path_factory.mktemp("counter"))
    if library is None:
        pytest.skip("needs a C compiler")
    return measured("counter", environment(library))


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    return measured("sessions", {**os.environ, "COPYTRACE_STRICT": "1"})


def test_the_table_is_complete() -> None:
    assert list(TABLE) == list(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_counter_sees_what_it_can(name: str, counted: dict[str, Any]) -> None:
    assert sum(counted[name].values()) == TABLE[name].counter
    assert TABLE[name].why or TABLE[name].counter == TABLE[name].told


@pytest.mark.skipif(not HOOKED, reason="needs the native hook")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_hook_sees_every_move_that_the_counter_sees(
    name: str, counted: dict[str, Any], traced: dict[str, Any]
) -> None:
    """The first session of a process imports, beside what the counter saw."""
    moved, payload = traced[name]["hook"]["moved"], traced[name]["hook"]["payload"]
    assert moved >= sum(counted[name].values())
    if name != next(iter(PROGRAMS)):
        assert moved - sum(counted[name].values()) <= 0.02 * payload
    assert traced[name]["hook"]["explained"] >= 0.99


@pytest.mark.parametrize("way", ["hook", "inferred", "no memray"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_way_tells_the_same_or_the_table_says_why(name: str, way: str, traced: dict[str, Any]) -> None:
    if way == "no memray" and not HOOKED:
        pytest.skip("needs the native hook")
    told, agreed = traced[name][way], TABLE[name]
    wanted = agreed.blind.get(way if HOOKED or way != "hook" else "inferred", agreed.told)
    if wanted == ENCODED:
        wanted = traced[name]["inferred"]["by_kind"]["encode"]
        assert 0 < wanted < 0.1 * told["payload"]
    assert abs(told["copied"] - wanted) <= 1
    assert told["unattributed"] == 0
    if wanted == agreed.told or agreed.told == ENCODED:
        assert told["layers"] == sorted(agreed.layers)
    else:
        assert agreed.why
