"""Hours of mixed work, alone and in sessions: nothing changes, nothing grows, nothing stays behind.

    python tests/soak.py --minutes 60 [--seed N] [--out FIGURES.json]

Each round draws jobs, runs them alone and then in sessions, and compares what they returned or raised. A thread that
knows nothing of sessions works meanwhile. After a round the process is measured: resident memory, descriptors, threads,
and every attribute that a probe could have replaced. Exits with 1 when something differed, grew or stayed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import obstore
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore

import copytrace
from meeting import Meets
from oracle.snapshot import attributes, changes

type Outcome = list[str]

MOST_GROWTH = 24 << 20
"""Bytes of resident memory that the last quarter of the rounds may lie above the second quarter; a single Python object
kept for each chunk of an hour's work would be more."""
PROTOTYPE = default_buffer_prototype()
M_MMAP_THRESHOLD = -3


class InjectedError(Exception):
    """Raised on purpose."""


def unreliable(store: Any, fails: str = "", stalls: str = "") -> Meets:
    """Raises at keys that end in one way, and waits without end at others."""

    async def meet(key: str) -> None:
        if fails and key.endswith(fails):
            await asyncio.sleep(0)
            raise InjectedError(key)
        if stalls and key.endswith(stalls):
            await asyncio.Event().wait()

    return Meets(meet, store)


