"""Names of native functions: from an address to what a report shows."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import movers
from copytrace.errors import CopytraceError
from copytrace.model import Frame
from copytrace.native import MOST_CHARACTERS, RUNTIME_CRATES, Symbols, crate_of, demangle, readable
from copytrace.objects import UNKNOWN, Object, Objects

READ_RANGE = "_RNvNtCsfeSrEyBjfgL_12object_store5local10read_range"
PUT_PART = "_RNvXsf_NtCsfeSrEyBjfgL_12object_store5localNtB5_11LocalUploadNtNtB7_6upload15MultipartUpload8put_part"
OLD_READ_RANGE = "_ZN12object_store5local10read_range17h75453e505225c731E"
OLD_CLOSURE = "_ZN8_obstore3put19put_multipart_inner28_$u7b$$u7b$closure$u7d$$u7d$17h7d895683dd2ff708E"
OLD_PUT_PART = (
    "_ZN90_$LT$object_store..local..LocalUpload$u20$as$u20$object_store..upload..MultipartUpload$GT$8put_part"
    "17hdda5f1e857b2cbc9E"
)
OLD_GENERIC = "_ZN5alloc7raw_vec20RawVecInner$LT$A$GT$15try_allocate_in17h7c4981d046785389E"
STORE_CHUNK = (
    "_RINvMNtNtCsjVvMnXeFoTe_5zarrs5array19array_sync_writableINtB5_5ArrayDNtNtCs5hZgEyWxaV9_13zarrs_storage12storage_sync"
    "37ReadableWritableListableStorageTraitsEL_E15store_chunk_optNtNtCsgPS98XirF6j_11zarrs_codec11array_bytes10ArrayBytes"
    "ECs3Bxd8N0NmxA_9__zarrista"
)
CHUNKED_STREAM = "_RNCNCNvNtCsfeSrEyBjfgL_12object_store5local14chunked_stream00B7_"
MAP_NEXT = (
    "_RNvXs0_NtNtNtCs4NRVxsYgnAr_4core4iter8adapters3mapINtB5_3MapINtNtCscdodAO9FK5_5alloc5boxed3BoxDNtNt"
    "Cs5hZgEyWxaV9_13zarrs_storage10byte_range26MaybeSendByteRangeIteratorp4ItemNtB1x_9ByteRangeEL_ENCNvX"
    "s0_NtNtB1z_5store12memory_storeNtB3e_11MemoryStoreNtNtB1z_12storage_sync21ReadableStorageTraits16get"
    "_partial_many0ENtNtNtB9_6traits8iterator8Iterator4nextB1z_"
)
"""core's map iterator, compiled for a closure of zarrs_storage."""
POLL = (
    "_RINvNtNtNtCs8wXVJCQAi7Q_5tokio7runtime4task3raw4pollINtNtNtB6_8blocking4task12BlockingTaskNCNCNvNtC"
    "sfeSrEyBjfgL_12object_store5local14chunked_stream00ENtNtBT_8schedule16BlockingScheduleEB1y_"
)
"""tokio's poll of a task, compiled for a closure of object_store."""


@pytest.mark.parametrize(
    ("symbol", "name", "crate"),
    [
        (READ_RANGE, "object_store::local::read_range", "object_store"),
        (OLD_READ_RANGE, "object_store::local::read_range", "object_store"),
        (OLD_READ_RANGE + ".llvm.8675309", "object_store::local::read_range", "object_store"),
        (OLD_READ_RANGE + ".32701", "object_store::local::read_range", "object_store"),
        (READ_RANGE + ".cold", "object_store::local::read_range", "object_store"),
        (
            PUT_PART,
            "<object_store::local::LocalUpload as object_store::upload::MultipartUpload>::put_part",
            "object_store",
        ),
        (
            OLD_PUT_PART,
            "<object_store::local::LocalUpload as object_store::upload::MultipartUpload>::put_part",
            "object_store",
        ),
        (OLD_CLOSURE, "_obstore::put::put_multipart_inner", "_obstore"),
        (OLD_GENERIC, "alloc::raw_vec::RawVecInner::try_allocate_in", "alloc"),
        (STORE_CHUNK, "zarrs::array::Array::store_chunk_opt", "zarrs"),
        (CHUNKED_STREAM, "object_store::local::chunked_stream", "object_store"),
        (
            MAP_NEXT,
            "<zarrs_storage::store::memory_store::MemoryStore as zarrs_storage::storage_sync::ReadableStorageTraits>"
            "::get_partial_many",
            "zarrs_storage",
        ),
        (POLL, "object_store::local::chunked_stream", "object_store"),
        ("_ZN5arrow6Buffer9CopySliceERKS0_lll", "arrow::Buffer::CopySlice", "arrow"),
        ("_ZNSt6vectorIhSaIhEE17_M_default_appendEm", "std::vector::_M_default_append", "std"),
        ("_ZN5arrow8internallsERSoRKNS_6StatusE", "arrow::internal::operator<<", "arrow"),
        ("memcpy", "memcpy", ""),
        ("PyBuffer_ToContiguous", "PyBuffer_ToContiguous", ""),
        ("ZSTD_compressBlock_fast.constprop.0", "ZSTD_compressBlock_fast", ""),
        ("__pyx_pw_9numcodecs_4zstd_1compress", "__pyx_pw_9numcodecs_4zstd_1compress", ""),
        ("+0x1a2b", "+0x1a2b", ""),
        ("", "", ""),
    ],
)
def test_names(symbol: str, name: str, crate: str) -> None:
    assert (readable(symbol), crate_of(readable(symbol))) == (name, crate)
    assert readable(readable(symbol)) == name


