"""A maintainer confirms a fix: traces of one program with the release before and the one after, compared."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

import copytrace
from copytrace.matrix.environments import cache_directory, environment
from copytrace.matrix.server import make_bucket, s3_server
from copytrace.reports import diff
from copytrace.reports.diff import Diff, compare

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NBYTES = 100_000_000
PROGRAM = """
import os

import numpy as np
import zarr

data = np.random.default_rng(0).random((5000, 2500))
{store}
options = {{"shape": data.shape, "chunks": data.shape, "dtype": data.dtype, "compressors": None, "overwrite": True}}
z = zarr.create_array(store, **options)
z[:] = data
assert (z[:] == data).all()
"""
LOCAL = 'store = zarr.storage.LocalStore("a.zarr")'
OBSTORE = """
from obstore.store import LocalStore
store = zarr.storage.ObjectStore(LocalStore("a.zarr", mkdir=True))
"""
S3FS = """
where = {"endpoint_url": os.environ["ENDPOINT"], "client_kwargs": {"region_name": "us-east-1"}}
options = {**where, "key": "copytrace", "secret": "copytrace", "asynchronous": True}
store = zarr.storage.FsspecStore.from_url("s3://bucket/a.zarr", storage_options=options)
"""


@dataclass(frozen=True)
class Pair:
    """One program with two sets of requirements, and the copies that came and went between them: (layer, ratio)."""

    store: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    came: tuple[tuple[str, float], ...] = ()
    went: tuple[tuple[str, float], ...] = ()


ZARR = ("zarr==3.3.0", "numcodecs==0.17.1")
PAIRS = {
    "obstore": Pair(
        OBSTORE,
        (*ZARR, "obstore==0.11.0"),
        (*ZARR, "obstore==0.11.1"),
        went=(("obstore", 1.0), ("obstore", 1.0)),
    ),
    "zarr": Pair(
        LOCAL,
        ("zarr==3.0.6", "numcodecs==0.15.1"),
        ("zarr==3.0.8", "numcodecs==0.16.1"),
        went=(("zarr.storage", 1.0),),
    ),
    "s3fs": Pair(
        S3FS,
        (*ZARR, "s3fs==2025.3.0"),
        (*ZARR, "s3fs==2026.9.0"),
        came=(("s3fs", 3.0),),
    ),
}


def changed(found: Diff, verb: str) -> list[tuple[str, float]]:
    copied = [change.new or change.old for change in found.changes if change.verb == verb]
    return [(one.layer, round(one.ratio or 0, 2)) for one in copied if one]


def traced(requirements: tuple[str, ...], store: str, folder: Path, **variables: str) -> copytrace.Report:
    python = environment(requirements, cache=cache_directory()) / "python"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM.format(store=store))
    command = [str(python), "-m", "copytrace", "run", "-q", "program.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return copytrace.load(folder / "program.copytrace").report


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.node.callspec.params["name"] != "s3fs":
        yield ""
        return
    with s3_server(cache_directory()) as url:
        make_bucket(url, "bucket")
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_the_layers_that_changed_between_two_releases_are_named_and_no_other(
    name: str, endpoint: str, tmp_path: Path
) -> None:
    pair = PAIRS[name]
    old, new = (
        traced(requirements, pair.store, tmp_path / which, ENDPOINT=endpoint)
        for which, requirements in (("old", pair.old), ("new", pair.new))
    )
    found = compare(old, new)
    assert (found.only_old, found.only_new, len(found.paths)) == ((), (), 2)
    assert {path.payload_bytes for path in old.paths + new.paths} == {NBYTES}
    assert changed(found, "came") == list(pair.came)
    assert changed(found, "went") == list(pair.went)
    assert len(found.changes) == len(pair.came) + len(pair.went)
    assert name in found.versions
    assert found.worse is bool(pair.came)


def test_a_copy_that_a_store_stopped_making_is_the_one_that_went(tmp_path: Path) -> None:
    """The same without environments of their own: a store before and after its repair."""

    class ShelfStore(LocalStore):
        careless = True

        async def set(self, key, value):  # type: ignore[no-untyped-def, override]
            if self.careless:
                value = type(value).from_bytes(value.as_numpy_array().tobytes())
            await super().set(key, value)

    def write(folder: Path) -> copytrace.Report:
        z = zarr.create_array(ShelfStore(folder), shape=(211, 503), chunks=(211, 503), dtype="f4", compressors=None)
        with copytrace.session() as session:
            z[:] = np.full((211, 503), 1.5, "f4")
        return session.report

    before = write(tmp_path / "before")
    ShelfStore.careless = False
    found = compare(before, write(tmp_path / "after"))
    assert found.verdict == "1 copy went (user) on 1 path."
    (change,) = found.changes
    assert change.old is not None
    assert change.old.function.endswith("ShelfStore.set")
    assert change.old.bytes == 211 * 503 * 4
    assert not found.worse
    assert diff.to_text(found).splitlines()[3].startswith("  copies 1.00 x -> 0.00 x; ")
