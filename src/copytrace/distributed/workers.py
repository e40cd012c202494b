"""The workers of a Dask cluster, each traced by itself, in one report."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from distributed import WorkerPlugin

from copytrace.errors import CopytraceError
from copytrace.follow import Following, collect, leave, record
from copytrace.trace import Traced, joined, load, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from distributed import Client, Worker

    from copytrace.model import Process, Trace


class WorkerTracer(WorkerPlugin):
    """A plugin that traces each worker process from its start, or from now, to its end.

    The spools of the workers of a host, also of those that were lost, are in one directory there, until ``run`` is
    gathered. A worker that a nanny starts again begins a trace of its own.
    """

    name = "copytrace"

    def __init__(self, run: str, options: dict[str, Any]) -> None:
        self.run = run
        self.options = options

    def setup(self, worker: Worker) -> None:
        following = Following(_directory(self.run), self.options)
        following.prepare()
        name = str(worker.name)
        record(following, "worker", name="worker" if "://" in name else f"worker {name}")

    def teardown(self, worker: Worker) -> None:  # noqa: ARG002
        leave()


class TracedWorkers(Traced):
    """A block during which the workers of ``client``'s cluster are traced; those that it starts meanwhile, too.

    Options are those of :class:`copytrace.Session`. After the block :attr:`trace` and :attr:`report` are there. Raises
    CopytraceError on entry when workers are threads of this process: a session sees those; and on exit when no worker
    left a trace.
    """

    def __init__(
        self,
        client: Client,
        *,
        label: str = "dask",
        native: bool = True,
        memray: bool = True,
        transfers: bool = True,
        min_bytes: int = 0,
    ) -> None:
        self.client = client
        self.label = label
        self.options = {"native": native, "memray": memray, "transfers": transfers, "min_bytes": min_bytes}
        self.run = ""
        self._trace: Trace | None = None

    def __enter__(self) -> Self:
        pids = set(self.client.run(os.getpid).values())
        if os.getpid() in pids:
            raise CopytraceError("the workers are threads of this process: trace them with copytrace.session()")
        self.run = uuid.uuid4().hex
        self._trace = None
        self.client.register_plugin(WorkerTracer(self.run, self.options))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        client: Any = self.client
        client.unregister_worker_plugin(WorkerTracer.name)
        hosts: dict[str, str] = {}
        for address in self.client.scheduler_info(n_workers=-1)["workers"]:
            hosts.setdefault(address.rpartition(":")[0], address)
        gathered = self.client.run(_gather, self.run, workers=list(hosts.values()))
        untraced: list[Process] = []
        traces = (trace for packed in gathered.values() for each in packed for trace in _unpacked(each, untraced))
        first = next(traces, None)
        if first is None:
            if error is not None:
                return
            why = "; ".join(f"{process.name}: {process.reason}" for process in untraced)
            raise CopytraceError("no worker left a trace" + (f" ({why})" if why else ""))
        trace = joined(first, traces)
        self._trace = replace(trace, label=self.label, untraced=tuple(untraced))

    @property
    def trace(self) -> Trace:
        """The first worker's trace; those of the others are its parts. Raises CopytraceError before the block's end."""
        if self._trace is None:
            raise CopytraceError("the workers are not traced yet, or still: leave the block first")
        return self._trace


def _directory(run: str) -> Path:
    """Where the workers of a host leave their spools: whoever is started there again finds it."""
    return Path(tempfile.gettempdir()) / f"copytrace-{run}"


async def _gather(run: str) -> list[bytes]:
    """On one worker of each host: the traces of all that were there, as a file."""
    return await asyncio.to_thread(_pack, _directory(run))


def _pack(directory: Path) -> list[bytes]:
    untraced: list[Process] = []
    try:
        traces = collect(directory, untraced)
        first = next(traces, None)
        if first is None:
            return []
        file = directory / "gathered"
        trace = joined(first, traces)
        save(replace(trace, untraced=tuple(untraced)), file)
        return [file.read_bytes()]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _unpacked(packed: bytes, untraced: list[Process]) -> Iterator[Trace]:
    """The traces in a file, one by one; processes without one are put into ``untraced``."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "gathered"
        file.write_bytes(packed)
        trace = load(file).trace
        untraced += trace.untraced
        yield replace(trace, parts=(), untraced=())
        yield from trace.parts
