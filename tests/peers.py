"""Other projects' own tests, alone and in a session: no test may change its outcome.

    python tests/peers.py [SUITE...] [--seconds 1800]

``stores`` are zarr's tests of stores; ``obstore`` is what obstore's documentation says of each function; ``zarr`` is
zarr's own suite, in slices, and ``numcodecs`` numcodecs' own, each taken from what the project publishes, fetched with
pip. Prints the counts of outcomes, alone and in a session; a slice that takes more than so many seconds is ended and
named. Exits with 1 when an outcome differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = ("-c", os.devnull, "--rootdir", ".", "-o", "asyncio_mode=auto", "-W", "ignore")
LAST_NUMCODECS_WITH_TESTS = "0.16.5"
"""Later wheels have none; its tests hold for later releases but for what those removed, which fails alone as well."""


BASE = getattr(sys, "_base_executable", sys.executable)
"""What an environment was made of: it has pip, and runs the scripts that a suite starts with uv."""
LEFT_OUT = ("test_docs.py", "test_examples.py")
"""Of zarr's suite: what runs the files of its documentation. Its benchmarks need a plugin and are no tests."""
SLICES = (
    "test_api.py",
    "test_array.py",
    "test_buffer.py",
    "test_group.py",
    "test_indexing.py",
    "test_metadata",
    "test_pipeline_parity.py",
    "test_properties.py",
    "test_unified_chunk_grid.py",
    "test_codecs",
    "test_dtype",
    "test_regression",
    "test_store",
)
"""Of zarr's suite, each run by itself; the others are run together."""


@dataclass(frozen=True)
class Compared:
    """Outcome -> how many tests had it alone, and in a session; the tests whose outcome was another there. Of a slice
    that was ended there is nothing but its name, in ``unfinished``.
    """

    counts: Counter[str] = field(default_factory=Counter)
    traced: Counter[str] = field(default_factory=Counter)
    different: dict[str, tuple[str, str]] = field(default_factory=dict)
    operations: int = 0
    swallowed: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()

    def __add__(self, other: Compared) -> Compared:
        return Compared(
            self.counts + other.counts,
            self.traced + other.traced,
            self.different | other.different,
            self.operations + other.operations,
            self.swallowed + other.swallowed,
            self.unfinished + other.unfinished,
        )


def _run(command: Sequence[str], cwd: Path, environment: dict[str, str], seconds: float) -> str | None:
    """What a program prints; None when it was ended, with all that it had started."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None


def compare(tests: Sequence[str], cwd: Path, *options: str, seconds: float) -> Compared:
    """Run pytest twice in ``cwd``, for at most ``seconds`` each time."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for traced in ("0", "1"):
            out = Path(directory) / traced
            path = os.pathsep.join(filter(None, [str(HERE / "hosts"), os.environ.get("PYTHONPATH", "")]))
            environment = {"PYTHONPATH": path, "UV_PYTHON": BASE}
            environment |= {"COPYTRACE_PEERS": str(out), "COPYTRACE_PEERS_SESSION": traced}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:copytrace"]
            command += ["-p", "peers_plugin", "--continue-on-collection-errors", *options, *tests]
            printed = _run(command, cwd, environment, seconds)
            if printed is None:
                how = "in a session" if traced == "1" else "alone"
                return Compared(unfinished=(f"{' '.join(tests)} {how}",))
            if not out.exists():
                raise RuntimeError(printed[-3000:])
            found.append(json.loads(out.read_text()))
    alone, traced_one = (each["outcomes"] for each in found)
    different = {
        name: (alone.get(name, "not run"), traced_one.get(name, "not run"))
        for name in alone.keys() | traced_one.keys()
        if alone.get(name) != traced_one.get(name)
    }
    return Compared(
        Counter(alone.values()),
        Counter(traced_one.values()),
        different,
        found[1]["operations"],
        tuple(found[1]["swallowed"]),
    )


def stores(seconds: float) -> Iterator[Compared]:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(HERE / "hosts" / "peers_stores.py", Path(directory) / "test_stores.py")
        yield compare(["test_stores.py"], Path(directory), *OPTIONS, seconds=seconds)


def obstore(seconds: float) -> Iterator[Compared]:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(HERE / "hosts" / "peers_obstore.py", Path(directory) / "test_obstore.py")
        yield compare(["test_obstore.py"], Path(directory), *OPTIONS, seconds=seconds)


def _download(requirement: str, into: Path, *options: str) -> Path:
    command = [BASE, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", str(into), requirement]
    subprocess.run(command, check=True)
    return next(into.iterdir())


def zarr(seconds: float) -> Iterator[Compared]:
    with tempfile.TemporaryDirectory() as directory:
        fetched = _download(f"zarr=={version('zarr')}", Path(directory) / "sdist", "--no-binary", ":all:")
        with tarfile.open(fetched) as archive:
            archive.extractall(directory, filter="data")
        root = next(path for path in Path(directory).iterdir() if path.name.startswith("zarr-"))
        names = sorted(path.name for path in (root / "tests").glob("test_*") if path.name not in LEFT_OUT)
        slices = [[name] for name in SLICES if name in names] + [[name for name in names if name not in SLICES]]
        options = [*OPTIONS, "--hypothesis-seed=1", *(f"--ignore=tests/{name}" for name in LEFT_OUT)]
        for names in slices:
            yield compare([f"tests/{name}" for name in names], root, *options, seconds=seconds)


def numcodecs(seconds: float) -> Iterator[Compared]:
    with tempfile.TemporaryDirectory() as directory:
        fetched = _download(f"numcodecs=={LAST_NUMCODECS_WITH_TESTS}", Path(directory) / "wheel")
        with zipfile.ZipFile(fetched) as archive:
            archive.extractall(directory, [name for name in archive.namelist() if name.startswith("numcodecs/tests/")])
        root = Path(directory) / "suite"
        root.mkdir()
        (Path(directory) / "numcodecs" / "tests").rename(root / "numcodecs_tests")
        for path in (root / "numcodecs_tests").glob("*.py"):
            path.write_text(path.read_text().replace("numcodecs.tests", "numcodecs_tests"))
        yield compare(["numcodecs_tests"], root, *OPTIONS, seconds=seconds)


SUITES: dict[str, Callable[[float], Iterator[Compared]]] = {
    "stores": stores,
    "obstore": obstore,
    "numcodecs": numcodecs,
    "zarr": zarr,
}


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in counts.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=list(SUITES))
    parser.add_argument("--seconds", type=float, default=1800, help="at most for a slice, alone and in a session")
    options = parser.parse_args()
    faulty = False
    for name in options.suites:
        found = Compared()
        for part in SUITES[name](options.seconds):
            found += part
            told = f"{_told(part.counts)}; {len(part.different)} different in {part.operations:,} operations"
            print(f"  {', '.join(part.unfinished) or told}", flush=True)
        print(f"{name}: alone {_told(found.counts)}; in a session {_told(found.traced)}")
        print(f"  {len(found.different)} different in a session with {found.operations:,} operations")
        for test, (alone, traced) in sorted(found.different.items())[:20]:
            print(f"  {test}: {alone} alone, {traced} in a session")
        for told in (*found.swallowed, *(f"not finished: {names}" for names in found.unfinished)):
            print(f"  {told}")
        faulty = faulty or bool(found.different or found.swallowed)
    sys.exit(faulty)


if __name__ == "__main__":
    main()
