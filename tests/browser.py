"""A headless Chromium for the tests of HTML, driven through a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and writes answers to 4."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The browser's executable, None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page at a time. ``problems``: console messages, exceptions and failed loads. ``requests``: URLs asked for."""

    def __init__(self, profile: Path) -> None:
        command = find()
        assert command is not None
        theirs, self._write = os.pipe()
        self._read, ours = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs), str(ours), command, *options, f"--user-data-dir={profile}"],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self._waiting = b""
        self._number = 0
        self._session: str | None = None
        self._seen: list[str] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self.command("Browser.close")
        self._process.wait(20)
        os.close(self._read)
        os.close(self._write)

    def open(self, page: Path, *, width: int = 1280, height: int = 900, dark: bool = False, fragment: str = "") -> None:
        """Load ``page`` anew."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self._go("about:blank")
        self.problems.clear()
        self.requests.clear()
        self._go(page.as_uri() + fragment)

    def _go(self, url: str) -> None:
        self._seen.clear()
        self.command("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._seen:
            self._take()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        done = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def screenshot(self, target: Path) -> None:
        """A PNG of the whole page."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._take()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _take(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            received = os.read(self._read, 1 << 16)
            assert received, f"the browser has gone: {self._process.wait(20)}"
            self._waiting += received
        line, _, self._waiting = self._waiting.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method = message.get("method", "")
        self._seen.append(method)
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed"):
            self.problems.append(json.dumps(message["params"]))
        if method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message
