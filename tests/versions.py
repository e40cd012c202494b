"""The tests of probes and of whole sessions with other versions of libraries, and beside other tools.

    python tests/versions.py [NAME...]

Each name is a set of requirements, installed with uv into an environment of its own, or a tool that runs in the same
process. What is newest is looked up once a week. Prints a line for each; exits with 1 when one failed. Without names
all are tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from copytrace.matrix.environments import cache_directory, environment

HERE = Path(__file__).parent
TOOLS = (
    "pytest>=8.3",
    "hypothesis>=6.100",
    "wrapt>=2.5",
    "jsonschema>=4.20",
    "anyio>=4",
    "pytest-asyncio>=1",
    "markdown-it-py",
)
PROBES = ("test_probes_calls.py", "test_probes_python.py", "test_recorder.py")
WITH_ZARR = (*PROBES, "test_probes_zarr.py", "test_bare.py")
WITHOUT_LIBRARIES = ("test_probes_calls.py", "test_recorder.py", "test_bare.py")


@dataclass(frozen=True)
class Setting:
    """``requirements`` beside the tests' tools, which ``tests`` to run, with which ``options`` of pytest, and by which
    ``module``.
    """

    requirements: tuple[str, ...]
    tests: tuple[str, ...]
    options: tuple[str, ...] = ()
    module: tuple[str, ...] = ("pytest",)


MINIMUM = ("zarr==3.0.6", "numcodecs==0.15.1", "obstore==0.6.0", "fsspec==2025.3.0", "numpy==2.2.0")
LATEST = ("zarr", "numcodecs[crc32c]", "obstore", "fsspec", "numpy")
SETTINGS = {
    "no-libraries": Setting((), WITHOUT_LIBRARIES),
    "minimum": Setting(MINIMUM, WITH_ZARR),
    "latest": Setting(LATEST, WITH_ZARR),
    "coverage": Setting(
        (*LATEST, "coverage"), (*PROBES, "test_probes_zarr.py"), module=("coverage", "run", "-m", "pytest")
    ),
    "debugger": Setting(LATEST, (*PROBES, "test_probes_zarr.py"), ("-p", "debugger_plugin")),
    "monitoring": Setting(
        LATEST, ("test_probes_calls.py", "test_recorder.py", "test_probes_zarr.py"), ("-p", "monitoring_plugin")
    ),
    "pytest-memray": Setting((*LATEST, "pytest-memray"), (*PROBES, "test_probes_zarr.py"), ("--memray",)),
}


def attempt(setting: Setting) -> tuple[bool, str]:
    """Whether the tests passed, and pytest's last line or why not."""
    newest = not all("==" in requirement for requirement in setting.requirements)
    week = time.strftime("%G-%V") if newest else ""
    binaries = environment([*TOOLS, *setting.requirements], cache=cache_directory(), stamp=week)
    with tempfile.TemporaryDirectory() as directory:
        command = [str(binaries / "python"), "-m", *setting.module, "-q", "-p", "no:cacheprovider", *setting.options]
        command += ["--rootdir", str(HERE.parent), "-c", str(HERE.parent / "pyproject.toml")]
        done = subprocess.run(
            [*command, *(str(HERE / test) for test in setting.tests)],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(HERE / "hosts"), "COVERAGE_FILE": f"{directory}/coverage"},
            capture_output=True,
            text=True,
            check=False,
        )
    lines = (done.stdout + done.stderr).strip().splitlines() or ["nothing was printed"]
    told = lines[-1] if done.returncode == 0 else "\n  ".join(lines[-25:])
    return done.returncode == 0, told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SETTINGS), default=list(SETTINGS))
    failed = False
    if not shutil.which("uv"):
        sys.exit("uv makes the environments: pip install uv")
    for name in parser.parse_args().names:
        started = time.monotonic()
        passed, told = attempt(SETTINGS[name])
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"{name} on {version}: {told} [{time.monotonic() - started:.0f} s]", flush=True)
        failed = failed or not passed
    sys.exit(failed)


if __name__ == "__main__":
    main()