def digest(value: Any) -> str:
    """A short text that is the same for equal results."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha1(value.tobytes()).hexdigest()[:12]}"
    return str(value)


def attempt(work: Callable[[], Any]) -> str:
    """What ``work`` returns or raises, as a text."""
    try:
        return digest(work())
    except Exception as error:
        return digest(error)


def data_of(rng: random.Random, size: int) -> Any:
    dtype = rng.choice(["u1", "i2", ">f4", "f8"])
    return np.random.default_rng(rng.randrange(1 << 32)).integers(0, 100, size).astype(dtype)


def store_in(rng: random.Random, where: Path) -> Any:
    name = rng.choice(["local", "memory", "obstore local", "obstore memory", "fsspec"])
    if name == "local":
        return LocalStore(where / "local")
    if name == "obstore local":
        return ObjectStore(obstore.store.LocalStore(where / "obstore", mkdir=True))
    if name == "fsspec":
        return FsspecStore.from_url(f"file://{where}/fsspec", storage_options={"auto_mkdir": True})
    return MemoryStore() if name == "memory" else ObjectStore(obstore.store.MemoryStore())


def array_in(rng: random.Random, store: Any, data: Any) -> Any:
    compressor = rng.choice([None, ZstdCodec(level=1), GzipCodec(level=1), BloscCodec(cname="lz4"), Crc32cCodec()])
    chunks = max(1, len(data) // rng.randrange(1, 9))
    return zarr.create_array(store, shape=data.shape, chunks=(chunks,), dtype=data.dtype, compressors=compressor)


# --- jobs ------------------------------------------------------------------------------------------------------------


def round_trip(rng: random.Random, where: Path) -> Outcome:
    data = data_of(rng, rng.choice([0, 1, 4_099, 300_007]))
    array = array_in(rng, store_in(rng, where), data)
    low, high = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    array[:] = data
    return [digest(array[:]), digest(array[low:high]), attempt(lambda: array[len(data) + 5])]


def store_raises(rng: random.Random, where: Path) -> Outcome:
    data = data_of(rng, 60_000)
    store = unreliable(store_in(rng, where), fails="c/1")
    array = zarr.create_array(store, shape=data.shape, chunks=(20_000,), dtype=data.dtype, compressors=None)
    wrote = attempt(lambda: array.__setitem__(slice(None), data + 1))
    array[:20_000] = data[:20_000] + 1
    return [wrote, digest(array[:20_000]), attempt(lambda: array[:])]


def codec_raises(rng: random.Random, where: Path) -> Outcome:
    data = data_of(rng, 50_000)
    store = LocalStore(where / "local")
    compressor = rng.choice([ZstdCodec(level=1), Crc32cCodec()])
    array = zarr.create_array(store, shape=data.shape, chunks=data.shape, dtype=data.dtype, compressors=compressor)
    array[:] = data + 1
    chunk = where / "local" / "c" / "0"
    chunk.write_bytes(b"\0" * 100)
    return [attempt(lambda: type(_raised(lambda: array[:])).__name__), attempt(lambda: numcodecs.Zstd().decode(b"no"))]


def _raised(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


def tasks(rng: random.Random, where: Path) -> Outcome:
    """Tasks that end, time out, are cancelled and raise, on one loop."""
    data = data_of(rng, 40_000) + 1
    stored = store_in(rng, where)
    array_in(rng, stored, data)[:] = data

    async def one(number: int) -> str:
        kind = (number * 7 + len(data)) % 4
        marks = {"stalls": "c/0"} if kind in (1, 2) else {"fails": "c/0"} if kind == 3 else {}
        array = await zarr.api.asynchronous.open_array(store=unreliable(stored, **marks))
        try:
            if kind == 1:
                async with asyncio.timeout(0.01):
                    await array.getitem(slice(None))
            task = asyncio.ensure_future(array.getitem(slice(None)))
            if kind == 2:
                await asyncio.sleep(0)
                task.cancel()
            return digest(await task)
        except (TimeoutError, asyncio.CancelledError, InjectedError) as error:
            return f"{number} {digest(error)}"

    async def main() -> Outcome:
        return list(await asyncio.gather(*(one(number) for number in range(8))))

    return asyncio.run(main())


def loop_stopped(rng: random.Random, where: Path) -> Outcome:
    """A loop that stops in the middle of a read, goes on and is closed."""
    data = data_of(rng, 40_000) + 1
    store = LocalStore(where / "local")
    array = array_in(rng, store, data)
    array[:] = data
    loop = asyncio.new_event_loop()
    try:
        reading = loop.create_task(array.async_array.getitem(slice(None)))
        stalled = loop.create_task(unreliable(store, stalls="zarr.json").get("zarr.json", PROTOTYPE))
        loop.call_soon(loop.stop)
        loop.run_forever()
        found = [digest(loop.run_until_complete(reading))]
        stalled.cancel()
        loop.run_until_complete(asyncio.wait([stalled]))
        return [*found, str(stalled.cancelled())]
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def generators(rng: random.Random, where: Path) -> Outcome:  # noqa: ARG001
    data = data_of(rng, 30_000)
    store = MemoryStore()
    array_in(rng, store, data)[:] = data + 1

    def pieces() -> Iterator[int]:
        with copytrace.operation("pieces", payload_bytes=data.nbytes):
            for start in range(0, len(data), 1000):
                yield len(bytes(memoryview(data[start : start + 1000])))

    async def listed() -> int:
        async for _ in store.list():
            return 1
        return 0

    started = pieces()
    found = [digest(next(started)), digest(next(started))]
    started.close()
    return [*found, digest(sum(pieces())), digest(asyncio.run(listed()))]


def codecs(rng: random.Random, where: Path) -> Outcome:  # noqa: ARG001
    data = data_of(rng, 200_003)
    codec = rng.choice([numcodecs.Zstd(), numcodecs.GZip(1), numcodecs.Blosc(), numcodecs.LZ4(), numcodecs.Shuffle(2)])
    whole = attempt(lambda: np.frombuffer(codec.decode(codec.encode(data)), data.dtype))
    return [whole, attempt(lambda: codec.encode(object()))]


def objects(rng: random.Random, where: Path) -> Outcome:
    store = obstore.store.LocalStore(where / "objects", mkdir=True)
    blob = data_of(rng, rng.choice([10, 70_001, 6_000_011])).tobytes()
    obstore.put(store, "blob", blob)
    found = bytes(obstore.get_range(store, "blob", start=3, end=10))
    whole = hashlib.sha1(obstore.get(store, "blob").bytes()).hexdigest()

    async def both() -> list[Any]:
        got = [obstore.get_range_async(store, "blob", start=n, end=n + 4) for n in range(3)]
        return [bytes(each) for each in await asyncio.gather(*got)]

    missing = type(_raised(lambda: obstore.get(store, "missing"))).__name__
    return [digest(found), whole, digest(asyncio.run(both())), missing]


def child(seed: int) -> str:
    """The work of another process."""
    data = np.random.default_rng(seed).integers(0, 9, 50_000)
    codec = numcodecs.Zstd()
    return digest(np.frombuffer(codec.decode(codec.encode(data)), data.dtype))


def forked(rng: random.Random, where: Path) -> Outcome:  # noqa: ARG001
    """Children that end, are killed and run another program."""
    found = []
    for ending in ("exit", "kill", "exec"):
        seed = rng.randrange(1 << 30)
        pid = os.fork()
        if pid == 0:
            status = 99
            with contextlib.suppress(BaseException):
                if ending == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if ending == "exec":
                    os.execv("/bin/sh", ["sh", "-c", "exit 5"])
                data = np.random.default_rng(seed).integers(0, 9, 50_000).tobytes()
                status = 7 if bytes(bytearray(data)) == data else 8
            os._exit(status)
        found.append(f"{ending} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    return found


def pool_of_processes(rng: random.Random, where: Path) -> Outcome:  # noqa: ARG001
    with ProcessPoolExecutor(1, mp_context=get_context(rng.choice(["fork", "spawn"]))) as pool:
        return [pool.submit(child, rng.randrange(1 << 30)).result(timeout=120)]


def another_program(rng: random.Random, where: Path) -> Outcome:  # noqa: ARG001
    code = f"import zlib; print(zlib.crc32(b'x' * {rng.randrange(10_000)}))"
    return [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()]


JOBS = (round_trip, store_raises, codec_raises, tasks, loop_stopped, generators, codecs, objects)
PROCESSES = (forked, another_program, pool_of_processes)


# --- rounds ----------------------------------------------------------------------------------------------------------


def work_on(seed: int, where: Path, widely: bool) -> Outcome:
    """What the jobs of a round come to: some on threads at once, then processes, one after another."""
    rng = random.Random(seed)
    chosen = [(job, rng.randrange(1 << 40)) for job in rng.choices(JOBS, k=6)]
    with ThreadPoolExecutor(3) as pool:

        def one(number: int) -> Outcome:
            job, own = chosen[number]
            place = where / str(number)
            place.mkdir(parents=True)
            return [f"{job.__name__}: {outcome}" for outcome in job(random.Random(own), place)]

        found = [outcome for each in pool.map(one, range(len(chosen))) for outcome in each]
    job = rng.choice(PROCESSES if widely else PROCESSES[:1])
    return found + [f"{job.__name__}: {outcome}" for outcome in job(rng, where)]


def in_sessions(seed: int, work: Callable[[], Outcome]) -> tuple[Outcome, list[str]]:
    """``work`` in a session of some kind, at times with another one around, inside or overlapping; and what the report
    says that it should not.
    """
    rng = random.Random(-seed)
    options = {"native": rng.random() < 0.5, "memray": rng.random() < 0.8, "transfers": rng.random() < 0.8}
    form = rng.choice(["one", "one", "nested", "overlapping", "raises"])
    outer = copytrace.session("outer", **options)
    if form == "one":
        with outer:
            found = work()
    elif form == "nested":
        with outer, copytrace.session("inner") as inner:
            found = work()
        assert inner.report
    elif form == "overlapping":
        other, entered, leave = copytrace.session("other"), threading.Event(), threading.Event()

        def beside() -> None:
            with other:
                entered.set()
                leave.wait()

        thread = threading.Thread(target=beside)
        with outer:
            thread.start()
            entered.wait()
            found = work()
        leave.set()
        thread.join()
        assert other.report
    else:
        with contextlib.suppress(InjectedError), outer:
            found = work()
            raise InjectedError("out of the block")
    report = outer.report
    report.to_json()
    report.to_text()
    wrong = [note for note in (*report.coverage.notes, *report.notes) if "swallowed" in note]
    if report.coverage.lost_transfers:
        wrong.append(f"{report.coverage.lost_transfers} transfers lost")
    return found, wrong


@dataclass
class Bystander:
    """A thread that works all the time and knows nothing of sessions."""

    passes: int = 0
    differences: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        data = np.random.default_rng(5).integers(0, 50, 40_000)
        array = zarr.create_array(MemoryStore(), shape=data.shape, chunks=(10_000,), dtype=data.dtype)
        codec = numcodecs.Blosc()
        while not self._stop.wait(0.02):
            array[:] = data
            same = np.array_equal(array[:], data)
            self.differences += not same or bytes(codec.decode(codec.encode(data))) != data.tobytes()
            self.passes += 1

    def stop(self) -> None:
        self._stop.set()


@dataclass(frozen=True)
class Figures:
    """The process after a round."""

    seconds: float
    resident: int
    descriptors: int
    threads: int


def give_back_memory() -> None:
    """Let glibc map every large block by itself, so that resident memory is memory in use. Left to itself it raises the
    threshold, and the threads of obstore keep what they once used.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)


