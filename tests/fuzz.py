"""Crafted and damaged files for everything that reads files: traces, leftovers of runs, JSON reports.

    python tests/fuzz.py [--minutes 5] [--seed N] [--coverage]

Each input is a file of the corpus that was changed: bytes of it, or what it holds, put together again with right
checksums. It must be refused in one line, or read and rendered in every form and compared with the original, in bounded
time and memory, without running or writing anything. Prints the inputs tried, what became of them and, with
``--coverage``, how much of the reader they reached. Exits with 1 when an input did anything else, which is then kept in
``tests/found``.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from copytrace.cli import load_report
from copytrace.errors import CopytraceError
from copytrace.report import Report
from copytrace.reports import diff

CORPUS = Path(__file__).with_name("corpus")
SECONDS = 20
"""The most that one input may take, on a busy machine."""
MEMORY = 1 << 30
"""Bytes of address space beyond what the process has that reading may ask for."""
READERS = (
    "trace",
    "archive",
    "assemble",
    "spool",
    "pending",
    "transfers",
    "objects",
    "allocations",
    "report",
    "reports/json",
)
"""Modules that what is read goes through."""

NUMBERS = (0, 1, -1, 2, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**40, 1e308, 0.5)
TEXTS = ("", "\0", "<script>alert(1)</script>", "| a | b |", "`x`", "\n# h", "\x1b[31m", "../../etc/passwd", "a" * 5000)
ODD: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, True, [], {}, [[]], {"a": {}}, [None] * 50)

type Blob = dict[str, bytes]
"""Files of a directory, or the one file under an empty name."""


class MisdeedError(AssertionError):
    """What reading a file must never do."""


# --- the guard -------------------------------------------------------------------------------------------------------

_watching = False
_FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pickle.find_class",
    "socket.connect",
)
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.link", "os.symlink")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    if event in _FORBIDDEN or event in _CHANGES:
        raise MisdeedError(f"{event} {arguments}")
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        raise MisdeedError(f"opened {arguments[0]!r} to write")
    if event == "exec" and arguments[0].co_filename in ("<string>", "<stdin>"):
        raise MisdeedError("executed a text")


sys.addaudithook(_audit)


def _late(*_: object) -> None:
    raise MisdeedError(f"took more than {SECONDS} s")


@contextmanager
def guarded() -> Iterator[None]:
    """Nothing is run or written inside, and it ends."""
    global _watching
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, _late)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    _watching = True
    try:
        yield
    finally:
        _watching = False
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, previous)


# --- one input -------------------------------------------------------------------------------------------------------


def use(report: Report, original: Report) -> None:
    """Render it in every form, and compare it."""
    for by in ("path", "layer", "site"):
        if "\x1b" in report.to_text(by=by):  # type: ignore[arg-type]
            raise MisdeedError("a text drives the terminal")
        report.to_markdown(by=by)  # type: ignore[arg-type]
    if report.to_html().count("<script") != 1:
        raise MisdeedError("a page has a script of a file's")
    Report.from_json(report.to_json())
    for found in (diff.compare(original, report), diff.compare(report, original)):
        diff.to_text(found)
        diff.to_markdown(found)
        diff.to_json(found)


def examine(path: Path, original: Report) -> str:
    """Read ``path`` and use it in every way: ``refused`` or ``read``. Raises MisdeedError for anything else."""
    with guarded():
        try:
            report = load_report(str(path))
        except CopytraceError as error:
            if "\n" in str(error) or path.name not in str(error):
                raise MisdeedError(f"refused with {str(error)!r}") from error
            return "refused"
        except MisdeedError:
            raise
        except BaseException as error:
            raise MisdeedError(f"reading raised {type(error).__name__}: {error}") from error
        try:
            use(report, original)
        except MisdeedError:
            raise
        except BaseException as error:
            raise MisdeedError(f"using it raised {type(error).__name__}: {error}") from error
        return "read"


def load_all(directory: Path) -> dict[str, Report]:
    """The reports of the corpus, used once: what is imported when it is first needed is there."""
    found = {}
    for name, blob in seeds().items():
        write(blob, directory / name)
        found[name] = load_report(str(directory / name))
        use(found[name], found[name])
    return found


# --- changes ---------------------------------------------------------------------------------------------------------


def seeds() -> dict[str, Blob]:
    """The files of the corpus, by name; what a killed run left is packed there."""
    found = {path.name: {"": path.read_bytes()} for path in sorted(CORPUS.glob("*")) if path.suffix != ".zip"}
    for path in sorted(CORPUS.glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            found[path.stem] = {name: archive.read(name) for name in archive.namelist()}
    return found


def write(blob: Blob, path: Path) -> None:
    if "" in blob:
        path.write_bytes(blob[""])
        return
    path.mkdir()
    for name, data in blob.items():
        (path / name).write_bytes(data)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert or overwrite bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(len(changed) + 1)
        size = rng.choice([1, 2, 8, 73, 1000])
        kind = rng.randrange(6)
        if kind == 0 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[place : place + size]
        elif kind == 2:
            changed[place:place] = changed[place : place + size]
        elif kind == 3:
            changed[place : place + size] = rng.randbytes(size)
        elif kind == 4:
            changed[place : place + 8] = (rng.choice(NUMBERS[:-2]) % 2**64).to_bytes(8, rng.choice(["little", "big"]))  # type: ignore[operator]
        else:
            del changed[place:]
    return bytes(changed)


def change_json(value: Any, rng: random.Random) -> Any:
    """Put something odd in the place of some part, take a part out, or double it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.08:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: change_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.08:
            return value[:place] + value[place + 1 :]
        if kind < 0.16:
            return value + value[place:]
        return [*value[:place], change_json(value[place], rng), *value[place + 1 :]]
    return rng.choice(ODD)


