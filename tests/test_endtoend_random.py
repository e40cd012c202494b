"""Random arrays, chunks, codecs, stores and selections: nothing changes but that it is traced, and no byte is lost."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import zarr
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, ZipStore

import copytrace
from copytrace.model import COPY_KINDS
from copytrace.report import Report

SCHEMA = Draft202012Validator(json.loads(Path(copytrace.__file__).with_name("report.schema.json").read_text()))

EXAMPLES = int(os.environ.get("COPYTRACE_EXAMPLES", "25"))
"""How many random situations are tried; give more for a thorough run."""

STORES: dict[str, Callable[[Path], Any]] = {
    "local": LocalStore,
    "memory": lambda _: MemoryStore(),
    "zip": lambda where: ZipStore(where / "a.zip", mode="w"),
    "fsspec": lambda where: FsspecStore.from_url(f"file://{where}/a", storage_options={"auto_mkdir": True}),
    "obstore local": lambda where: ObjectStore(obstore.store.LocalStore(where / "a", mkdir=True)),
    "obstore memory": lambda _: ObjectStore(obstore.store.MemoryStore()),
}
DTYPES = ["u1", "i2", "<f4", ">f4", "f8", "c8", "?", ">i8", "<M8[s]", "<U3", "S5"]
COMPRESSORS = {
    "none": None,
    "zstd": ZstdCodec(level=1),
    "gzip": GzipCodec(level=1),
    "blosc": BloscCodec(cname="lz4", clevel=1),
    "crc32c": [Crc32cCodec()],
    "zstd, crc32c": [ZstdCodec(level=1), Crc32cCodec()],
}


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    shape = tuple(draw(st.lists(st.integers(0, 40), min_size=0, max_size=3)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    chunks = tuple(draw(st.integers(1, max(1, size))) for size in shape)
    shards = None
    if shape and all(shape) and draw(st.booleans()):
        shards = tuple(chunk * draw(st.integers(1, 3)) for chunk in chunks)
    permutation = draw(st.permutations(range(len(shape)))) if draw(st.booleans()) and shape else None
    return {
        "shape": shape,
        "dtype": dtype,
        "chunks": chunks,
        "shards": shards,
        "order": draw(st.sampled_from("CF")),
        "permutation": permutation,
        "endian": draw(st.sampled_from(["little", "big"])),
        "compressors": draw(st.sampled_from(list(COMPRESSORS))),
        "store": draw(st.sampled_from(list(STORES))),
        "empty": draw(st.booleans()),
        "selection": draw(st.sampled_from(["basic", "orthogonal", "mask", "block", "coordinate"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def data_of(situation: dict[str, Any]) -> Any:
    rng = np.random.default_rng(situation["seed"])
    dtype, shape = situation["dtype"], situation["shape"]
    count = int(np.prod(shape, dtype=int))
    if dtype.kind in "US":
        data = np.array([str(n % 97) for n in range(count)], dtype).reshape(shape)
    elif dtype.kind == "M":
        data = rng.integers(0, 10**6, shape).astype(dtype)
    else:
        data = rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    return np.asarray(data, order=situation["order"])


def create(situation: dict[str, Any], where: Path) -> Any:
    filters = [TransposeCodec(order=tuple(situation["permutation"]))] if situation["permutation"] else None
    serializer = BytesCodec(endian=situation["endian"]) if situation["dtype"].kind not in "US" else "auto"
    return zarr.create_array(
        STORES[situation["store"]](where),
        shape=situation["shape"],
        chunks=situation["chunks"],
        shards=situation["shards"],
        dtype=situation["dtype"],
        filters=filters or "auto",
        serializer=serializer,
        compressors=COMPRESSORS[situation["compressors"]],
        config={"write_empty_chunks": situation["empty"]},
    )


def select(array: Any, situation: dict[str, Any]) -> list[Any]:
    """What a user might read of an array, in a form of selecting."""
    rng = np.random.default_rng(situation["seed"])
    shape, kind = situation["shape"], situation["selection"]
    if not shape or not all(shape):
        return [array[...]]
    index = [rng.integers(0, size, 5) for size in shape]
    if kind == "orthogonal":
        return [array.oindex[tuple(np.unique(each) for each in index)]]
    if kind == "mask":
        return [array.get_mask_selection(rng.integers(0, 2, shape).astype(bool))]
    if kind == "block":
        return [array.get_block_selection((0,) * len(shape))]
    if kind == "coordinate":
        return [array.vindex[tuple(index)]]
    return [
        array[tuple(slice(size // 3, None, 2) for size in shape)],
        array[...],
        array[tuple(each[0] for each in index)],
    ]


def whole_life(situation: dict[str, Any], traced: bool) -> tuple[list[Any], Report | None]:
    data = data_of(situation)
    with tempfile.TemporaryDirectory() as directory:
        array = create(situation, Path(directory))
        session = copytrace.session()
        if not traced:
            array[...] = data
            return [*select(array, situation), np.asarray(array[...])], None
        with session:
            array[...] = data
            found = [*select(array, situation), np.asarray(array[...])]
        return found, session.report


def identical(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return (one.dtype, one.shape, one.strides, one.tobytes()) == (
        other.dtype,
        other.shape,
        other.strides,
        other.tobytes(),
    )


def conserves(report: Report) -> None:
    """Every figure of a report is the sum of its parts, and every edge ends in a buffer."""
    named = 0
    for path in report.paths:
        copies = [step for step in path.steps if step.kind in COPY_KINDS]
        assert path.copied_bytes == sum(step.bytes for step in copies)
        assert path.fetched_bytes == sum(step.bytes for step in path.steps if step.kind == "fetch")
        assert path.flushed_bytes == sum(step.bytes for step in path.steps if step.kind == "flush")
        assert path.unattributed_bytes == sum(step.bytes for step in copies if not step.layer)
        identities = {buffer.id for buffer in path.buffers}
        assert len(identities) == len(path.buffers)
        for step in path.steps:
            assert {step.source, step.destination} - {None} <= identities
            assert step.bytes >= 0
            assert step.count >= 1
            assert 0 <= step.avoidable_bytes <= step.bytes
        named += sum(step.bytes for step in copies if step.layer)
        assert (path.copies is None) == (path.payload_bytes == 0)
        assert sum(buffer.peak_bytes for buffer in path.buffers) >= 0
        assert path.errors == 0
    totals = sum(layer.bytes for layer in report.layers if layer.project)
    assert totals == named
    assert named + report.coverage.unattributed_bytes == sum(path.copied_bytes for path in report.paths)
    assert not [note for note in report.coverage.notes if "swallowed" in note]
    assert report.coverage.lost_transfers == 0
    SCHEMA.validate(json.loads(report.to_json()))
    assert Report.from_json(report.to_json()).to_json() == report.to_json()
    for by in ("path", "layer", "site"):
        assert report.to_text(by=by)
        assert report.to_markdown(by=by)


BASE: dict[str, Any] = {
    "shape": (37, 23),
    "dtype": np.dtype("f4"),
    "chunks": (10, 23),
    "shards": None,
    "order": "C",
    "permutation": None,
    "endian": "little",
    "compressors": "none",
    "store": "local",
    "empty": True,
    "selection": "basic",
    "seed": 1,
}


@example(BASE | {"shape": (), "chunks": ()})
@example(BASE | {"shape": (0, 5), "chunks": (1, 5)})
@example(BASE | {"shards": (20, 23), "compressors": "zstd, crc32c", "store": "obstore memory", "selection": "mask"})
@example(BASE | {"order": "F", "permutation": [1, 0], "endian": "big", "store": "zip", "selection": "orthogonal"})
@example(BASE | {"dtype": np.dtype(">f4"), "compressors": "blosc", "store": "fsspec", "selection": "coordinate"})
@example(BASE | {"store": "memory", "compressors": "gzip", "selection": "block", "empty": False})
@settings(
    max_examples=EXAMPLES,
    derandomize=EXAMPLES == 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(situations())
@pytest.mark.filterwarnings("ignore:The data type:zarr.errors.UnstableSpecificationWarning")
def test_a_session_changes_nothing_and_no_byte_is_lost(situation: dict[str, Any]) -> None:
    alone, _ = whole_life(situation, traced=False)
    beside, report = whole_life(situation, traced=True)
    assert all(identical(one, other) for one, other in zip(alone, beside, strict=True))
    assert identical(beside[-1], alone[-1])
    assert report is not None
    conserves(report)
    size = data_of(situation).nbytes
    writes = [path for path in report.paths if path.direction == "write"]
    assert sum(path.payload_bytes for path in writes) == size
    reads = [path for path in report.paths if path.direction == "read"]
    assert sum(path.payload_bytes for path in reads) >= size


@pytest.mark.parametrize("options", [{"transfers": False}, {"memray": False}, {"native": False}], ids=str)
@pytest.mark.parametrize("store", STORES)
def test_no_byte_is_lost_without_a_part(store: str, options: dict[str, bool], tmp_path: Path) -> None:
    situation = BASE | {"shape": (300, 211), "chunks": (100, 211), "store": store, "compressors": "zstd"}
    data = data_of(situation)
    array = create(situation, tmp_path)
    with copytrace.session(**options) as session:
        array[...] = data
        found = array[...]
    assert identical(found, data)
    conserves(session.report)
    assert {path.payload_bytes for path in session.report.paths} == {data.nbytes}
