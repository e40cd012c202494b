"""Native symbols: the function of a shared object that an offset lies in, its readable name, and its Rust crate.

Rust's names, of both manglings, and C++'s are demangled. A readable name has no generic arguments, no closure
numbers, no parameters and no compiler's suffix, so that all code written in one function has one name.
"""

from __future__ import annotations

import contextlib
import re
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_CHARACTERS = 160
"""Longer readable names are cut in the middle."""
_CUT = "…"

RUNTIME_CRATES = frozenset(
    {
        *(
            "std",
            "core",
            "alloc",
            "hashbrown",
            "rayon",
            "rayon_core",
            "tokio",
            "tokio_util",
            "pyo3",
            "pyo3_async_runtimes",
        ),
        *("futures", "futures_channel", "futures_core", "futures_executor", "futures_util"),
    }
)
"""Crates whose functions run what others wrote."""

_LANGUAGE_CRATES = frozenset({"std", "core", "alloc"})

_SECTION_DTYPE = np.dtype(
    [
        *(("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8")),
        *(("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("alignment", "<u8"), ("entry", "<u8")),
    ]
)
_SYMBOL_DTYPE = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_SYMTAB, _DYNSYM = 2, 11
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC

_MANGLED = re.compile(r"_Z|_R[A-Z]")
_OLD_RUST = re.compile(r"_ZN.*17h[0-9a-f]{16}E")
_TAKEN_FOR_CPP = re.compile(r"[\w.$:]+::h[0-9a-f]{16}$")
_SUFFIX = re.compile(r"\.(?:llvm|cold|part|isra|constprop|lto_priv|localalias|\d).*$")
_CLOSURE = re.compile(r"(?:::)?\{\{?(?:closure|shim|vtable|reify)[^}]*\}?\}")
_PLAIN_TYPE = re.compile(r"^<([\w:]+)>(?=::)")
_PARAMETERS = re.compile(
    r"(?:(?<!operator)\((?!anonymous namespace\))(?:[^()]|\([^()]*\))*\)(?: const)?(?: ?\[clone [^]]*\]?)*)+$"
)
_PATH_ROOT = re.compile(r"(?<![\w:])([a-z_]\w*)::")


class Symbols:
    """The functions of a 64-bit ELF file: those of its symbol table, or the exported ones when that was stripped. A
    file that cannot be read has none.
    """

    def __init__(self, path: Path) -> None:
        self._strings = b""
        self._starts = self._ends = np.empty(0, np.uint64)
        self._names = np.empty(0, np.uint32)
        with contextlib.suppress(OSError, ValueError, IndexError, OverflowError, MemoryError):
            self._load(path)

    def _load(self, path: Path) -> None:
        with path.open("rb") as file:

            def part(offset: int, size: int) -> bytes:
                file.seek(offset)
                return file.read(size)

            header = part(0, 64)
            if header[:6] != b"\x7fELF\x02\x01":
                return
            offset, count = int.from_bytes(header[40:48], "little"), int.from_bytes(header[60:62], "little")
            sections = np.frombuffer(part(offset, count * _SECTION_DTYPE.itemsize), _SECTION_DTYPE)
            tables = [section for kind in (_SYMTAB, _DYNSYM) for section in sections[sections["type"] == kind]]
            if not tables:
                return
            names = sections[tables[0]["link"]]
            table = np.frombuffer(part(int(tables[0]["offset"]), int(tables[0]["size"])), _SYMBOL_DTYPE)
            strings = part(int(names["offset"]), int(names["size"])) + b"\0"
        table = table[
            np.isin(table["info"] & 15, _FUNCTIONS) & (table["section"] != 0) & (table["name"] < len(strings))
        ]
        table = table[np.lexsort((table["name"], np.uint64(2**63) - table["size"], table["value"]))]
        starts, first = np.unique(table["value"], return_index=True)
        table = table[first]
        of = sections[np.minimum(table["section"], len(sections) - 1)]
        following = np.append(starts, np.uint64(2**64 - 1))[1:]
        unsized = np.minimum(following, of["address"] + of["size"])
        self._strings, self._starts, self._names = strings, starts, table["name"].copy()
        self._ends = np.where(table["size"] > 0, starts + table["size"], unsized)

    def find(self, offset: int) -> str:
        """The mangled name of the function at ``offset`` from the load base, empty when none is known."""
        index = int(np.searchsorted(self._starts, np.uint64(offset), side="right")) - 1
        if index < 0 or offset >= int(self._ends[index]):
            return ""
        start = int(self._names[index])
        return self._strings[start : self._strings.index(b"\0", start)].decode(errors="replace")

    def defines(self, symbol: str) -> bool:
        """Whether a function of that mangled name is among them."""
        name, at = symbol.encode() + b"\0", -1
        while (at := self._strings.find(name, at + 1)) >= 0:
            if (at == 0 or self._strings[at - 1] == 0) and bool((self._names == at).any()):
                return True
        return False


@lru_cache(maxsize=64)
def _symbols(path: str, size: int, modified: int) -> Symbols:
    del size, modified
    return Symbols(Path(path))


def symbols_of(path: str, size: int, modified: int) -> Symbols:
    """The symbols of a shared object that had ``size`` bytes and was modified at ``modified`` (ns); none when the file
    is another one by now.
    """
    try:
        status = Path(path).stat()
    except OSError:
        return _symbols("", 0, 0)
    if (status.st_size, status.st_mtime_ns) != (size, modified):
        return _symbols("", 0, 0)
    return _symbols(path, size, modified)


@cache
def demangle(symbol: str) -> str:
    """The source name of a Rust or C++ symbol, with all its generic arguments; any other symbol as it is.

    memray takes old Rust names for C++ and leaves their escapes and their hash; those are read as well.
    """
    if _TAKEN_FOR_CPP.match(symbol):
        symbol = f"_ZN{''.join(f'{len(part)}{part}' for part in symbol.split('::'))}E"
    if not _MANGLED.match(symbol):
        return symbol
    import demangle as demangler

    rust = _OLD_RUST.match(symbol)
    bare = rust.group() if rust else symbol.split(".", 1)[0]
    if bare.startswith("_R") or rust:
        return demangler.demangle(bare)
    try:
        return demangler.signature(bare).qualified_name
    except demangler.DemanglingError:
        return symbol


@cache
def readable(symbol: str) -> str:
    """The name of a function as a report shows it; a readable name stays as it is.

    A function of a runtime that was compiled for one closure goes by the name of the function that the closure is in:
    it has that code built into it.

    >>> readable("_ZN12object_store5local10read_range17h0123456789abcdefE")
    'object_store::local::read_range'
    """
    name, before = _read(symbol), symbol
    while name != before:
        name, before = _read(name), name
    half = MOST_CHARACTERS // 2
    return name if len(name) <= MOST_CHARACTERS else f"{name[: half - 1]}{_CUT}{name[-half:]}"


def _read(symbol: str) -> str:
    if _CUT in symbol:
        return symbol
    name = _PARAMETERS.sub("", demangle(symbol))
    short = _shorten(name) if "::" in name else _SUFFIX.sub("", name)
    if crate_of(short) in RUNTIME_CRATES and not short.startswith("core::ptr::drop"):
        inner = (_shorten(path) for path in _closures(name))
        short = next((path for path in inner if crate_of(path) not in RUNTIME_CRATES), short)
    return short


def _shorten(name: str) -> str:
    """Leave out generic arguments, closures, and the brackets around a plain type."""
    if "operator" in name:
        return name
    kept: list[str] = []
    shown = [True]  # for the name and each open bracket in it
    previous = " "
    for character in name:
        if character == "<":
            shown.append(shown[-1] and not (previous.isalnum() or previous in "_:"))
            if shown[-2] and not shown[-1] and kept[-2:] == [":", ":"]:
                del kept[-2:]
        if shown[-1]:
            kept.append(character)
        if character == ">" and previous != "-" and len(shown) > 1:
            shown.pop()
        previous = character
    return _PLAIN_TYPE.sub(r"\1", _CLOSURE.sub("", "".join(kept)))


def _closures(name: str) -> Iterator[str]:
    """The functions whose closures are among the generic arguments of ``name``."""
    for closure in re.finditer(r"::\{closure", name):
        at, depth = closure.start(), 0
        while at > 0 and (depth or name[at - 1] not in " ,<([&"):
            at -= 1
            if name[at] == ">" and name[at - 1] != "-":
                depth += 1
            elif name[at] == "<":
                depth -= 1
        yield name[at : closure.start()]


@cache
def crate_of(function: str) -> str:
    """The crate of a readable Rust name or the namespace of a C++ one, empty for C.

    A method belongs to the crate of its type, or of its trait when the type is the language's own or a parameter.
    """
    crates = _PATH_ROOT.findall(function)
    return next((crate for crate in crates if crate not in _LANGUAGE_CRATES), crates[0] if crates else "")