@pytest.mark.parametrize(
    ("function", "crate"),
    [
        ("icechunk::asset_manager::async_reader_to_bytes", "icechunk"),
        ("<alloc::sync::Arc as object_store::ObjectStore>::put", "object_store"),
        ("<&T as core::fmt::Debug>::fmt", "core"),
        ("<T as zarrs_plugin::ExtensionName>::name", "zarrs_plugin"),
        ("<impl serde::Serialize for zarrs::Fill>::serialize", "serde"),
        ("<tokio::io::Take as tokio::io::AsyncRead>::poll_read", "tokio"),
        ("numpy.ndarray.copy", ""),
        ("read", ""),
    ],
)
def test_a_method_belongs_to_its_type_or_else_its_trait(function: str, crate: str) -> None:
    assert crate_of(function) == crate


def test_runtimes_are_named_as_such() -> None:
    assert {"tokio", "core", "pyo3", "futures_util"} <= RUNTIME_CRATES
    assert "object_store" not in RUNTIME_CRATES


def test_a_long_name_is_cut_in_the_middle_and_stays_so() -> None:
    name = "a::" + "b" * 200 + "::end"
    assert len(readable(name)) == MOST_CHARACTERS
    assert readable(name).startswith("a::b")
    assert readable(name).endswith("b::end")
    assert readable(readable(name)) == readable(name)


_MANGLED = st.sampled_from([READ_RANGE, PUT_PART, OLD_CLOSURE, OLD_PUT_PART, STORE_CHUNK, MAP_NEXT, POLL])


@given(st.one_of(st.text(max_size=80), st.text(alphabet="_ZNRv<>:{}$17hE.as ", max_size=60)))
def test_any_text_is_a_name(text: str) -> None:
    assert readable(readable(text)) == readable(text)
    crate_of(readable(text))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("()()", ""), ("f(int)(char)", "f"), ("A::operator()(int) const", "A::operator()"), ("operator()", "operator()")],
)
def test_parameters_are_left_out_but_not_the_name_of_an_operator(name: str, shown: str) -> None:
    assert readable(name) == shown == readable(readable(name))


def test_a_long_name_that_cannot_be_demangled_is_cut_too() -> None:
    long = "_RINvMNt" + "x" * 300
    assert len(readable(f"{long}.llvm.17")) == MOST_CHARACTERS
    assert readable(f"{long}.llvm.17") == readable(long)


@given(_MANGLED, st.data())
def test_a_damaged_symbol_is_still_a_name(symbol: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(symbol)))
    letter = data.draw(st.characters(codec="ascii"))
    for damaged in (symbol[:cut], symbol[:cut] + letter + symbol[cut + 1 :], symbol[cut:]):
        assert isinstance(demangle(damaged), str)
        assert len(readable(damaged)) <= MOST_CHARACTERS


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for symbol in (MAP_NEXT[:-20], "_RNvG0_", "_ZN3fooE", "_R"):
        readable(symbol)
    assert capfd.readouterr() == ("", "")


# --- symbol tables ---------------------------------------------------------------------------------------------------