def measure(since: float) -> Figures:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return Figures(time.monotonic() - since, resident, len(os.listdir("/proc/self/fd")), threading.active_count())


@dataclass
class Result:
    """What a soak came to."""

    rounds: int = 0
    outcomes: int = 0
    raised: int = 0
    differences: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    bystander_passes: int = 0
    jobs: Counter[str] = field(default_factory=Counter)
    figures: list[Figures] = field(default_factory=list)

    def growth(self, name: str) -> float:
        """How far the median of the last quarter lies above that of the second one."""
        values = [getattr(figure, name) for figure in self.figures]
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter] or values)

    def faults(self) -> list[str]:
        """What was not as it had to be."""
        found = [*self.differences, *(f"{name} was not put back" for name in self.changed), *self.wrong]
        limits = {"resident": MOST_GROWTH, "descriptors": 0, "threads": 0}
        grown = {name: self.growth(name) for name in limits}
        return found + [f"{name} grew by {grown[name]:g}" for name in limits if grown[name] > limits[name]]

    def summary(self) -> str:
        first, last = self.figures[len(self.figures) // 4], self.figures[-1]
        return (
            f"{self.rounds} rounds in {last.seconds / 60:.1f} minutes: {self.outcomes} outcomes compared, "
            f"{self.raised} of them errors, {len(self.differences)} different; resident "
            f"{first.resident / 1e6:.1f} -> {last.resident / 1e6:.1f} MB, descriptors {first.descriptors} -> "
            f"{last.descriptors}, threads {first.threads} -> {last.threads}, "
            f"{len(self.changed)} attributes not put back"
        )


def soak(
    seconds: float, seed: int = 1, *, most_rounds: int = 1 << 30, tell: Callable[[str], None] = lambda _: None
) -> Result:
    """Work for ``seconds`` or ``most_rounds``, whichever ends first."""
    give_back_memory()
    result = Result()
    bystander = Bystander()
    thread = threading.Thread(target=bystander.run)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.monotonic()
        thread.start()
        before: dict[str, Any] = {}
        try:
            while result.rounds < most_rounds and (time.monotonic() - started < seconds or result.rounds < 4):
                number = seed + result.rounds
                alone = work_on(number, Path(directory) / "alone", widely=True)
                before = before or attributes()
                work = Path(directory) / "traced"
                traced, wrong = in_sessions(number, lambda: work_on(number, work, widely=True))  # noqa: B023
                result.rounds += 1
                result.outcomes += len(alone)
                result.raised += sum("Error" in outcome or "Injected" in outcome for outcome in alone)
                result.jobs.update(outcome.partition(":")[0] for outcome in alone)
                pairs = zip(alone, traced, strict=False)
                result.differences += [f"round {number}: {a} became {b}" for a, b in pairs if a != b]
                if len(alone) != len(traced):
                    result.differences.append(f"round {number}: {len(alone)} outcomes became {len(traced)}")
                result.wrong += [f"round {number}: {what}" for what in wrong]
                result.changed = sorted({*result.changed, *changes(before, attributes())})
                for place in ("alone", "traced"):
                    shutil.rmtree(Path(directory) / place)
                result.figures.append(measure(started))
                if result.rounds % 20 == 0:
                    tell(result.summary())
        finally:
            bystander.stop()
            thread.join()
    result.bystander_passes = bystander.passes
    if bystander.differences:
        result.differences.append(f"the bystander saw {bystander.differences} differences")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures of every round as JSON")
    options = parser.parse_args()
    result = soak(options.minutes * 60, options.seed, tell=lambda text: print(text, flush=True))
    if options.out:
        options.out.write_text(json.dumps(asdict(result) | {"jobs": dict(result.jobs)}))
    print(result.summary())
    faults = result.faults()
    print("\n".join(faults) or "Nothing differed, grew or stayed.")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
