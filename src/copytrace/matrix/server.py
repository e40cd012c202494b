"""An S3 server on loopback, in a process of its own: moto's."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from copytrace.errors import CopytraceError
from copytrace.matrix.environments import environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUIREMENTS = ("moto[server]>=5",)
REGION, KEY, SECRET = "us-east-1", "copytrace", "copytrace"
_PATIENCE = 60.0
"""Seconds within which the server must answer."""


@contextmanager
def s3_server(cache: Path, *, https: bool = False, program: Path | None = None) -> Iterator[str]:
    """Start a server and stop it in the end; gives its URL. ``program`` is a ``moto_server`` that is installed already.

    Raises CopytraceError when it does not answer.
    """
    program = program or environment(REQUIREMENTS, cache=cache, traced=False) / "moto_server"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(program), "-H", "127.0.0.1", "-p", str(port), *(["--ssl"] if https else [])]
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, port)
        yield f"{'https' if https else 'http'}://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CopytraceError(f"moto_server ended with exit status {process.returncode} before it answered")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise CopytraceError(f"moto_server did not answer within {_PATIENCE:.0f} s")


def make_bucket(url: str, bucket: str) -> None:
    """Create a bucket at the server of ``url``. Raises CopytraceError when it refuses."""
    scheme, _, host = url.partition("://")
    if scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, timeout=30, context=ssl._create_unverified_context()
        )
    else:
        connection = http.client.HTTPConnection(host, timeout=30)
    try:
        connection.request("PUT", f"/{bucket}")
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise CopytraceError(f"the S3 server answered {answer.status} when asked for bucket {bucket!r}")
