"""Native symbols: the function of a shared object that an offset lies in, its readable name, and its Rust crate.

Rust's names, of both manglings, and C++'s are demangled. A readable name has no generic arguments, no closure numbers, no
parameters and no compiler's suffix, so that all code written in one function has one name.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

MOST_CHARACTERS = 160
"""Longer readable names are cut in the middle."""

SHARED_CRATES = frozenset({"std", "core", "alloc"})

_SYMBOL_DTYPE = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC

_MANGLED = re.compile(r"_Z|_R[A-Z]")
_SUFFIX = re.compile(r"\.(?:llvm|cold|part|isra|constprop|lto_priv|localalias|\d).*$")
_CLOSURE = re.compile(r"::(?:\{closure#\d+\}|\{\{closure\}\}|\{\{?(?:vtable\.shim|shim:[^}]*|reify\.shim)\}\}?)")


class Symbols:
    """The functions of one shared object. A file that cannot be read has none."""

    def __init__(self, path: Path) -> None:
        self._strings = b""
        self._starts = self._ends = np.empty(0, np.uint64)
        self._names = np.empty(0, np.uint32)
        try:
            self._load(path)
        except Exception:
            self._starts = self._starts[:0]

    def _load(self, path: Path) -> None:
        from elftools.elf.elffile import ELFFile

        with path.open("rb") as file:
            elf = ELFFile(file)
            section = elf.get_section_by_name(".symtab") or elf.get_section_by_name(".dynsym")
            if section is None:
                return
            table = np.frombuffer(section.data(), _SYMBOL_DTYPE)
            self._strings = elf.get_section(section["sh_link"]).data()
        table = table[np.isin(table["info"] & 15, _FUNCTIONS) & (table["section"] != 0)]
        table = table[np.lexsort((table["name"], np.uint64(2**63) - table["size"], table["value"]))]
        starts, first = np.unique(table["value"], return_index=True)
        table = table[first]
        following = np.append(starts[1:], np.uint64(2**64 - 1))[: len(starts)]
        self._starts, self._names = starts, table["name"].copy()
        self._ends = np.where(table["size"] > 0, starts + table["size"], following)

    def find(self, offset: int) -> str:
        """The mangled name of the function at ``offset`` from the load base, empty when none is known."""
        index = int(np.searchsorted(self._starts, np.uint64(offset), side="right")) - 1
        if index < 0 or offset >= int(self._ends[index]):
            return ""
        start = int(self._names[index])
        return self._strings[start : self._strings.index(b"\0", start)].decode(errors="replace")


@lru_cache(maxsize=64)
def _symbols(path: str, size: int, modified: int) -> Symbols:
    del size, modified
    return Symbols(Path(path))


def symbols_of(path: str, size: int, modified: int) -> Symbols:
    """The symbols of a shared object that had ``size`` bytes and was modified at ``modified`` (ns); none when the file is
    another one by now.
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
    """The source name of a Rust or C++ symbol, with all its generic arguments; any other symbol as it is."""
    if not _MANGLED.match(symbol):
        return symbol
    import demangle as demangler

    return demangler.demangle(_SUFFIX.sub("", symbol))


@cache
def readable(symbol: str) -> str:
    """The name of a function as a report shows it. A readable name stays as it is.

    >>> readable("_ZN12object_store5local10read_range17h0123456789abcdefE")
    'object_store::local::read_range'
    """
    name = demangle(symbol)
    if name == symbol and "::" not in name:
        return _SUFFIX.sub("", name)
    name = _CLOSURE.sub("", name)
    name = _without_arguments(name)
    if len(name) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        name = f"{name[: half - 1]}…{name[-half:]}"
    return name


def _without_arguments(name: str) -> str:
    """Drop generic arguments, C++ parameters, and the angle brackets around a type that only its methods need."""
    kept: list[str] = []
    opened: list[bool] = []  # for each open bracket: whether it is kept
    previous = " "
    for character in name:
        hidden = bool(opened) and not opened[-1]
        if character == "<":
            opened.append(not hidden and not (previous.isalnum() or previous in "_:"))
            hidden = not opened[-1]
            if hidden and kept[-2:] == [":", ":"]:
                del kept[-2:]
        elif character == ">" and previous != "-" and opened:
            hidden = not opened.pop()
        if not hidden:
            kept.append(character)
        previous = character
    return "".join(kept)


@cache
def crate_of(function: str) -> str:
    """The crate of a readable Rust name, empty for anything else.

    A method belongs to the crate of its type, or of its trait when the type is the standard library's or a parameter.
    """
    if "::" not in function:
        return ""
    crates = re.findall(r"(?<![\w:])([a-z_]\w*)::", function)
    return next((crate for crate in crates if crate not in SHARED_CRATES), crates[0] if crates else "")