def change_column(data: bytes, rng: random.Random) -> bytes:
    """Another npy of almost the same values, or one whose header lies."""
    try:
        column = np.load(io.BytesIO(data))
    except Exception:  # changed before
        return data
    kind = rng.randrange(7)
    if kind < 3 and column.size:
        values = column.copy()
        for _ in range(rng.choice([1, 3, 30])):
            values[rng.randrange(len(values))] = np.array(int(rng.choice(NUMBERS[:12])) % 2**64, "u8").astype(
                column.dtype
            )
        column = values
    elif kind == 3:
        column = np.repeat(column, 2) if column.size else np.ones(3, column.dtype)
    elif kind == 4:
        column = column[: rng.randrange(len(column) + 1)]
    elif kind == 5:
        column = column.astype(rng.choice(["<f8", ">u8", "|O", "<U3"]))
    target = io.BytesIO()
    np.lib.format.write_array(target, column, allow_pickle=True)
    changed = target.getvalue()
    if kind == 6:
        lie = rng.choice([b"10000000000000", b"-5", b"9" * 30, b"(1,)", b"__import__('os')"])
        changed = changed.replace(f"({len(column)},)".encode(), b"(" + lie + b",)", 1)
    return changed


def change_archive(data: bytes, rng: random.Random) -> bytes:
    """The same archive with members changed, and right checksums."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        name = rng.choice(["trace.json", *members])
        if name not in members:
            continue
        if rng.random() < 0.04:
            del members[name]
        elif name.endswith("trace.json"):
            members[name] = json.dumps(change_json(json.loads(members[name]), rng)).encode()
        else:
            members[name] = change_column(members[name], rng)
    if rng.random() < 0.05:
        members[rng.choice(["../outside.npy", "/absolute", "spans/id.npy/", "\0"])] = b"x"
    target = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        warnings.simplefilter("ignore")
        for name, content in members.items():
            archive.writestr(name, content)
    return target.getvalue()


def change(name: str, blob: Blob, rng: random.Random) -> Blob:
    """Another input, made from one of the corpus."""
    part = rng.choice(sorted(blob))
    data = blob[part]
    thorough: Callable[[bytes, random.Random], bytes] = change_bytes
    if rng.random() < 0.7:
        if name.endswith(".copytrace"):
            thorough = change_archive
        elif name.endswith(".json") or part.endswith(".json"):
            return blob | {part: json.dumps(change_json(json.loads(data), rng)).encode()}
        elif part and rng.random() < 0.1:
            return {other: content for other, content in blob.items() if other != part}
    return blob | {part: thorough(data, rng)}


# --- crafted ---------------------------------------------------------------------------------------------------------


def _archive(members: dict[str, bytes | int], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip of ``members``, each its content or how many zeros it unpacks to."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", how, compresslevel=9) as archive:
        for name, content in members.items():
            if isinstance(content, int):
                with archive.open(name, "w") as member:
                    for _ in range(content >> 20):
                        member.write(bytes(1 << 20))
            else:
                archive.writestr(name, content)
    return target.getvalue()


def _whole() -> dict[str, bytes | int]:
    with zipfile.ZipFile(CORPUS / "whole.copytrace") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _column(old: bytes, new: bytes) -> bytes:
    """The trace with ``old`` replaced in the header of a column."""
    members = _whole()
    members["spans/id.npy"] = members["spans/id.npy"].replace(old, new, 1)  # type: ignore[union-attr]
    return _archive(members)


def _header(**changes: Any) -> bytes:
    members = _whole()
    return _archive(members | {"trace.json": json.dumps(json.loads(members["trace.json"]) | changes).encode()})  # type: ignore[arg-type]


def _pickle() -> bytes:
    target = io.BytesIO()
    np.lib.format.write_array(target, np.array([{"a": print}], "O"), allow_pickle=True)
    return _archive(_whole() | {"spans/id.npy": target.getvalue()})


def _lies_of_size() -> bytes:
    stored = bytearray(_archive({"trace.json": b"{}"}, zipfile.ZIP_STORED))
    at = stored.rindex(b"PK\x01\x02")
    stored[at + 24 : at + 28] = b"\xff\xff\xff\x7f"
    return bytes(stored)


DEEP = b"[" * 200_000


def crafted() -> dict[str, Callable[[], bytes]]:
    """Files made to harm, all of which are to be refused: name -> makes the content."""
    return {
        "bomb.copytrace": lambda: _archive(_whole() | {"spans/id.npy": 300 << 20}),
        "bomb_of_header.copytrace": lambda: _archive({"trace.json": 300 << 20}),
        "many_elements.copytrace": lambda: _column(b"'shape': (", b"'shape': (9999999999999999"),
        "negative.copytrace": lambda: _column(b"'shape': (", b"'shape': (-"),
        "code.copytrace": lambda: _column(b"'<u8'", b"exit()"),
        "pickle.copytrace": _pickle,
        "packed_otherwise.copytrace": lambda: _archive(_whole(), zipfile.ZIP_LZMA),
        "declares_too_much.copytrace": _lies_of_size,
        "deep.copytrace": lambda: _archive(_whole() | {"trace.json": DEEP}),
        "deep.json": lambda: b'{"schema": "copytrace.report/1", "paths": ' + DEEP,
        "long_number.json": lambda: b'{"schema": "copytrace.report/1", "spans": ' + b"9" * 100_000 + b"}",
        "parts.copytrace": lambda: _header(parts=10**18),
        "missing_part.copytrace": lambda: _header(parts=1),
        "no_trace.copytrace": lambda: _archive({"../../outside": b"x", "/etc/passwd": b"x"}),
    }


# --- many ------------------------------------------------------------------------------------------------------------


def fuzz(tries: int, seed: int, seconds: float = 1e9, keep: Path | None = None) -> tuple[Counter[str], list[str]]:
    """What became of ``tries`` inputs or as many as ``seconds`` allow, by kind; and the misdeeds."""
    told: Counter[str] = Counter()
    misdeeds = []
    whole = seeds()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        originals = load_all(Path(directory))
        for number in range(tries):
            if time.monotonic() - started > seconds:
                break
            rng = random.Random(f"{seed} {number}")
            name = rng.choice(list(whole))
            blob = change(name, whole[name], rng)
            path = Path(directory) / f"input{Path(name).suffix}"
            write(blob, path)
            before = sorted(Path(directory).rglob("*"))
            try:
                told[f"{name} {examine(path, originals[name])}"] += 1
            except MisdeedError as misdeed:
                misdeeds.append(f"{name}, input {seed} {number}: {misdeed}")
                if keep is not None:
                    keep.mkdir(exist_ok=True)
                    write(blob, keep / f"{seed}-{number}-{name}")
            if sorted(Path(directory).rglob("*")) != before:
                misdeeds.append(f"{name}, input {seed} {number}: wrote files")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return told, misdeeds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coverage", action="store_true", help="measure what of the reader was reached")
    options = parser.parse_args()
    measured = None
    if options.coverage:
        import coverage

        source = Path(sys.modules["copytrace"].__file__ or "").parent
        measured = coverage.Coverage(branch=True, data_file=None, include=[f"{source}/{name}.py" for name in READERS])
        measured.start()
    told, misdeeds = fuzz(1 << 60, options.seed, options.minutes * 60, CORPUS.with_name("found"))
    if measured is not None:
        measured.stop()
        measured.report(skip_empty=True)
    for kind, count in sorted(told.items()):
        print(f"{count:>9,} {kind}")
    print(f"{sum(told.values()) + len(misdeeds):,} inputs, {len(misdeeds)} misdeeds")
    print("\n".join(misdeeds[:20]))
    sys.exit(bool(misdeeds))


if __name__ == "__main__":
    main()
