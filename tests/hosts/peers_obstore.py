"""What obstore's documentation says of each public function, in its four forms: function, method, and both awaited."""

from __future__ import annotations

import asyncio
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, NotModifiedError

type Call = Callable[..., Any]

DATA = np.random.default_rng(5).integers(0, 256, 6_000_011, dtype="u1").tobytes()
SIZES = (0, 1, 4_099, 70_001, len(DATA))
FORMS = ("function", "method", "awaited function", "awaited method")


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    local = request.param == "local"
    return obstore.store.LocalStore(tmp_path / "store", mkdir=True) if local else obstore.store.MemoryStore()


@pytest.fixture(params=FORMS)
def call(request: pytest.FixtureRequest, store: Any) -> Call:
    """``call(name, ...)`` on the store, in one of the forms."""
    form = request.param

    def made(name: str, *args: Any, **options: Any) -> Any:
        name = f"{name}_async" if "awaited" in form else name
        if "method" in form:
            return getattr(store, name)(*args, **options)
        return getattr(obstore, name)(store, *args, **options)

    async def awaited(name: str, *args: Any, **options: Any) -> Any:
        return await made(name, *args, **options)

    return (lambda *args, **options: asyncio.run(awaited(*args, **options))) if "awaited" in form else made


def content(store: Any, path: str) -> bytes:
    return bytes(obstore.get(store, path).bytes())


@pytest.mark.parametrize("size", SIZES)
def test_put_and_get(call: Call, size: int) -> None:
    assert call("put", "key", DATA[:size])["e_tag"]
    found = call("get", "key")
    assert (found.meta["size"], found.meta["path"], found.range) == (size, "key", (0, size))
    assert bytes(found.bytes()) == DATA[:size]


@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "ndarray", "Bytes", "file", "path", "iterator"])
def test_put_of(call: Call, store: Any, tmp_path: Path, kind: str) -> None:
    data = DATA[:70_001]
    path = tmp_path / "source"
    path.write_bytes(data)
    given = {
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "ndarray": np.frombuffer(data, "u1"),
        "Bytes": obstore.Bytes(data),
        "file": io.BytesIO(data),
        "path": path,
        "iterator": iter([data[:10], data[10:]]),
    }[kind]
    call("put", "key", given)
    assert content(store, "key") == data


@pytest.mark.parametrize("chunk_size", [5 << 20, 5_500_001])
def test_put_in_parts(call: Call, store: Any, chunk_size: int) -> None:
    call("put", "key", DATA, use_multipart=True, chunk_size=chunk_size, max_concurrency=3)
    assert content(store, "key") == DATA


def test_put_that_may_not_overwrite(call: Call, store: Any) -> None:
    call("put", "key", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        call("put", "key", b"second", mode="create")
    assert content(store, "key") == b"first"


def test_put_of_what_is_no_buffer(call: Call) -> None:
    with pytest.raises((TypeError, ValueError)):
        call("put", "key", object())


@pytest.mark.parametrize(("start", "end"), [(0, 1), (5, 4_000), (1_000_001, len(DATA))])
def test_get_range(call: Call, start: int, end: int) -> None:
    call("put", "key", DATA)
    assert bytes(call("get_range", "key", start=start, end=end)) == DATA[start:end]
    assert bytes(call("get_range", "key", start=start, length=end - start)) == DATA[start:end]


def test_get_ranges(call: Call) -> None:
    call("put", "key", DATA)
    starts, ends = [0, 10, 2_000_000], [10, 5_000, 4_000_000]
    found = call("get_ranges", "key", starts=starts, ends=ends, coalesce=1 << 20)
    assert [bytes(each) for each in found] == [DATA[start:end] for start, end in zip(starts, ends, strict=True)]


def test_get_with_options(call: Call) -> None:
    call("put", "key", DATA[:1_000])
    assert bytes(call("get", "key", options={"range": (10, 20)}).bytes()) == DATA[10:20]
    assert bytes(call("get", "key", options={"range": {"suffix": 7}}).bytes()) == DATA[993:1_000]
    tag = call("head", "key")["e_tag"]
    with pytest.raises(NotModifiedError):
        call("get", "key", options={"if_none_match": tag})


def test_what_is_missing(call: Call) -> None:
    for name, options in (("get", {}), ("head", {}), ("get_range", {"start": 0, "end": 4})):
        with pytest.raises(FileNotFoundError):
            call(name, "missing", **options)


def test_head(call: Call) -> None:
    call("put", "some/key", DATA[:123])
    found = call("head", "some/key")
    assert (found["path"], found["size"]) == ("some/key", 123)


def test_delete(call: Call, store: Any) -> None:
    for name in "abcd":
        call("put", name, b"x")
    call("delete", "a")
    call("delete", ["b", "c"])
    assert [each["path"] for page in obstore.list(store) for each in page] == ["d"]


def test_copy_and_rename(call: Call, store: Any) -> None:
    call("put", "a", DATA[:70_001])
    call("copy", "a", "b")
    call("rename", "b", "c")
    assert content(store, "c") == content(store, "a") == DATA[:70_001]
    with pytest.raises(AlreadyExistsError):
        call("copy", "a", "c", overwrite=False)
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "b")


def test_list_with_delimiter(call: Call) -> None:
    for name in ("top", "one/a", "one/b", "two/c"):
        call("put", name, b"x")
    found = call("list_with_delimiter")
    assert (sorted(found["common_prefixes"]), [each["path"] for each in found["objects"]]) == (["one", "two"], ["top"])


