"""Takes the pictures of the documentation again: ``python docs/pictures.py DIRECTORY`` of a tutorial that was followed.

The commands are those that the pages show; a headless Chromium takes the picture.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
WIDTH, HEIGHT = 1240, 860


def main(directory: Path) -> None:
    """Write ``docs/pictures/report.png``."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium here")
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder, "report.html"), PICTURES / "report.png"
        trace = directory / "write.copytrace"
        command = [sys.executable, "-m", "copytrace", "report", str(trace), "--format", "html", "-o", str(page)]
        subprocess.run(command, check=True)
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        shot = [f"--screenshot={picture}", f"--window-size={WIDTH},{HEIGHT}", page.as_uri()]
        subprocess.run([chromium, *options, *shot], check=True, stderr=subprocess.DEVNULL)
        print(f"{picture.name}: {picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
