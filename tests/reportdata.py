"""Reports written by hand, as a real session would make them, for the tests of renderings and command line."""

from __future__ import annotations

from copytrace.model import Buffer, Coverage, LayerTotal, Path, ProbeStatus, SiteRef, Step
from copytrace.report import Report

MIB = 1 << 20
MULTIPART = {
    "remedy": "fixed in obstore 0.11.1 (obstore#771): upgrade obstore; a buffer is then uploaded from where it lies",
    "remedy_url": "https://github.com/developmentseed/obstore/issues/771",
}

PROBES = (
    ProbeStatus("primitives", "python", "3.12.1", "attached", sites=({"name": "bytes.join", "status": "attached"},)),
    ProbeStatus("zarr", "zarr", "3.3.0", "attached", sites=({"name": "Array.__setitem__", "status": "attached"},)),
    ProbeStatus(
        "obstore",
        "obstore",
        "0.11.0",
        "partial",
        sites=({"name": "obstore.put", "status": "attached"}, {"name": "obstore.put_file", "status": "missing"}),
    ),
    ProbeStatus("s3fs", "s3fs", "", "not-installed", "no distribution s3fs"),
    ProbeStatus("tensorstore", "tensorstore", "9.0", "unsupported", "needs <1"),
)

ENVIRONMENT = {
    "python": "3.12.1",
    "platform": "Linux-6.1-x86_64-with-glibc2.36",
    "packages": {"zarr": "3.3.0", "numcodecs": "0.17.1", "obstore": "0.11.0", "numpy": "2.3.1"},
}

COVERAGE = Coverage(
    memray=True,
    native=True,
    transfers=True,
    lost_transfers=0,
    probes=PROBES,
    unattributed_bytes=0,
    off_path_bytes=12_345_678,
    off_path_moves=1234,
    explained=0.9971,
    notes=(),
)


def site(function: str, file: str = "", line: int = 0, url: str = "") -> SiteRef:
    return SiteRef(function, file, line, url)


def step(
    kind: str,
    source: str | None,
    destination: str | None,
    layer: str,
    where: SiteRef,
    nbytes: int,
    payload: int,
    *,
    project: str = "",
    primitive: str = "",
    called_from: tuple[SiteRef, ...] = (),
    count: int = 1,
    at_peak: int = 0,
    held_ms: float | None = None,
    evidence: str = "transfer",
    avoidable: int = 0,
    required: bool = False,
    remedy: str = "",
    remedy_url: str = "",
) -> Step:
    return Step(
        kind,
        source,
        destination,
        layer,
        project or layer.partition(".")[0],
        where,
        primitive,
        called_from,
        count,
        nbytes,
        nbytes / payload if payload else None,
        at_peak,
        held_ms,
        evidence,
        avoidable,
        required,
        remedy,
        remedy_url,
    )


def path(
    direction: str,
    api: str,
    store: str,
    codecs: tuple[str, ...],
    payload: int,
    steps: tuple[Step, ...],
    buffers: tuple[Buffer, ...],
    *,
    best: int = 0,
    avoidable: int = 0,
    extra: int = 0,
    operations: int = 1,
    chunks: int = 1,
    errors: int = 0,
    unattributed: int = 0,
    explained: float | None = 1.0,
    read_amplification: float | None = None,
    decode_amplification: float | None = None,
    notes: tuple[str, ...] = (),
) -> Path:
    copied = sum(one.bytes for one in steps if one.kind not in ("fetch", "flush"))
    fetched, flushed = (sum(one.bytes for one in steps if one.kind == kind) for kind in ("fetch", "flush"))
    short_api = api.removesuffix(".__setitem__").removesuffix(".__getitem__")
    label = " . ".join(part for part in (direction, short_api, store, "+".join(codecs)) if part)
    return Path(
        label=label,
        direction=direction,
        api=api,
        store=store,
        codecs=codecs,
        operations=operations,
        chunks=chunks,
        errors=errors,
        payload_bytes=payload,
        copied_bytes=copied,
        copies=copied / payload if payload else None,
        extra_at_peak_bytes=extra,
        extra_at_peak=extra / payload if payload else None,
        best_achievable=best,
        avoidable=avoidable / payload if payload else None,
        fetched_bytes=fetched,
        flushed_bytes=flushed,
        read_amplification=read_amplification,
        decode_amplification=decode_amplification,
        unattributed_bytes=unattributed,
        explained=explained,
        buffers=buffers,
        steps=steps,
        notes=notes,
    )