@pytest.mark.parametrize("chunk_size", [1, 3, 50])
def test_list(store: Any, chunk_size: int) -> None:
    names = [f"a/{number:02}" for number in range(7)]
    for name in [*names, "b/0"]:
        obstore.put(store, name, b"x")
    pages = list(obstore.list(store, "a", chunk_size=chunk_size))
    assert sorted(each["path"] for page in pages for each in page) == names
    assert all(len(page) <= chunk_size for page in pages)


@pytest.mark.parametrize("least", [1, 1 << 20])
def test_stream(store: Any, least: int) -> None:
    obstore.put(store, "key", DATA)

    async def streamed() -> list[bytes]:
        found = await obstore.get_async(store, "key")
        return [bytes(piece) async for piece in found.stream(min_chunk_size=least)]

    pieces = [bytes(piece) for piece in obstore.get(store, "key").stream(min_chunk_size=least)]
    assert b"".join(pieces) == b"".join(asyncio.run(streamed())) == DATA
    assert all(len(piece) >= least for piece in pieces[:-1])


def test_result_is_consumed_once(store: Any) -> None:
    obstore.put(store, "key", b"data")
    found = obstore.get(store, "key")
    assert bytes(found.bytes()) == b"data"
    with pytest.raises(Exception, match=r"disposed|consumed|already"):
        found.bytes()


def test_reader(store: Any) -> None:
    obstore.put(store, "key", b"one\ntwo\nthree")
    reader = obstore.open_reader(store, "key", buffer_size=4)
    assert (reader.size, reader.seekable(), bytes(reader.read(3)), reader.tell()) == (13, True, b"one", 3)
    assert (reader.seek(4), bytes(reader.readline())) == (4, b"two\n")
    assert bytes(reader.readall()) == b"three"

    async def read() -> bytes:
        found = await obstore.open_reader_async(store, "key")
        return bytes(await found.read())

    assert asyncio.run(read()) == b"one\ntwo\nthree"


def test_writer(store: Any) -> None:
    with obstore.open_writer(store, "key", buffer_size=1 << 20) as writer:
        assert writer.write(DATA[:3_000_000]) == 3_000_000
        writer.flush()
        writer.write(DATA[3_000_000:])
        assert not writer.closed()
    assert content(store, "key") == DATA

    async def write() -> None:
        async with obstore.open_writer_async(store, "other") as writer:
            await writer.write(DATA)

    asyncio.run(write())
    assert content(store, "other") == DATA


def test_many_at_once(store: Any) -> None:
    async def both() -> list[bytes]:
        await asyncio.gather(*(obstore.put_async(store, f"k{n}", DATA[n : n + 5_000]) for n in range(20)))
        found = await asyncio.gather(*(obstore.get_async(store, f"k{n}") for n in range(20)))
        return [bytes(await each.bytes_async()) for each in found]

    assert asyncio.run(both()) == [DATA[n : n + 5_000] for n in range(20)]


def test_cancelled(store: Any) -> None:
    obstore.put(store, "key", DATA)

    async def cancel() -> bool:
        task = asyncio.ensure_future(obstore.get_async(store, "key"))
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled() and bytes(await obstore.get_range_async(store, "key", start=0, end=9)) == DATA[:9]

    assert asyncio.run(cancel())


BYTES: dict[str, Callable[[Any], Any]] = {
    "length": len,
    "equality": lambda value: (value == b"Abc 1", value == obstore.Bytes(b"Abc 1"), value == b"x"),
    "item": lambda value: value[1],
    "slice": lambda value: bytes(value[1:4]),
    "contains": lambda value: b"bc" in value,
    "sum": lambda value: bytes(value + b"!"),
    "product": lambda value: bytes(value * 3),
    "repr": repr,
    "hash": lambda value: hash(value) == hash(obstore.Bytes(b"Abc 1")),
    "memoryview": lambda value: (memoryview(value).tobytes(), memoryview(value).readonly),
    "ndarray": lambda value: np.frombuffer(value, "u1").sum(),
    "upper": lambda value: bytes(value.upper()),
    "lower": lambda value: bytes(value.lower()),
    "removeprefix": lambda value: bytes(value.removeprefix(b"A")),
    "removesuffix": lambda value: bytes(value.removesuffix(b"1")),
    "kinds": lambda value: [getattr(value, name)() for name in dir(value) if name.startswith("is")],
    "to_bytes": lambda value: value.to_bytes(),
    "write": lambda value: io.BytesIO().write(value),
    "writeable": lambda value: memoryview(value).__setitem__(0, 1),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_as_those_of_python(store: Any, name: str) -> None:
    obstore.put(store, "key", b"Abc 1")

    def outcome(value: Any) -> Any:
        try:
            return BYTES[name](value)
        except Exception as error:
            return type(error).__name__

    found = outcome(obstore.get(store, "key").bytes())
    assert found == outcome(obstore.Bytes(b"Abc 1"))
    if name not in ("repr", "hash", "to_bytes"):
        assert found == outcome(b"Abc 1") or name in ("equality", "contains", "sum", "product", "kinds")


def test_sign_needs_a_store_that_signs(store: Any) -> None:
    with pytest.raises(Exception, match=r".+"):
        obstore.sign(store, "GET", "key", expires_in=None)


@pytest.mark.parametrize("url", ["s3://bucket/key", "file:///tmp/x", "memory:///x", "gs://bucket/x", "az://c/x"])
def test_parse_scheme(url: str) -> None:
    assert obstore.parse_scheme(url) in ("s3", "local", "memory", "gcs", "azure")


def test_all_public_functions_are_called_here() -> None:
    source = inspect.getsource(sys.modules[__name__])
    names: Iterator[str] = (name.removesuffix("_async") for name in vars(obstore) if callable(vars(obstore)[name]))
    assert [name for name in names if not name.startswith("_") and name not in source] == []
