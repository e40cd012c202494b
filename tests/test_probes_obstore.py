"""obstore's probes: functions and methods, sync and async, on local, memory and S3 stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

obstore = pytest.importorskip("obstore")

from copytrace.probes.obstore import PROBE  # noqa: E402
from spooled import recording  # noqa: E402

SIZE = 6 * 1024 * 1024 + 17
"""More than the 5 MiB from which obstore uploads in parts."""
DATA = (b"0123456789abcdefghijklmnopqrstu\n" * (SIZE // 32 + 1))[:SIZE]


class _Bucket(BaseHTTPRequestHandler):
    """As much of S3 as a put and a get need."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes] = {}  # noqa: RUF012
    parts: dict[tuple[str, int], bytes] = {}  # noqa: RUF012

    def log_message(self, *_arguments: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"tag"', **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if query.startswith("uploads"):
            self._answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        else:
            self.objects[path] = b"".join(self.parts[key] for key in sorted(self.parts) if key[0] == path)
            self._answer(200, b'<CompleteMultipartUploadResult><ETag>"tag"</ETag></CompleteMultipartUploadResult>')

    def do_PUT(self) -> None:
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "partNumber=" in query:
            self.parts[path, int(query.partition("partNumber=")[2].partition("&")[0])] = body
        else:
            self.objects[path] = body
        self._answer(200)

    def do_GET(self) -> None:
        body = self.objects[self.path.partition("?")[0]]
        modified = {"Last_Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            part = body[int(first) : int(last) + 1]
            self._answer(206, part, Content_Range=f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}", **modified)
        else:
            self._answer(200, body, **modified)

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["LocalStore", "MemoryStore", "S3Store"])
def store(request: pytest.FixtureRequest, tmp_path: Path, bucket: str) -> Any:
    if request.param == "LocalStore":
        (tmp_path / "local").mkdir()
        return obstore.store.LocalStore(tmp_path / "local")
    if request.param == "MemoryStore":
        return obstore.store.MemoryStore()
    return obstore.store.S3Store(
        "bucket",
        endpoint=bucket,
        client_options={"allow_http": True},
        access_key_id="key",
        secret_access_key="secret",
        region="us-east-1",
        virtual_hosted_style_request=False,
    )


def everything(store: Any) -> list[Any]:
    """Every function and method that carries bytes."""
    got: list[Any] = []

    def add(value: Any) -> None:
        got.append([bytes(item) for item in value] if isinstance(value, list) else bytes(value))

    obstore.put(store, "a", DATA)
    store.put("b", memoryview(DATA)[:1001])
    add(obstore.get(store, "a").bytes())
    add(store.get("b").bytes())
    add(obstore.get(store, "b").buffer())
    add(obstore.get_range(store, "a", start=3, end=1003))
    add(store.get_range("a", start=3, length=7))
    add(obstore.get_ranges(store, "a", starts=[0, 50], ends=[10, 60]))
    add(store.get_ranges("a", starts=[0, 50], lengths=[10, 10]))
    add(b"".join(bytes(part) for part in obstore.get(store, "a").stream(min_chunk_size=1024 * 1024)))
    add(b"".join(bytes(part) for part in obstore.get(store, "a")))
    add(obstore.get(store, "b").bytes().to_bytes())
    reader = obstore.open_reader(store, "a")
    add(reader.read(100))
    add(reader.readline())
    add(reader.readlines()[0])
    add(obstore.open_reader(store, "b").readall())
    with obstore.open_writer(store, "w") as writer:
        writer.write(DATA[:1009])
        writer.flush()
    closed = obstore.open_writer(store, "w2")
    closed.write(b"abc")
    closed.close()

    async def main() -> None:
        await obstore.put_async(store, "c", DATA)
        await store.put_async("d", DATA[:1001])
        add(await (await obstore.get_async(store, "c")).bytes_async())
        add(await (await store.get_async("d")).bytes_async())
        add(await (await obstore.get_async(store, "d")).buffer_async())
        add(await obstore.get_range_async(store, "c", start=3, end=1003))
        add(await store.get_range_async("c", start=3, length=7))
        add(await obstore.get_ranges_async(store, "c", starts=[0, 50], ends=[10, 60]))
        add(await store.get_ranges_async("c", starts=[0, 50], lengths=[10, 10]))
        add(b"".join([bytes(part) async for part in (await obstore.get_async(store, "c")).stream()]))
        add(b"".join([bytes(part) async for part in await obstore.get_async(store, "c")]))
        reader = await obstore.open_reader_async(store, "c")
        add(await reader.read(100))
        add(await reader.readall())
        async with obstore.open_writer_async(store, "v") as writer:
            await writer.write(DATA[:1009])
            await writer.flush()

    asyncio.run(main())
    return got


class TestEverySite:
    def test_works_changes_nothing_and_is_restored(self, tmp_path: Path, store: Any) -> None:
        bare = everything(store)
        raw = {name: getattr(obstore, name) for name in dir(obstore)}
        methods = dict(vars(obstore.store.ObjectStoreMethods))
        kind = type(obstore.get(store, "b"))
        of_result = {
            name: vars(kind).get(name)
            for name in ("bytes", "bytes_async", "buffer", "buffer_async", "stream", "__iter__")
        }
        with recording(tmp_path / "spool") as recorded:
            got = everything(store)
            assert recorded.attachment is not None
            (found,) = [found for found in recorded.attachment.statuses() if found.name == "obstore"]
        assert got == bare
        assert found.status == "attached", found.reason
        assert [site for site in found.sites if site["status"] != "attached"] == []
        assert sorted({site["name"] for site in found.sites} - set(recorded.names)) == []
        assert {name: getattr(obstore, name) for name in dir(obstore)} == raw
        assert all(getattr(obstore, name) is value for name, value in raw.items())
        assert all(vars(obstore.store.ObjectStoreMethods)[name] is value for name, value in methods.items())
        assert all(vars(kind).get(name) is value for name, value in of_result.items())

    def test_sizes(self, tmp_path: Path, store: Any) -> None:
        with recording(tmp_path / "spool") as recorded:
            everything(store)
        name = type(store).__name__
        puts = recorded.named("obstore.put") + recorded.named("obstore.put_async")
        assert sorted(span.inputs[0] for span in puts) == [1001, 1001, SIZE, SIZE]
        assert {(span.attributes["store"], span.direction) for span in puts} == {(name, "write")}
        assert {span.attributes["key"] for span in puts} == set("abcd")
        assert [span.outputs for span in recorded.named("obstore.get_range")] == [[1000], [7]]
        assert [span.outputs for span in recorded.named("obstore.get_ranges_async")] == [[10, 10], [10, 10]]
        assert sorted(span.outputs[0] for span in recorded.named("obstore.GetResult.bytes")) == [1001, 1001, SIZE]
        assert [span.outputs for span in recorded.named("obstore.GetResult.bytes_async")] == [[SIZE], [1001]]
        for stream in ("__next__", "__anext__"):
            parts = recorded.named(f"obstore.BytesStream.{stream}")
            assert sum(sum(span.outputs) for span in parts) == 2 * SIZE
        assert [span.inputs for span in recorded.named("obstore.WritableFile.write")] == [[1009], [3], [1009]]
        assert not [span for span in recorded.spans if span.error and not span.name.endswith(("__next__", "__anext__"))]


class TestAsync:
    def test_future_is_an_asyncio_future_as_before(self, tmp_path: Path) -> None:
        store = obstore.store.MemoryStore()

        async def main() -> None:
            made = obstore.put_async(store, "a", b"x" * 100)
            assert asyncio.isfuture(made)
            assert asyncio.ensure_future(made) is made
            await made
            both = await asyncio.gather(*(obstore.get_range_async(store, "a", start=0, end=n) for n in (3, 5)))
            assert [len(found) for found in both] == [3, 5]
            assert len(await asyncio.wait_for(obstore.get_range_async(store, "a", start=0, end=9), 10)) == 9

        with recording(tmp_path, PROBE) as recorded:
            asyncio.run(main())
        spans = recorded.named("obstore.get_range_async")
        assert sorted(span.outputs for span in spans) == [[3], [5], [9]]
        assert all(not span.error for span in spans)

    def test_span_is_open_until_the_future_is_done_and_not_innermost_meanwhile(self, tmp_path: Path) -> None:
        store = obstore.store.MemoryStore()

        async def main() -> None:
            made = obstore.put_async(store, "a", b"x" * 100)
            waiting.append(recorded.marks[-1])
            await made

        waiting: list[tuple[int, int, int]] = []
        with recording(tmp_path, PROBE) as recorded:
            asyncio.run(main())
        span = recorded.one("obstore.put_async")
        (sequence, _, innermost), *_ = waiting
        assert span.enter < sequence < span.exit
        assert innermost == 0

    def test_errors(self, tmp_path: Path) -> None:
        store = obstore.store.MemoryStore()

        async def main() -> None:
            with pytest.raises(FileNotFoundError):
                await obstore.get_async(store, "missing")

        with recording(tmp_path, PROBE) as recorded:
            asyncio.run(main())
            with pytest.raises(FileNotFoundError):
                obstore.get(store, "missing")
        assert [(span.name, span.error) for span in recorded.spans] == [
            ("obstore.get_async", True),
            ("obstore.get", True),
        ]


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, lambda data: obstore.Bytes(data)])
def test_forms_of_input(tmp_path: Path, form: Callable[[bytes], Any]) -> None:
    store = obstore.store.MemoryStore()
    value = form(b"y" * 1013)
    with recording(tmp_path, PROBE) as recorded:
        obstore.put(store, "a", value)
        store.put("b", file=value)
    assert [span.inputs for span in recorded.spans] == [[1013]] * 3


def test_input_that_is_read_by_obstore(tmp_path: Path) -> None:
    store = obstore.store.MemoryStore()
    (tmp_path / "file").write_bytes(b"z" * 1013)
    with recording(tmp_path / "spool", PROBE) as recorded:
        obstore.put(store, "a", tmp_path / "file")
        obstore.put(store, "b", iter([b"1" * 10, b"2" * 10]))
    assert [span.inputs for span in recorded.spans] == [[], []]
    assert bytes(store.get("b").bytes()) == b"1" * 10 + b"2" * 10
