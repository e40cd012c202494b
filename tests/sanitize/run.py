"""Runs the recorder under a sanitizer or valgrind, without Python.

``python tests/sanitize/run.py address|thread|valgrind|none [--seconds N]``: ``address`` is AddressSanitizer with
UndefinedBehaviorSanitizer. The status is 0 when nothing was found.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "copytrace"
FLAGS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread"],
    "valgrind": [],
    "none": [],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1",
}


def compiler() -> str:
    return os.environ.get("CC") or "cc"


def available(kind: str) -> bool:
    """Whether this machine can build and run it."""
    if not shutil.which(compiler()) or (kind == "valgrind" and not shutil.which("valgrind")):
        return False
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "empty.c"
        source.write_text("int main(void) { return 0; }\n")
        built = subprocess.run(
            [compiler(), *FLAGS[kind], source, "-o", source.with_suffix("")], capture_output=True, check=False
        )
        return built.returncode == 0


def run(kind: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Build the harness and run it for ``seconds``; its output is captured."""
    with tempfile.TemporaryDirectory(prefix="copytrace-") as name:
        directory = Path(name)
        common = [compiler(), "-g", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-pthread"]
        sources = [HERE / "harness.c", *(SOURCES / f"_{part}.c" for part in ("record", "hooks", "slots"))]
        harness = directory / "harness"
        subprocess.run([*common, *FLAGS[kind], f"-I{SOURCES}", *sources, "-ldl", "-o", harness], check=True)
        library = [*common, "-fno-builtin", "-fPIC", "-shared", HERE.parent / "moves" / "moves.c"]
        libraries = [directory / f"moves{n}.so" for n in range(4)]
        for n, path in enumerate(libraries):
            linkage = ["-Wl,-z,lazy"] if n % 2 else ["-Wl,-z,now", "-Wl,-z,relro"]
            subprocess.run([*library, *linkage, "-o", path], check=True)
        command = [str(part) for part in (harness, seconds, directory, *libraries)]
        if kind == "thread":  # its shadow memory wants the usual layout
            command = ["setarch", platform.machine(), "-R", *command]
        if kind == "valgrind":
            command = ["valgrind", "--quiet", "--error-exitcode=99", "--fair-sched=yes", *command]
        return subprocess.run(
            command,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds * 20 + 300,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=FLAGS)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    done = run(arguments.kind, arguments.seconds)
    sys.stderr.write(done.stderr)
    sys.stdout.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
