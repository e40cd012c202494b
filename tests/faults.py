"""What can go wrong while a session is open, each as a program that is run alone and traced.

A fault works on a :class:`Scene`. What it attempts has an outcome that must be the same in both runs; the steps it
takes in sessions must all be in the reports. Faults that end the process are programs of their own, which
``python tests/faults.py NAME alone|traced SEED`` runs, the traced one under ``copytrace run``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import random
import resource
import signal
import sys
import threading
import time
import unittest.mock
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import wrapt
import zarr
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore, MemoryStore

import copytrace
from copytrace.report import Report
from meeting import Meets

N = 50_021
SOURCE = np.random.default_rng(11).integers(1, 255, N, dtype="u1")
STEP = "step"


class Scene:
    """Where a fault happens. ``did`` counts the steps that ended in a session."""

    def __init__(self, where: Path, traced: bool, seed: int = 1) -> None:
        self.where = where
        self.traced = traced
        self.random = random.Random(seed)
        self.did = 0
        self.outcomes: list[str] = []
        self.reports: list[Report] = []
        self._open = 0

    @contextlib.contextmanager
    def session(self, **options: Any) -> Iterator[None]:
        """A session when traced, whose report is kept however the block ends."""
        if not self.traced:
            self._open += 1
            try:
                yield
            finally:
                self._open -= 1
            return
        session = copytrace.session(**{"native": False} | options)
        try:
            with session:
                self._open += 1
                try:
                    yield
                finally:
                    self._open -= 1
        finally:
            self.reports.append(session.report)

    def step(self, count: int = 1) -> None:
        """Copy the source once, as an operation."""
        for _ in range(count):
            with copytrace.operation(STEP, payload_bytes=N):
                kept = bytes(memoryview(SOURCE))
            assert len(kept) == N
            self.did += self._open > 0

    def attempt(self, work: Callable[[], Any]) -> None:
        """Keep what ``work`` returns or raises."""
        try:
            self.outcomes.append(told(work()))
        except BaseException as error:
            self.outcomes.append(f"{type(error).__name__}: {error}")

    def array(self, store: Any = None, **options: Any) -> Any:
        """An array of the source's size in two chunks, in memory unless told otherwise."""
        options = {"compressors": None, "overwrite": True} | options
        store = MemoryStore() if store is None else store
        return zarr.create_array(store, shape=(N,), chunks=(N // 2 + 1,), dtype="u1", **options)

    @property
    def recorded(self) -> int:
        """Steps in the reports, whole ones: with all the bytes that they copied."""
        paths = [path for report in self.reports for path in report.paths if path.api == STEP]
        return sum(min(path.operations - path.errors, path.copied_bytes // N) for path in paths)

    @property
    def notes(self) -> list[str]:
        """What the reports say could not be seen."""
        return [note for report in self.reports for note in (*report.coverage.notes, *report.notes)]


def told(value: Any) -> str:
    return f"{value.dtype} {value.shape} {hash(value.tobytes())}" if isinstance(value, np.ndarray) else repr(value)


def at_chunks(met: Callable[[], Any]) -> Meets:
    """A store that meets something before each get and set of a chunk."""
    return Meets(lambda key: met() if "c/" in key else None)


@dataclass(frozen=True)
class Fault:
    """``cause`` says how it comes about. ``says`` is what a note of the report must contain when something may be
    missing. ``stays`` are ends of names of attributes that the fault itself leaves changed.
    """

    name: str
    cause: str
    work: Callable[[Scene], None]
    says: str = ""
    stays: tuple[str, ...] = ()


FAULTS: list[Fault] = []


def fault(name: str, cause: str, **options: Any) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def add(work: Callable[[Scene], None]) -> Callable[[Scene], None]:
        FAULTS.append(Fault(name, cause, work, **options))
        return work

    return add


def raises(error: BaseException) -> Callable[[], None]:
    def met() -> None:
        raise error

    return met


# --- exceptions ------------------------------------------------------------------------------------------------------


@fault("exception in a store", "a store's `get` and `set` raise `OSError` in the middle of an array operation")
def store_raises(scene: Scene) -> None:
    store = at_chunks(raises(OSError(5, "injected")))
    array = scene.array(store)
    with scene.session():
        scene.step()
        scene.attempt(lambda: array.__setitem__(slice(None), SOURCE))
        scene.attempt(lambda: array[:])
        scene.step()


@fault("exception in a codec", "a chunk is overwritten with other bytes, and numcodecs is given what it cannot decode")
def codec_raises(scene: Scene) -> None:
    array = scene.array(LocalStore(scene.where), compressors=ZstdCodec())
    array[:] = SOURCE
    for chunk in (scene.where / "c").iterdir():
        chunk.write_bytes(b"\0" * 50)
    with scene.session():
        scene.step()
        scene.attempt(lambda: array[:])
        for codec in (numcodecs.Zstd(), numcodecs.GZip(), numcodecs.Blosc(), numcodecs.LZ4()):
            scene.attempt(lambda codec=codec: codec.decode(b"not what it was"))  # type: ignore[misc]
            scene.attempt(lambda codec=codec: codec.encode(None))  # type: ignore[misc]
        scene.step()


@fault("exception out of the block", "the session's own block raises, also in nested sessions")
def block_raises(scene: Scene) -> None:
    def inner() -> None:
        with scene.session():
            scene.step()
            raise LookupError("injected")

    scene.attempt(inner)
    with scene.session():
        scene.step()


@fault("MemoryError", "2^60 bytes are asked for, and a store raises `MemoryError`")
def memory_error(scene: Scene) -> None:
    array = scene.array(at_chunks(raises(MemoryError("injected"))))
    with scene.session():
        scene.step()
        scene.attempt(lambda: np.empty(1 << 60, "u1"))
        scene.attempt(lambda: bytes(1 << 60))
        scene.attempt(lambda: array.__setitem__(slice(None), SOURCE))
        scene.step()


@fault("RecursionError", "a function that is an operation calls itself without end")
def recursion(scene: Scene) -> None:
    def deeper() -> int:
        with copytrace.operation("deeper", payload_bytes=1):
            return deeper()

    with scene.session():
        scene.step()
        scene.attempt(lambda: type(_raised(deeper)).__name__)
        scene.step()


def _raised(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


def interruptible(numbers: range) -> Iterator[int]:
    """With Python's own handler of ``SIGINT``, also where a shell started this to ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield from numbers
    finally:
        signal.signal(signal.SIGINT, previous)


@fault("KeyboardInterrupt in a store", "`SIGINT` is sent to the process while a chunk is written")
def interrupted_store(scene: Scene) -> None:
    left = [signal.SIGINT]  # one: the second chunk's would come when the first has long been raised

    def interrupt() -> Any:
        if left:
            signal.raise_signal(left.pop())
        return asyncio.sleep(0.2)

    array = scene.array(at_chunks(interrupt))
    for _ in interruptible(range(1)):
        with scene.session():
            scene.step()
            scene.attempt(lambda: array.__setitem__(slice(None), SOURCE))
            time.sleep(0.5)
            scene.step()


@fault("KeyboardInterrupt anywhere", "a timer sends `SIGINT` at random moments of 30 runs of work that is probed")
def interrupted_anywhere(scene: Scene) -> None:
    codec = numcodecs.Zstd()
    passed = 0
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for _ in interruptible(range(30)):
            with scene.session(memray=False):
                scene.step()
                try:
                    signal.setitimer(signal.ITIMER_REAL, scene.random.uniform(0.0005, 0.006))
                    while True:
                        codec.decode(codec.encode(SOURCE))
                        bytes(memoryview(SOURCE))
                except KeyboardInterrupt:
                    passed += 1
                scene.step()
    finally:
        signal.signal(signal.SIGALRM, previous)
    scene.outcomes.append(f"{passed} interrupts")


# --- asyncio ---------------------------------------------------------------------------------------------------------


@fault("cancelled task", "tasks that wait in a store are cancelled, one of them swallows it")
def cancelled(scene: Scene) -> None:
    array = scene.array(at_chunks(lambda: asyncio.Event().wait()))

    async def swallow() -> str:
        try:
            await array.async_array.getitem(slice(None))
        except asyncio.CancelledError:
            return "swallowed"
        return "not cancelled"

    async def main() -> list[str]:
        tasks = [asyncio.ensure_future(array.async_array.getitem(slice(None))), asyncio.ensure_future(swallow())]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [repr(each) for each in found]

    with scene.session():
        scene.step()
        scene.attempt(lambda: asyncio.run(main()))
        scene.step()


@fault("timeout", "`asyncio.timeout` and `wait_for` end reads that wait in a store")
def timeout(scene: Scene) -> None:
    array = scene.array(at_chunks(lambda: asyncio.Event().wait()))

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(array.async_array.getitem(slice(None)), 0.01)
        async with asyncio.timeout(0.01):
            await array.async_array.setitem(slice(None), SOURCE)

    with scene.session():
        scene.step()
        scene.attempt(lambda: asyncio.run(main()))
        scene.step()


@fault("event loop stopped mid-operation", "`loop.stop()` while a read waits; the loop is closed and the task dropped")
def loop_stopped(scene: Scene) -> None:
    waits = scene.array(at_chunks(lambda: asyncio.Event().wait()))
    ends = scene.array(at_chunks(lambda: asyncio.sleep(0.01)))

    def work() -> Any:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)
        dropped = loop.create_task(waits.async_array.getitem(slice(None)))
        later = loop.create_task(ends.async_array.getitem(slice(None)))
        loop.call_later(0.005, loop.stop)
        loop.run_forever()
        scene.step()
        found = loop.run_until_complete(later)
        dropped.cancel()
        loop.run_until_complete(asyncio.wait([dropped]))
        loop.close()
        return found, dropped.cancelled()

    with scene.session():
        scene.attempt(work)
        scene.step()
    gc.collect()


@fault("loop outlives the session", "a task that began in a session goes on after it, on a loop of its own")
def loop_outlives(scene: Scene) -> None:
    array = scene.array(at_chunks(lambda: asyncio.sleep(0.01)))
    loop = asyncio.new_event_loop()
    with scene.session():
        scene.step()
        task = loop.create_task(array.async_array.getitem(slice(None)))
        loop.call_soon(loop.stop)
        loop.run_forever()
    scene.attempt(lambda: loop.run_until_complete(task))
    loop.close()
    with scene.session():
        scene.step()


@fault("generators closed early", "generators and async generators are closed, dropped and thrown into halfway")
def generators(scene: Scene) -> None:
    store = MemoryStore()
    scene.array(store)[:] = SOURCE

    def pieces() -> Iterator[int]:
        for _ in range(5):
            with copytrace.operation("piece", payload_bytes=N):
                yield len(bytes(memoryview(SOURCE)))

    async def listed() -> AsyncIterator[str]:
        async for key in store.list():
            yield key

    async def first() -> str:
        stream = listed()
        async for key in stream:
            await stream.aclose()  # type: ignore[attr-defined]
            return key
        return ""

    with scene.session():
        one, other, *dropped = pieces(), pieces(), pieces()
        scene.attempt(lambda: [next(each) for each in (one, other, *dropped)])
        scene.attempt(one.close)
        scene.attempt(lambda: other.throw(ValueError("injected")))  # type: ignore[attr-defined]
        dropped.clear()
        gc.collect()
        scene.attempt(lambda: asyncio.run(first()))
        scene.step()


# --- threads ---------------------------------------------------------------------------------------------------------


@fault("threads that outlive the session", "threads that work in a session go on after it and into the next one")
def threads_outlive(scene: Scene) -> None:
    array, codec, stop = scene.array(), numcodecs.Zstd(), threading.Event()
    wrong: list[str] = []

    def work() -> None:
        while not stop.is_set():
            array[:] = SOURCE
            if not np.array_equal(array[:], SOURCE) or codec.decode(codec.encode(SOURCE)) != SOURCE.tobytes():
                wrong.append("different")

    with contextlib.ExitStack() as stack:
        with scene.session():
            threads = [threading.Thread(target=work) for _ in range(2)]
            for thread in threads:
                thread.start()
            stack.callback(lambda: [thread.join() for thread in threads])
            stack.callback(stop.set)
            scene.step()
        time.sleep(0.05)
        with scene.session():
            scene.step()
    scene.outcomes += wrong


@fault("sessions in many threads at once", "4 threads open and close sessions of their own 5 times while they work")
def many_sessions(scene: Scene) -> None:
    def work(number: int) -> None:
        del number
        for _ in range(5):
            session = copytrace.session(memray=False) if scene.traced else contextlib.nullcontext()
            with session, copytrace.operation("own", payload_bytes=N):
                assert len(bytes(memoryview(SOURCE))) == N

    with ThreadPoolExecutor(4) as pool, scene.session():
        scene.attempt(lambda: list(pool.map(work, range(4))))
        scene.step()


# --- other people's patches ------------------------------------------------------------------------------------------


@fault("library reloaded", "`importlib.reload` of modules that are probed, in the session")
def reloaded(scene: Scene) -> None:
    import numcodecs.zstd as module

    kept = dict(vars(module))
    try:
        with scene.session():
            scene.step()
            scene.attempt(
                lambda: importlib.reload(module).Zstd().decode(module.Zstd().encode(SOURCE)) == SOURCE.tobytes()
            )
            scene.step()
        scene.attempt(lambda: [name for name in ("encode", "decode") if _is_ours(vars(module.Zstd)[name])])
    finally:
        vars(module).update(kept)
        numcodecs.register_codec(kept["Zstd"])


@fault(
    "library imported in the session",
    "a package with a probe is dropped from `sys.modules` and imported again",
    stays=("._latest",),
)
def imported(scene: Scene) -> None:
    name = "fsspec.mapping"
    import fsspec.mapping

    kept = fsspec.mapping
    del sys.modules[name]
    try:
        with scene.session():
            scene.step()
            again = importlib.import_module(name)
            mapping = again.FSMap(str(scene.where), fsspec.filesystem("file"))
            scene.attempt(lambda: mapping.__setitem__("key", b"value"))
            scene.attempt(lambda: mapping["key"])
            scene.step()
        scene.attempt(lambda: [key for key, value in vars(again.FSMap).items() if _is_ours(value)])
    finally:
        sys.modules[name] = kept
        fsspec.mapping = kept


def _is_ours(value: Any) -> bool:
    """Whether it is a stand-in of copytrace's."""
    value = getattr(value, "__func__", value)
    return getattr(getattr(value, "__code__", None), "co_filename", "") == "copytrace"


@fault("monkeypatched in the session", "`LocalStore.get` is replaced in a session and put back in it")
def monkeypatched(scene: Scene) -> None:
    array = scene.array(LocalStore(scene.where))
    array[:] = SOURCE

    async def other(self: Any, key: str, prototype: Any, byte_range: Any = None) -> None:
        del self, key, prototype, byte_range

    with scene.session():
        scene.step()
        with unittest.mock.patch.object(LocalStore, "get", other):
            scene.attempt(lambda: array[:])
        scene.attempt(lambda: array[:])
        scene.step()


@fault(
    "monkeypatched before, put back within", "`mock.patch` of a probed method began before the session and ends in it"
)
def patched_before(scene: Scene) -> None:
    array = scene.array(LocalStore(scene.where))
    original = LocalStore.get
    seen = []

    async def counting(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(args[0])
        return await original(self, *args, **options)

    patch = unittest.mock.patch.object(LocalStore, "get", counting)
    patch.start()
    with scene.session():
        scene.step()
        scene.attempt(lambda: array[:])
        patch.stop()
        scene.attempt(lambda: array[:])
        scene.step()
    scene.attempt(lambda: len(seen))
    scene.attempt(lambda: LocalStore.get is original)


@fault("another tool patches on top", "a wrapt proxy is put on probed methods in the session and taken off after it")
def patched_on_top(scene: Scene) -> None:
    seen: list[str] = []

    def pass_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        seen.append(type(instance).__name__)
        return wrapped(*args, **kwargs)

    codec = numcodecs.Zstd()
    with scene.session():
        scene.step()
        proxy = wrapt.wrap_function_wrapper(numcodecs.Zstd, "encode", pass_on)
        scene.attempt(lambda: codec.decode(codec.encode(SOURCE)) == SOURCE.tobytes())
    scene.attempt(lambda: codec.decode(codec.encode(SOURCE)) == SOURCE.tobytes())
    wrapt.unwrap_object(numcodecs.Zstd, "encode", proxy)
    scene.attempt(lambda: codec.decode(codec.encode(SOURCE)) == SOURCE.tobytes())
    scene.outcomes += seen


# --- processes and files ---------------------------------------------------------------------------------------------


@fault("fork in an operation", "a store forks while a chunk is written; the child works on, and exits or is killed")
def forks(scene: Scene) -> None:
    endings: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                status = 7 if numcodecs.Zstd().decode(numcodecs.Zstd().encode(SOURCE)) == SOURCE.tobytes() else 8
                if len(endings) % 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            os._exit(status)
        endings.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    array = scene.array(at_chunks(fork))
    with scene.session():
        scene.step()
        scene.attempt(lambda: array.__setitem__(slice(None), SOURCE))
        scene.step()
    scene.attempt(lambda: sorted(endings))


@fault(
    "out of disk",
    "the limit on the size of files is lowered to a few kB in the session, so that no file of a spool can grow",
    says="could not be written",
)
def disk_full(scene: Scene) -> None:
    codec = numcodecs.Zstd()
    with scene.session(memray=False):
        scene.step()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            for _ in range(3_000):
                codec.encode(SOURCE[:100])
            scene.attempt(lambda: codec.decode(codec.encode(SOURCE)) == SOURCE.tobytes())
            scene.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        scene.step()


# --- that end the process --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """A fault that ends the process, or is about how it ends. ``status`` is the exit status, alone and traced; ``left``
    says that a spool is left instead of a trace.
    """

    name: str
    cause: str
    work: Callable[[Scene], None]
    status: int
    left: bool = False
    slow: bool = True
    varies: bool = False
    """What the interpreter says on standard error depends on where the threads are."""


ENDINGS: dict[str, Ending] = {}


def ending(name: str, cause: str, **options: Any) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def add(work: Callable[[Scene], None]) -> Callable[[Scene], None]:
        ENDINGS[work.__name__] = Ending(name, cause, work, **options)
        return work

    return add


def announce(scene: Scene) -> None:
    """A step, and a line on standard output when it is over."""
    scene.step()
    os.write(1, b"step\n")


@ending("kill -9 after a step", "the program kills itself after some steps", status=-9, left=True, slow=False)
def killed(scene: Scene) -> None:
    for _ in range(scene.random.randrange(1, 200)):
        announce(scene)
    os.kill(os.getpid(), signal.SIGKILL)


@ending("kill -9 in a store", "the program kills itself while a chunk is written", status=-9, left=True)
def killed_in_store(scene: Scene) -> None:
    for _ in range(3):
        announce(scene)
    scene.array(at_chunks(lambda: os.kill(os.getpid(), signal.SIGKILL)))[:] = SOURCE


@ending("kill -9 by a thread", "a thread kills the process at a random moment of its work", status=-9, left=True)
def killed_by_thread(scene: Scene) -> None:
    delay = scene.random.uniform(0.01, 0.4)
    threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    while True:
        announce(scene)


@ending("os._exit", "the program leaves by `os._exit`", status=7, left=True)
def left_at_once(scene: Scene) -> None:
    announce(scene)
    os._exit(7)


@ending("SIGTERM", "the program is ended by `SIGTERM`, which it does not handle", status=-15, left=True)
def terminated(scene: Scene) -> None:
    announce(scene)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


@ending("segmentation fault", "the program reads from address 8", status=-11, left=True)
def crashed(scene: Scene) -> None:
    import ctypes

    announce(scene)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(8)


@ending("KeyboardInterrupt ends the program", "`SIGINT` is sent to the process", status=-2, slow=False)
def interrupted(scene: Scene) -> None:
    announce(scene)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


@ending("MemoryError ends the program", "the address space is used up by allocations of 64 MB", status=1)
def out_of_memory(scene: Scene) -> None:
    announce(scene)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
    kept = []
    try:
        while True:
            kept.append(bytearray(64 << 20))
            announce(scene)
    finally:
        kept.clear()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@ending(
    "exit with threads that work", "the program ends while daemon threads are in probed calls", status=0, varies=True
)
def daemons(scene: Scene) -> None:
    array, codec = scene.array(), numcodecs.Zstd()

    def work() -> None:
        while True:
            array[:] = SOURCE
            codec.decode(codec.encode(SOURCE))

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    for _ in range(20):
        announce(scene)


@ending("exit with a session open", "the program enters a session of its own and never leaves it", status=0, slow=False)
def session_left_open(scene: Scene) -> None:
    scene.array()[:] = SOURCE
    if scene.traced:
        copytrace.session("left open").__enter__()
    announce(scene)


@dataclass(frozen=True)
class Tested:
    """A fault that a test elsewhere causes and judges, with what is lost by it, which the report says."""

    name: str
    cause: str
    node: str
    lost: str = "nothing"


TESTED = (
    Tested(
        "another tool's GOT entry",
        "slots of the global offset table are changed before the session, and while it is open",
        "test_transfers_safety.py::test_another_tools_hook_is_left_alone",
    ),
    Tested(
        "dlopen in the session",
        "libraries are loaded that copy before and after the next mark",
        "test_transfers_safety.py::test_a_library_loaded_meanwhile_is_hooked_at_the_next_mark",
    ),
    Tested(
        "dlclose in the session",
        "a library that is hooked is unloaded",
        "test_transfers_safety.py::test_a_library_unloaded_meanwhile_does_no_harm",
    ),
    Tested(
        "several libraries at one address",
        "libraries are loaded and unloaded in turn, so that the loader uses an address again",
        "test_transfers_safety.py::test_a_library_loaded_again_is_hooked_again",
    ),
    Tested(
        "signal in a native hook",
        "a timer's handler copies while the interrupted thread is in a hook",
        "test_transfers.py::test_a_signal_handler_may_copy",
    ),
    Tested(
        "fork in the session, hooks in place",
        "`os.fork`; the child copies, marks, and records on its own",
        "test_transfers_safety.py::test_a_forked_child_writes_nothing_and_the_parent_goes_on",
    ),
    Tested(
        "fork without handlers",
        "the system call is made from C, and the child copies 1,000 times",
        "test_transfers_safety.py::test_a_child_without_fork_handlers_writes_nothing",
    ),
    Tested(
        "thread that stays in a hook",
        "a thread is held inside a hook until the session is over and another is open",
        "test_transfers_safety.py::test_a_thread_that_stays_inside_a_hook_outlives_the_recording",
    ),
    Tested(
        "out of disk for the native hook",
        "the limit on the size of files is lowered, then raised; no mark is lost, moves are counted as lost",
        "test_transfers_files.py::test_a_full_disk_loses_moves_but_no_marks_once_there_is_room",
    ),
    Tested(
        "full disk in the session",
        "all but 0, 0.1, 1, 3 or 9 MB of the file system of the spool are taken while a session is open",
        "test_faults.py::test_a_disk_that_becomes_full_loses_no_operation",
        "no operation; moves without room, counted",
    ),
    Tested(
        "full disk before the session",
        "the same before it: with 1 MB or less it does not begin, as a line says; with more it records without memray",
        "test_faults.py::test_a_disk_that_is_full_is_said",
        "what has no room, said in the report",
    ),
    Tested(
        "full disk for the trace",
        "no room where the trace is to lie; the program is not run, and a line says why",
        "test_faults.py::test_a_program_is_not_run_when_the_disk_for_its_trace_is_full",
    ),
    Tested(
        "directory that cannot be written",
        "the trace is to lie in `/proc/self`; the program is not run, and a line says why",
        "test_faults.py::test_a_directory_that_cannot_be_written",
    ),
    Tested(
        "spool removed in the session",
        "the directory of the recorders is deleted; the block goes on, and the report says that there is nothing",
        "test_faults.py::test_a_spool_that_is_removed_is_no_error_of_the_block",
    ),
    Tested(
        "two sessions from two threads",
        "entered and left in all 6 orders",
        "test_endtoend_sessions.py::test_two_threads_enter_and_leave_in_every_order",
    ),
)


def main() -> None:
    name, traced, seed = sys.argv[1], sys.argv[2] == "traced", int(sys.argv[3])
    ENDINGS[name].work(Scene(Path.cwd(), traced, seed))


if __name__ == "__main__":
    main()