def report(*paths: Path, coverage: Coverage = COVERAGE, notes: tuple[str, ...] = (), label: str = "example") -> Report:
    """A report of ``paths`` whose layer totals agree with their steps."""
    layers: dict[tuple[str, str], dict[str, list[Step]]] = {}
    for one in paths:
        for move in one.steps:
            if move.kind not in ("fetch", "flush"):
                layers.setdefault((move.layer, move.project), {}).setdefault(one.label, []).append(move)
    payloads = {one.label: one.payload_bytes for one in paths}
    totals = tuple(
        LayerTotal(
            layer,
            project,
            {
                label: sum(move.bytes for move in moves) / payloads[label]
                for label, moves in found.items()
                if payloads[label]
            },
            sum(move.bytes for moves in found.values() for move in moves),
            sum(move.count for moves in found.values() for move in moves),
        )
        for (layer, project), found in layers.items()
    )
    return Report(ENVIRONMENT, coverage, tuple(paths), totals, label=label, spans=42, records=1234, notes=notes)


SCATTER = site(
    "zarr.core.buffer.cpu.NDBuffer.__setitem__",
    "zarr/core/buffer/cpu.py",
    191,
    "https://github.com/zarr-developers/zarr-python/blob/v3.3.0/src/zarr/core/buffer/cpu.py#L191",
)
SCATTER_CALLERS = (
    site("zarr.core.chunk_utils.scatter_chunk", "zarr/core/chunk_utils.py", 88),
    site("zarr.core.codec_pipeline.BatchedCodecPipeline.read_batch", "zarr/core/codec_pipeline.py", 412),
    site("__main__.load", "load.py", 7),
)


def zstd_read() -> Path:
    """The example of the issue: object store, zstd, one chunk; 2 copies where 1 would do."""
    payload, encoded = 16 * MIB, 14_931_722
    return path(
        "read",
        "zarr.Array.__getitem__",
        "ObjectStore(LocalStore)",
        ("bytes", "zstd"),
        payload,
        (
            step(
                "fetch",
                "b1",
                "b2",
                "obstore",
                site("object_store::local::read_range", "_obstore.abi3.so"),
                encoded,
                payload,
                at_peak=encoded,
                held_ms=12.5,
            ),
            step(
                "decode",
                "b2",
                "b3",
                "numcodecs",
                site("numcodecs.zstd.Zstd.decode", "numcodecs/zstd.pyx", 210),
                payload,
                payload,
                at_peak=payload,
                held_ms=4.25,
                called_from=(site("zarr.codecs.zstd.ZstdCodec._decode_sync", "zarr/codecs/zstd.py", 82),),
            ),
            step(
                "scatter",
                "b3",
                "b4",
                "zarr.buffer",
                SCATTER,
                payload,
                payload,
                primitive="ndarray.__setitem__",
                evidence="call",
                avoidable=payload,
                called_from=SCATTER_CALLERS,
            ),
        ),
        (
            Buffer("b1", "io", "file", "obstore", site(""), encoded, 0),
            Buffer("b2", "extra", "fetched", "obstore", site("object_store::local::read_range"), encoded, encoded),
            Buffer("b3", "extra", "decoded", "numcodecs", site("numcodecs.zstd.Zstd.decode"), payload, payload),
            Buffer("b4", "result", "result", "zarr.array", site("zarr.core.array.Array._get"), payload, payload),
            Buffer("b5", "temporary", "workspace", "numcodecs", site("ZSTD_createDCtx"), 1_331_200, 1_331_200),
        ),
        best=1,
        avoidable=payload,
        extra=encoded + payload + 1_331_200,
        read_amplification=encoded / payload,
        decode_amplification=1.0,
    )


