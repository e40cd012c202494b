"""Other projects' own tests, alone and in a session: no test may change its outcome.

    python tests/peers.py [SUITE...]

``stores`` are zarr's tests of stores; ``zarr`` is most of zarr's own suite and ``numcodecs`` numcodecs' own, each taken
from what the project publishes, fetched with pip. Prints the counts of outcomes; exits with 1 when one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = ("-c", os.devnull, "--rootdir", ".", "-o", "asyncio_mode=auto", "-W", "ignore")
LAST_NUMCODECS_WITH_TESTS = "0.16.5"
"""Later wheels have none; its tests hold for later releases but for what those removed, which fails alone as well."""


@dataclass(frozen=True)
class Compared:
    """Outcome -> how many tests had it alone; the tests whose outcome was another in a session."""

    counts: Counter[str]
    different: dict[str, tuple[str, str]]
    operations: int
    swallowed: tuple[str, ...]


def compare(tests: Sequence[str], cwd: Path, *options: str) -> Compared:
    """Run pytest twice in ``cwd``."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for traced in ("0", "1"):
            out = Path(directory) / traced
            path = os.pathsep.join(filter(None, [str(HERE / "hosts"), os.environ.get("PYTHONPATH", "")]))
            environment = {"PYTHONPATH": path, "COPYTRACE_PEERS": str(out), "COPYTRACE_PEERS_SESSION": traced}
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:copytrace"]
            command += ["-p", "peers_plugin", "--continue-on-collection-errors", *options, *tests]
            done = subprocess.run(
                command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
            )
            if not out.exists():
                raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
            found.append(json.loads(out.read_text()))
    alone, traced_one = (each["outcomes"] for each in found)
    different = {
        name: (alone.get(name, "not run"), traced_one.get(name, "not run"))
        for name in alone.keys() | traced_one.keys()
        if alone.get(name) != traced_one.get(name)
    }
    return Compared(Counter(alone.values()), different, found[1]["operations"], tuple(found[1]["swallowed"]))


def stores() -> Compared:
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(HERE / "hosts" / "peers_stores.py", Path(directory) / "test_stores.py")
        return compare(["test_stores.py"], Path(directory), *OPTIONS)


def _download(requirement: str, into: Path, *options: str) -> Path:
    python = getattr(sys, "_base_executable", sys.executable)  # an environment may have no pip of its own
    command = [python, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", str(into), requirement]
    subprocess.run(command, check=True)
    return next(into.iterdir())


def zarr() -> Compared:
    with tempfile.TemporaryDirectory() as directory:
        fetched = _download(f"zarr=={version('zarr')}", Path(directory) / "sdist", "--no-binary", ":all:")
        with tarfile.open(fetched) as archive:
            archive.extractall(directory, filter="data")
        root = next(path for path in Path(directory).iterdir() if path.name.startswith("zarr-"))
        names = (
            "test_store",
            "test_codecs",
            "test_buffer.py",
            "test_array.py",
            "test_indexing.py",
            "test_codec_pipeline.py",
        )
        return compare([f"tests/{name}" for name in names if (root / "tests" / name).exists()], root, *OPTIONS)


def numcodecs() -> Compared:
    with tempfile.TemporaryDirectory() as directory:
        fetched = _download(f"numcodecs=={LAST_NUMCODECS_WITH_TESTS}", Path(directory) / "wheel")
        with zipfile.ZipFile(fetched) as archive:
            archive.extractall(directory, [name for name in archive.namelist() if name.startswith("numcodecs/tests/")])
        root = Path(directory) / "suite"
        root.mkdir()
        (Path(directory) / "numcodecs" / "tests").rename(root / "numcodecs_tests")
        for path in (root / "numcodecs_tests").glob("*.py"):
            path.write_text(path.read_text().replace("numcodecs.tests", "numcodecs_tests"))
        return compare(["numcodecs_tests"], root, *OPTIONS)


SUITES: dict[str, Callable[[], Compared]] = {"stores": stores, "numcodecs": numcodecs, "zarr": zarr}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=list(SUITES))
    faulty = False
    for name in parser.parse_args().suites:
        found = SUITES[name]()
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in found.counts.most_common())
        print(f"{name}: {counts}; {len(found.different)} different in a session with {found.operations:,} operations")
        for test, (alone, traced) in sorted(found.different.items())[:20]:
            print(f"  {test}: {alone} alone, {traced} in a session")
        print(*found.swallowed, sep="\n", end="")
        faulty = faulty or bool(found.different or found.swallowed)
    sys.exit(faulty)


if __name__ == "__main__":
    main()
