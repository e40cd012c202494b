"""Running rows: one process a write and one a read; a row that fails does not take the others along."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from copytrace.errors import CopytraceError
from copytrace.matrix import tables
from copytrace.matrix.configurations import LOCAL, Configuration, select
from copytrace.matrix.environments import cache_directory, environment
from copytrace.matrix.results import Figures, Results, failed, figures, fingerprint, key_of, setting_of
from copytrace.matrix.server import KEY, REGION, SECRET, make_bucket, s3_server

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 900.0
_BUCKET = "copytrace"


def shape_of(nbytes: int) -> tuple[int, int]:
    """The side of the square float32 array of at most ``nbytes``. Raises CopytraceError when that is nothing."""
    side = math.isqrt(nbytes // 4)
    if side < 1:
        raise CopytraceError(f"--size {nbytes}: give at least 4 bytes")
    return side, side


class Matrix:
    """One table, run row by row.

    ``directory`` keeps the results; ``keep`` keeps the trace and the report of each run there too, in a directory
    ``traces``. ``tell`` is given a line for each thing that happens.
    """

    def __init__(
        self,
        table: str,
        directory: Path,
        *,
        only: str = "",
        nbytes: int = 100_000_000,
        keep: bool = False,
        cache: Path | None = None,
        tell: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.rows = select(table, only)
        self.shape = shape_of(nbytes)
        self.table = table
        self.directory = directory.resolve()
        self.keep = keep
        self.cache = cache or cache_directory()
        self.tell = tell
        self.stamp = datetime.date.today().isoformat() if table == "latest" else ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CopytraceError(f"{directory}: cannot be made: {error.strerror}") from error
        self.results = Results(directory, table)
        self._servers: dict[bool, str] = {}

    def run(self) -> list[Figures]:
        """Run what has not been run yet; the figures of all rows in their order."""
        with ExitStack() as open_servers:
            self._open = open_servers
            for number, row in enumerate(self.rows, 1):
                self.tell(f"[{number}/{len(self.rows)}] {row.name}")
                for compressed in (False, True):
                    self._row(row, compressed)
        self._servers = {}
        found = self.results.found
        return [
            found[key]
            for row in self.rows
            for stage in ("write", "read")
            for compressed in (False, True)
            if (key := key_of(row.name, stage, compressed)) in found
        ]

    def text(self) -> str:
        """The tables of the rows as Markdown."""
        return tables.render(self.rows, self.results.found, self.table)

    def save(self) -> tuple[Path, Path]:
        """Write the tables of all rows found so far as Markdown beside the JSON; both paths."""
        known = {run.row for run in self.results.found.values()}
        rows = [row for row in select(self.table) if row.name in known]
        markdown = self.results.path.with_suffix(".md")
        markdown.write_text(tables.render(rows, self.results.found, self.table))
        return self.results.path, markdown

    def _row(self, row: Configuration, compressed: bool) -> None:
        mark = fingerprint(row, self.shape, self.stamp)
        stages = [stage for stage, wanted in (("write", row.writes), ("read", row.reads)) if wanted]
        if all(self.results.has(key_of(row.name, stage, compressed), mark) for stage in stages):
            self.tell(f"  {setting_of(compressed)}: kept from before")
            return
        with tempfile.TemporaryDirectory(prefix="copytrace-matrix-") as place:
            try:
                binaries = environment(
                    row.requirements, cache=self.cache, exclude_newer=row.exclude_newer, stamp=self.stamp
                )
                where = self._where(row, compressed)
                if not row.writes:
                    self._process(row, "fill", compressed, binaries, Path(place), where)
            except CopytraceError as error:
                self._keep([failed(row.name, stage, compressed, mark, str(error)) for stage in stages])
                return
            for number, stage in enumerate(stages):
                started = time.monotonic()
                try:
                    found = self._process(row, stage, compressed, binaries, Path(place), where)
                    one = figures(row.name, stage, compressed, mark, found["report"], found["peak_bytes"])
                    self._keep([one], f" [{time.monotonic() - started:.0f} s]")
                except CopytraceError as error:
                    left = stages[number + 1 :] if stage == "write" else []
                    reasons = {stage: str(error)} | dict.fromkeys(left, "nothing was written to read")
                    self._keep([failed(row.name, name, compressed, mark, reason) for name, reason in reasons.items()])
                    return

    def _where(self, row: Configuration, compressed: bool) -> dict[str, Any] | None:
        """Where an S3 server is, with a bucket; None for a row on local disk."""
        if row.filesystem == LOCAL:
            return None
        https = row.filesystem.endswith("https")
        if https not in self._servers:
            url = self._open.enter_context(s3_server(self.cache, https=https))
            make_bucket(url, _BUCKET)
            self._servers[https] = url
        prefix = f"{row.name}-{setting_of(compressed)}.zarr"
        return {
            "bucket": _BUCKET,
            "prefix": prefix,
            "endpoint": self._servers[https],
            "key": KEY,
            "secret": SECRET,
            "region": REGION,
            "verify": not https,
        }

    def _process(
        self,
        row: Configuration,
        stage: str,
        compressed: bool,
        binaries: Path,
        place: Path,
        where: dict[str, Any] | None,
    ) -> dict[str, Any]:
        name = key_of(row.name, stage, compressed).replace(" ", "-")
        data, task, result = place / "data", place / f"{name}.task", place / f"{name}.json"
        data.mkdir(exist_ok=True)
        traces = self.directory / "traces" / self.table if self.keep else place
        traces.mkdir(parents=True, exist_ok=True)
        facts = {
            "driver": row.driver,
            "stage": stage,
            "shape": self.shape,
            "compressed": compressed,
            "path": str(data),
            "s3": where,
            "label": name,
            "trace": str(traces / f"{name}.copytrace"),
        }
        task.write_text(json.dumps(facts))
        command = [str(binaries / "python"), "-m", "copytrace.matrix.worker", str(task), str(result)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, cwd=place, check=False)
        except subprocess.TimeoutExpired as error:
            raise CopytraceError(f"{name}: not done within {_TIMEOUT:.0f} s") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise CopytraceError(f"{name}: {last}"[:400])
        if stage == "fill":
            return {}
        found = json.loads(result.read_text())
        if self.keep:
            (traces / f"{name}.json").write_text(json.dumps(found["report"]))
        return dict(found)

    def _keep(self, found: list[Figures], took: str = "") -> None:
        reasons: dict[str, list[str]] = {}
        for one in found:
            self.results.add(one)
            kind = f"{one.stage} {setting_of(one.compressed)}"
            if one.error:
                reasons.setdefault(one.error, []).append(kind)
            else:
                named = "" if one.named is None else f", {one.named:.1%} of it named"
                named += "" if one.recorded else ", copies inferred: no native hook"
                self.tell(
                    f"  {kind}: {one.copies:.3f} copies, {one.extra_at_peak:.3f} extra at peak "
                    f"({one.process_at_peak:.3f} in the process){named}{took}"
                )
        for reason, kinds in reasons.items():
            self.tell(f"  {', '.join(kinds)}: failed: {reason}")