class _Symbol(ctypes.Structure):
    """``Dl_info``: what the loader knows of an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def exported(library: Path) -> dict[str, int]:
    """Offsets of the exported functions, as the loader sees them."""
    loaded, loader = ctypes.CDLL(str(library)), ctypes.CDLL(None)
    offsets = {}
    for name in (f"moves_{call}" for call in movers.CALLS if call != "hidden"):
        address, found = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0, _Symbol()
        assert loader.dladdr(ctypes.c_void_p(address), ctypes.byref(found))
        offsets[name] = address - (found.base or 0)
    return offsets


def test_functions_are_found_from_their_first_byte_to_their_last() -> None:
    library = movers.build("now")
    symbols = Symbols(library)
    for name, offset in exported(library).items():
        assert symbols.find(offset) == name
        assert symbols.find(offset + 4) == name
        assert symbols.find(offset - 1) != name
    assert symbols.find(0) == ""
    assert symbols.find(2**63) == ""


def test_a_stripped_library_knows_its_exported_functions(tmp_path: Path) -> None:
    stripped = tmp_path / "moves_stripped.so"
    subprocess.run(["strip", "-s", "-o", stripped, movers.build("now")], check=True)
    symbols = Symbols(stripped)
    assert all(symbols.find(offset) == name for name, offset in exported(movers.build("now")).items())
    hidden = hidden_offset(movers.build("now"))
    assert Symbols(movers.build("now")).find(hidden) == "hidden_copy"
    assert symbols.find(hidden) == "", "not the exported neighbour"


def hidden_offset(library: Path) -> int:
    lines = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout.splitlines()
    return next(int(line.split()[0], 16) for line in lines if line.endswith(" hidden_copy"))


@pytest.mark.parametrize("size", [0, 3, 16, 63, 64, 200, 5_000, 15_000])
def test_a_file_that_is_cut_off_has_what_can_be_read_or_nothing(tmp_path: Path, size: int) -> None:
    cut = tmp_path / "cut.so"
    cut.write_bytes(movers.build("now").read_bytes()[:size])
    assert Symbols(cut).find(0x3000) == ""


@given(st.integers(0, 63), st.integers(0, 255))
def test_a_damaged_header_does_no_harm(position: int, value: int) -> None:
    data = bytearray(movers.build("now").read_bytes())
    data[position] = value
    path = Path(movers.build("now")).with_name("damaged.so")
    path.write_bytes(data)
    assert isinstance(Symbols(path).find(0x1500), str)


def test_no_file_no_names(tmp_path: Path) -> None:
    assert Symbols(tmp_path / "nowhere.so").find(1) == ""
    (tmp_path / "text").write_text("not an object")
    assert Symbols(tmp_path / "text").find(1) == ""
    assert Symbols(tmp_path).find(1) == ""


# --- what was loaded where -------------------------------------------------------------------------------------------


def loaded(path: Path, since: int, base: int, *, size: int | None = None) -> Object:
    status = path.stat()
    return Object(since, base, base, base + 0x10000, size or status.st_size, status.st_mtime_ns, str(path))


def frames(objects: Objects, rows: list[tuple[int, int]]) -> list[Frame]:
    addresses, sequences = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
    keys, index = objects.distinct(addresses, sequences)
    return [objects.frame(*keys[n]) for n in index]


def test_a_return_address_is_of_the_call_before_it() -> None:
    library = movers.build("now")
    end = Symbols(library)
    offsets = sorted(exported(library).values())
    names = {offset: name for name, offset in exported(library).items()}
    objects = Objects([loaded(library, 0, 1 << 20)])
    frame = objects.frame((1 << 20) + offsets[0] + 1)
    assert frame == Frame(names[offsets[0]], library.name, 0, native=True)
    assert end.find(offsets[0]) == names[offsets[0]]
    assert objects.frame((1 << 20) + offsets[0]).function != names[offsets[0]]


def test_addresses_outside_of_everything_are_unknown() -> None:
    objects = Objects([loaded(movers.build("now"), 0, 1 << 20)])
    assert frames(objects, [(5, 1), ((1 << 20) + 0x10002, 1), (0, 1)]) == [UNKNOWN] * 3
    assert Objects([]).frame(7) == UNKNOWN
    assert frames(Objects([]), [(7, 1)]) == [UNKNOWN]


def test_an_address_means_what_was_loaded_there_then() -> None:
    libraries = [movers.build(linkage) for linkage in ("now", "got", "lazy")]
    objects = Objects(loaded(path, since, 1 << 20) for path, since in zip(libraries, (0, 10, 20), strict=True))
    at = (1 << 20) + 0x1201
    found = frames(objects, [(at, 25), (at, 5), (at, 10), (at, 15), (at, 21), (5, 12), (at, 9)])
    assert [frame.file for frame in found] == [
        libraries[n].name if n is not None else "" for n in (2, 0, 1, 1, 2, None, 0)
    ]
    assert objects.frame(at).file == libraries[2].name


def test_a_file_that_is_another_by_now_gives_no_names() -> None:
    library = movers.build("now")
    offset = exported(library)["moves_memcpy"]
    objects = Objects([loaded(library, 0, 1 << 20, size=5)])
    assert objects.frame((1 << 20) + offset + 1) == Frame(f"+{offset:#x}", library.name, 0, native=True)


def test_the_list_of_objects_is_read_back_and_its_last_cut_line_left_out(tmp_path: Path) -> None:
    path = tmp_path / "objects.tsv"
    path.write_text("0\t4096\t4096\t8192\t1\t2\t/a/b\tc.so\n7\t0\t0\t16\t1\t2\t/d.so\n9\t0\t0")
    objects = Objects.read(path).objects
    assert objects == [Object(0, 4096, 4096, 8192, 1, 2, "/a/b\tc.so"), Object(7, 0, 0, 16, 1, 2, "/d.so")]
    assert Objects.read(tmp_path / "none").objects == []
    path.write_text("0\tx\n")
    with pytest.raises(CopytraceError, match=r"objects\.tsv: damaged"):
        Objects.read(path)
