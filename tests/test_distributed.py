"""Work on engines that exist: a cluster of Dask worker processes, and cubed on its own executors."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

import copytrace
from copytrace.errors import CopytraceError
from copytrace.model import Task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from distributed import Client

    from copytrace.report import Report

pytestmark = pytest.mark.filterwarnings("default")  # theirs, in other threads

SIZE = 1_000_003


def copies(k: int, mark: str = "", ending: str = "") -> int:
    """Copy ``k`` times; the first who is asked to end badly, in a file system, does."""
    data = bytearray(SIZE)
    with copytrace.operation("work", payload_bytes=SIZE):
        for _ in range(k):
            bytes(data)
    if ending:
        try:
            open(mark, "x").close()
        except FileExistsError:
            return k
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(ending)
    return k


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=None
    )
    client = distributed.Client(cluster)
    yield client
    client.close()
    cluster.close()


def tasks(report: Report) -> dict[str, list[Task]]:
    found: dict[str, list[Task]] = {}
    for task in report.tasks:
        found.setdefault(task.key, []).append(task)
    return found


@pytest.mark.slow
def test_a_cluster_with_retries_and_a_lost_worker(client: Client, tmp_path: Path) -> None:
    from copytrace.distributed import TracedWorkers

    with TracedWorkers(client, native=False) as traced:
        with pytest.raises(CopytraceError, match="leave the block first"):
            _ = traced.report
        plain = [client.submit(copies, k, key=f"plain-{k}", pure=False) for k in (1, 2, 3)]
        assert client.gather(plain) == [1, 2, 3]
        again = client.submit(copies, 4, str(tmp_path / "raised"), "raise", key="again", retries=1)
        assert again.result(timeout=60) == 4
        for future in (*plain, again):
            future.release()  # or what a lost worker held is computed again
        lost = client.submit(copies, 5, str(tmp_path / "killed"), "kill", key="lost", retries=1)
        assert lost.result(timeout=120) == 5
        client.wait_for_workers(2, timeout=60)
        late = [
            client.submit(copies, 6, key=f"late-{n}", workers=[each], pure=False)
            for n, each in enumerate(addresses(client))
        ]
        assert client.gather(late) == [6, 6]
    report = traced.report
    (path,) = report.paths
    done = [1, 2, 3, 4, 4, 5, 5, 6, 6]
    assert (path.operations, path.payload_bytes, path.copied_bytes) == (9, 9 * SIZE, sum(done) * SIZE)
    assert sum(share.operations for share in path.processes) == 9
    workers = report.coverage.processes
    assert [worker.kind for worker in workers] == ["worker"] * 3
    assert sorted(worker.status for worker in workers) == ["complete", "complete", "cut-off"]
    assert {worker.name.split(" (")[0] for worker in workers} == {"worker 0", "worker 1"}
    by_key = tasks(report)
    assert sorted(by_key) == ["again", "late-0", "late-1", "lost", "plain-1", "plain-2", "plain-3"]
    assert [task.attempt for task in by_key["again"]] == [1, 2]
    assert len(by_key["lost"]) == 1, "the first attempt did not end"
    for key, k in {"again": 4, "late-0": 6, "lost": 5, "plain-1": 1, "plain-3": 3}.items():
        for task in by_key[key]:
            assert (task.operations, task.payload_bytes, task.copied_bytes) == (1, SIZE, k * SIZE)
            assert task.paths == ("work",)
            assert task.peak_bytes is not None
            assert 2 * SIZE <= task.peak_bytes < 2.2 * SIZE, "the source and one copy at a time"
    assert {task.process for task in report.tasks} <= {worker.name for worker in workers}
    traced.save(tmp_path / "all.copytrace")
    assert copytrace.load(tmp_path / "all.copytrace").report.to_dict() == report.to_dict()
    assert "lost" in report.to_text(by="process")


def addresses(client: Client) -> list[str]:
    return sorted(client.scheduler_info(n_workers=-1)["workers"])


def test_a_second_block_sees_its_own_part(client: Client) -> None:
    from copytrace.distributed import TracedWorkers

    assert client.submit(copies, 9, key="before").result(timeout=60) == 9
    with TracedWorkers(client, native=False, memray=False) as traced:
        assert client.submit(copies, 7, key="inside").result(timeout=60) == 7
    assert client.submit(copies, 9, key="after").result(timeout=60) == 9
    assert [(task.key, task.copied_bytes, task.peak_bytes) for task in traced.report.tasks] == [
        ("inside", 7 * SIZE, None)
    ]
    assert {worker.status for worker in traced.report.coverage.processes} == {"complete"}


def test_workers_that_are_threads_are_refused() -> None:
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    from copytrace.distributed import TracedWorkers

    with (
        distributed.Client(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as client,
        pytest.raises(CopytraceError, match="threads of this process"),
    ):
        TracedWorkers(client).__enter__()


# --- cubed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "executor",
    [
        "threads",
        pytest.param("single-threaded", marks=pytest.mark.slow),
        pytest.param("processes", marks=pytest.mark.slow),
    ],
)
def test_cubed(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cubed = pytest.importorskip("cubed", reason="cubed is not installed")
    random, xp = pytest.importorskip("cubed.random"), pytest.importorskip("cubed.array_api")
    from cubed.runtime.create import create_executor

    from copytrace.distributed import TracedCubed

    monkeypatch.chdir(tmp_path)  # cubed leaves captures of its own there
    rows, chunk = 600, 300
    spec = cubed.Spec(str(tmp_path / "work"), allowed_mem="200MB", reserved_mem="10MB")
    with TracedCubed(native=False) as traced:
        array = random.random((rows, rows), chunks=(chunk, chunk), spec=spec)
        result = xp.add(array, 1).compute(executor=create_executor(executor), optimize_graph=False)
    assert result.shape == (rows, rows)
    nbytes = chunk * chunk * 8
    report = traced.report
    paths = {path.direction: path for path in report.paths}
    assert (paths["write"].operations, paths["write"].payload_bytes) == (8, 8 * nbytes)
    assert paths["read"].payload_bytes == 4 * nbytes + 4 * nbytes, "the blocks, and the result"
    blocks = [task for task in report.tasks if "[" in task.key]
    assert len({task.key for task in blocks}) == len(blocks) == 8
    assert {task.attempt for task in report.tasks} == {1}
    operations = {task.key.split(" ")[0] for task in blocks}
    assert len(operations) == 2
    for task in blocks:
        assert task.payload_bytes in (nbytes, 2 * nbytes), task
        assert task.projected_bytes == traced.projected[task.key.split(" ")[0]]
        assert task.peak_bytes is not None
        assert nbytes <= task.peak_bytes
        assert task.projected_bytes > 2 * nbytes
    assert sum(task.operations for task in blocks) == 12
    names = {task.process for task in blocks}
    if executor == "processes":
        assert names
        assert all(name.startswith("SpawnProcess-") for name in names)
        assert {process.status for process in report.coverage.processes} == {"complete"}
    else:
        assert names == {""}
    traced.save(tmp_path / "cubed.copytrace")
    again = copytrace.load(tmp_path / "cubed.copytrace").report
    assert again.tasks == report.tasks
    assert "projected" in report.to_text(by="process")