def multipart_write() -> Path:
    """obstore 0.11.0: an uncompressed write copied twice, in parts, half of it held."""
    payload = 100_000_000
    scratch = site("_obstore::put::put_multipart_inner", "_obstore.abi3.so")
    copied = step(
        "copy",
        "b1",
        "b2",
        "obstore",
        scratch,
        payload,
        payload,
        count=20,
        at_peak=52_428_800,
        avoidable=payload,
        **MULTIPART,
    )
    joined = step(
        "join",
        "b2",
        "b3",
        "obstore",
        site("object_store::upload::WriteMultipart::put", "_obstore.abi3.so"),
        payload,
        payload,
        count=20,
        at_peak=5_242_880,
        evidence="native",
        avoidable=payload,
        **MULTIPART,
    )
    flushed = step(
        "flush", "b3", "b4", "obstore", site("object_store::local::LocalUpload::put_part"), payload, payload, count=20
    )
    return path(
        "write",
        "zarr.Array.__setitem__",
        "ObjectStore(LocalStore)",
        ("bytes",),
        payload,
        (copied, joined, flushed),
        (
            Buffer("b1", "source", "caller's array", "user", site("__main__.main", "write.py", 12), payload, payload),
            Buffer("b2", "extra", "scratch parts", "obstore", scratch, 115_343_360, 52_428_800, 22),
            Buffer("b3", "extra", "parts", "obstore", joined.site, payload, 5_242_880, 20),
            Buffer("b4", "io", "file", "obstore", site(""), payload, 0),
        ),
        avoidable=2 * payload,
        extra=57_671_680,
    )


def icechunk_read() -> Path:
    """A read in 2,050 pieces with two sources that meet, an unknown one, and moves that nothing explains."""
    payload = 16 * MIB
    return path(
        "read",
        "zarr.Array.__getitem__",
        "IcechunkStore",
        ("bytes",),
        payload,
        (
            step(
                "fetch",
                None,
                "b1",
                "icechunk",
                site("object_store::local::chunked_stream"),
                payload,
                payload,
                count=2048,
            ),
            step(
                "join",
                "b1",
                "b2",
                "icechunk",
                site("icechunk::asset_manager::async_reader_to_bytes"),
                payload,
                payload,
                count=2050,
                at_peak=payload,
                evidence="native",
                avoidable=payload,
            ),
            step(
                "copy",
                None,
                "b3",
                "icechunk",
                site("_icechunk_python::store::PyStore::get"),
                payload,
                payload,
                evidence="inferred",
                avoidable=payload,
            ),
            step(
                "scatter",
                "b2",
                "b4",
                "zarr.buffer",
                SCATTER,
                payload,
                payload,
                avoidable=payload,
                called_from=SCATTER_CALLERS,
            ),
        ),
        (
            Buffer("b1", "extra", "pieces", "icechunk", site("chunked_stream"), payload, 8192, 2048),
            Buffer("b2", "extra", "joined", "icechunk", site("async_reader_to_bytes"), payload, payload),
            Buffer("b3", "extra", "bytes", "icechunk", site("PyStore::get"), payload, payload),
            Buffer("b4", "result", "result", "zarr.array", site("Array._get"), payload, payload),
            Buffer("b5", "extra", "lost", "icechunk", site("icechunk::change_set::forgotten"), 9_000_000, 9_000_000),
        ),
        avoidable=3 * payload,
        extra=2 * payload + 9_008_192,
        unattributed=1_234_567,
        explained=0.93,
        notes=("pyarrow takes 1 GiB pools: no allocation of the payload's size exists",),
    )


def sharded_read() -> Path:
    """A small slice of a large shard: read amplification, one failed operation."""
    payload = 4096
    return path(
        "read",
        "zarr.Array.__getitem__",
        "LocalStore",
        ("sharding_indexed", "bytes", "blosc"),
        payload,
        (
            step(
                "fetch",
                "b1",
                "b2",
                "zarr.storage",
                site("zarr.storage._local._get", "zarr/storage/_local.py", 41),
                1_048_576,
                payload,
                count=3,
            ),
            step("decode", "b2", "b3", "numcodecs", site("numcodecs.blosc.Blosc.decode"), 4_194_304, payload, count=3),
            step("scatter", "b3", "b4", "zarr.buffer", SCATTER, payload, payload, count=3),
        ),
        (
            Buffer("b1", "io", "file", "zarr.storage", site(""), 1_048_576, 0),
            Buffer("b2", "extra", "fetched", "zarr.storage", site("zarr.storage._local._get"), 1_048_576, 0, 3),
            Buffer("b3", "extra", "decoded", "numcodecs", site("numcodecs.blosc.Blosc.decode"), 4_194_304, 0, 3),
            Buffer("b4", "result", "result", "zarr.array", site("Array._get"), payload, payload),
        ),
        best=1,
        operations=3,
        chunks=3,
        errors=1,
        read_amplification=256.0,
        decode_amplification=1024.0,
    )


def memory_write() -> Path:
    """MemoryStore must own its bytes: one copy, required."""
    payload = 1_000_003
    owned = site("zarr.storage._memory.MemoryStore.set", "zarr/storage/_memory.py", 101)
    return path(
        "write",
        "zarr.Array.__setitem__",
        "MemoryStore",
        ("bytes",),
        payload,
        (
            step(
                "copy",
                "b1",
                "b2",
                "zarr.storage",
                owned,
                payload,
                payload,
                primitive="ndarray.copy",
                required=True,
                at_peak=payload,
            ),
        ),
        (
            Buffer("b1", "source", "caller's array", "user", site("__main__.main"), payload, payload),
            Buffer("b2", "extra", "stored", "zarr.storage", owned, payload, payload, required=True),
        ),
        best=1,
        extra=payload,
    )


def clean_write() -> Path:
    """A write that copies nothing."""
    payload = 16 * MIB
    return path(
        "write",
        "zarr.Array.__setitem__",
        "LocalStore",
        ("bytes",),
        payload,
        (
            step(
                "flush",
                "b1",
                "b2",
                "zarr.storage",
                site("zarr.storage._local._put", "zarr/storage/_local.py", 77),
                payload,
                payload,
            ),
        ),
        (
            Buffer("b1", "source", "caller's array", "user", site("__main__.main"), payload, payload),
            Buffer("b2", "io", "file", "zarr.storage", site(""), payload, 0),
        ),
    )


def empty_write() -> Path:
    """A zero-size region: no ratio anywhere."""
    return path(
        "write", "zarr.Array.__setitem__", "LocalStore", ("bytes", "zstd"), 0, (), (), best=1, chunks=0, explained=None
    )


HOSTILE = "evil|`x`<script>alert(1)</script>\x1b[31m\n| a | b |\u202e@team #1 \\| **bold** 数据" + "é" * 3


def hostile_read() -> Path:
    """Names as nasty as user code can make them."""
    payload = 1_234_567
    where = site(f"__main__.{HOSTILE}", f"{HOSTILE}.py", 3, "https://example.org/a b|c)`<x>")
    return path(
        "read",
        f"demo.{HOSTILE}",
        f"Store({HOSTILE})",
        (HOSTILE,),
        payload,
        (
            step(
                "copy",
                None,
                None,
                HOSTILE,
                where,
                payload,
                payload,
                evidence="stack",
                avoidable=payload // 2,
                called_from=(site(HOSTILE, HOSTILE, 1), site("", "", 0)),
            ),
        ),
        (),
        avoidable=payload // 2,
        notes=(HOSTILE,),
    )


def many_rows(rows: int = 40, name: str = "layer") -> Path:
    """A path of ``rows`` copies, each by another function."""
    payload = 10_000_000
    steps = tuple(
        step(
            "copy",
            f"b{number}",
            f"b{number + 1}",
            f"{name}{number % 7}",
            site(f"package.module.Class.method_{number}", "package/module.py", number),
            payload,
            payload,
            avoidable=payload if number else 0,
        )
        for number in range(rows)
    )
    buffers = (
        Buffer("b0", "source", "array", "user", site("__main__"), payload, payload),
        *(
            Buffer(f"b{number + 1}", "extra", "copy", one.layer, one.site, payload, 0)
            for number, one in enumerate(steps)
        ),
    )
    return path("write", "package.put", "Store", (), payload, steps, buffers, best=1, avoidable=payload * (rows - 1))


def everything() -> Report:
    """All the paths above in one report."""
    return report(
        multipart_write(),
        zstd_read(),
        icechunk_read(),
        sharded_read(),
        memory_write(),
        clean_write(),
        empty_write(),
        hostile_read(),
        many_rows(),
    )
