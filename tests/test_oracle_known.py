"""Programs with exactly k copies of an odd size at a known line, inside an operation named by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import copytrace
from copytrace.transfers import _extension
from oracle.lines import Told, copies, line_of, only_path

N = 300_007
ROWS, COLUMNS = 307, 311
HOOKED = _extension()[0] is not None

source = np.random.default_rng(7).integers(1, 255, N, dtype="u1")
blob = source.tobytes()
view = memoryview(source)
matrix = np.arange(ROWS * COLUMNS, dtype="f4").reshape(ROWS, COLUMNS)
pieces = [blob[: 10_007 + n] for n in range(7)]
target = np.zeros(N, "u1")
wide = np.zeros((ROWS, COLUMNS), "f8")


def makes_bytes() -> bytes:
    return bytes(view)  # here


def makes_bytes_of_a_part() -> bytes:
    return bytes(view[3:-4])  # here


def calls_tobytes() -> bytes:
    return source.tobytes()  # here


def calls_tobytes_of_a_view() -> bytes:
    return view.tobytes()  # here


def makes_a_bytearray() -> bytearray:
    return bytearray(view)  # here


def joins() -> bytes:
    return b"".join(pieces)  # here


def copies_an_array() -> Any:
    return source.copy()  # here


def copies_a_transposed_array() -> Any:
    return matrix.T.copy()  # here


def makes_contiguous() -> Any:
    return np.ascontiguousarray(matrix.T)  # here


def flattens() -> Any:
    return matrix.T.flatten()  # here


def ravels() -> Any:
    return matrix.T.ravel()  # here


def casts() -> Any:
    return source.astype("u4")  # here


def swaps() -> Any:
    return matrix.byteswap()  # here


def concatenates() -> Any:
    return np.concatenate([source, source])  # here


def copies_to() -> None:
    np.copyto(target, source)  # here


def slices_bytes() -> bytes:
    return blob[1:]  # here


def adds_bytes() -> bytes:
    return blob + b"."  # here


@dataclass(frozen=True)
class Known:
    """A program and what each run of it copies; ``hook``: only moves tell it; ``blind``: kind, count without."""

    run: Callable[[], Any]
    kind: str
    nbytes: int
    count: int = 1
    hook: bool = False
    blind: tuple[str, int] | None = None

    def told(self) -> tuple[str, int]:
        return self.blind if self.blind and not HOOKED else (self.kind, self.count)


PROGRAMS = [
    Known(makes_bytes, "copy", N),
    Known(makes_bytes_of_a_part, "copy", N - 7),
    Known(calls_tobytes, "copy", N),
    Known(calls_tobytes_of_a_view, "copy", N),
    Known(makes_a_bytearray, "copy", N),
    Known(joins, "join", sum(map(len, pieces)), count=7, blind=("join", 1)),
    Known(copies_an_array, "copy", N),
    Known(copies_a_transposed_array, "gather", matrix.nbytes, blind=("copy", 1)),
    Known(makes_contiguous, "gather", matrix.nbytes),
    Known(flattens, "gather", matrix.nbytes),
    Known(ravels, "gather", matrix.nbytes),
    Known(casts, "convert", 4 * N),
    Known(swaps, "convert", matrix.nbytes),
    Known(concatenates, "join", 2 * N, count=2),
    Known(copies_to, "scatter", N, hook=True),
    Known(slices_bytes, "copy", N - 1, hook=True),
    Known(adds_bytes, "copy", N, hook=True),
]


def named(program: Known) -> str:
    return program.run.__name__


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_exactly_the_copies_of_a_known_line_are_told(program: Known, times: int) -> None:
    if program.hook and not HOOKED:
        pytest.skip("needs the native hook")
    with copytrace.session() as session, copytrace.operation("known", payload_bytes=N):
        results = [program.run() for _ in range(times)]
    assert len(results) == times
    path = only_path(session.report)
    here = line_of(program.run)
    name = program.run.__name__
    kind, count = program.told()
    assert copies(path.steps) == [Told(kind, times * program.nbytes, times * count, "user", name, here)]
    assert (path.payload_bytes, path.copied_bytes) == (N, times * program.nbytes)
    assert path.copies == round(times * program.nbytes / N, 6)
    assert path.unattributed_bytes == session.report.coverage.unattributed_bytes == 0
    (layer,) = session.report.layers
    assert (layer.layer, layer.bytes, layer.count) == ("user", times * program.nbytes, times * count)
    assert path.api == "known"


def assigns_a_slice() -> None:
    target[:] = source


def assigns_to_a_view() -> None:
    memoryview(target)[5:] = view[5:]


@pytest.mark.skipif(not HOOKED, reason="needs the native hook")
@pytest.mark.parametrize(("run", "nbytes"), [(assigns_a_slice, N), (assigns_to_a_view, N - 5)])
def test_what_a_line_assigns_is_told_of_the_operation_around_it(run: Callable[[], None], nbytes: int) -> None:
    """Nothing is allocated and nothing is called: only the bytes that moved tell, and no line."""
    with copytrace.session() as session, copytrace.operation("known", payload_bytes=N):  # here
        for _ in range(5):
            run()
    path = only_path(session.report)
    here = line_of(test_what_a_line_assigns_is_told_of_the_operation_around_it)
    own = "test_what_a_line_assigns_is_told_of_the_operation_around_it"
    assert copies(path.steps) == [Told("copy", 5 * nbytes, 5, "user", own, here)]


@pytest.mark.skipif(not HOOKED, reason="needs the native hook")
def test_a_bytearray_that_grows_copies_what_it_is_given_and_what_it_had() -> None:
    piece = blob[:50_021]
    grown = bytearray()
    with copytrace.session() as session, copytrace.operation("known", payload_bytes=6 * 50_021):  # around
        addresses = []
        for _ in range(6):
            before = len(grown), _address(grown)
            grown += piece  # here
            addresses.append((*before, _address(grown)))
            keep = bytes(700)
            addresses.append((0, 0, id(keep)))
    path = only_path(session.report)
    given = [step for step in path.steps if step.evidence == "transfer"]
    assert sum(step.bytes for step in given) == 6 * 50_021
    assert sum(step.count for step in given) == 6
    assert {step.site.line for step in path.steps} <= {
        line_of(test_a_bytearray_that_grows_copies_what_it_is_given_and_what_it_had),
        line_of(test_a_bytearray_that_grows_copies_what_it_is_given_and_what_it_had, "# a" + "round"),
    }
    again = [step for step in path.steps if step.evidence == "stack"]
    moved = sum(old != 0 and size > 0 and old != new for size, old, new in addresses)
    assert sum(step.count for step in again) <= moved


def _address(array: bytearray) -> int:
    return int(np.frombuffer(array, "u1").__array_interface__["data"][0]) if array else 0


# --- both sides of every threshold ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [511, 512, 513, 4095, 4096, 4097])
def test_a_primitive_is_seen_from_512_bytes_up(size: int) -> None:
    part = view[:size]
    with copytrace.session() as session, copytrace.operation("known", payload_bytes=size):
        results = [bytes(part) for _ in range(5)]
    assert results[4] == part
    told = copies(only_path(session.report).steps)
    if size < 512:
        assert [one for one in told if HOOKED or one.layer != "user"] == []
    else:
        assert [(one.kind, one.bytes, one.count, one.layer) for one in told] == [("copy", 5 * size, 5, "user")]


@pytest.mark.skipif(not HOOKED, reason="needs the native hook")
@pytest.mark.parametrize("size", [4095, 4096, 4097])
def test_a_move_is_kept_from_4096_bytes_up(size: int) -> None:
    with copytrace.session() as session, copytrace.operation("known", payload_bytes=size):
        for _ in range(5):
            target[:size] = source[:size]
    told = copies(only_path(session.report).steps)
    assert [(one.kind, one.bytes, one.count) for one in told] == ([("copy", 5 * size, 5)] if size >= 4096 else [])


@pytest.mark.parametrize("short", [-1, 0, 1])
def test_min_bytes_is_compared_with_what_a_site_copied_in_all(short: int) -> None:
    with copytrace.session(min_bytes=3 * N + short) as session, copytrace.operation("known", payload_bytes=N):
        results = [bytes(view) for _ in range(3)]
    assert results == [blob] * 3
    told = copies(only_path(session.report).steps)
    assert [one.bytes for one in told] == ([] if short > 0 else [3 * N])


@pytest.mark.parametrize("piece", [1024, 8192])
def test_pieces_are_added_up_before_they_are_compared_with_anything(piece: int) -> None:
    results = []
    with copytrace.session(min_bytes=N) as session, copytrace.operation("known", payload_bytes=N):
        results += [bytes(view[at : at + piece]) for at in range(0, N, piece)]  # in pieces
        joined = b"".join(results)  # here, joined
    assert joined == blob
    own = test_pieces_are_added_up_before_they_are_compared_with_anything
    told = copies(only_path(session.report).steps)
    count = -(-N // piece)
    assert told[0] == Told("copy", N, count, "user", own.__name__, line_of(own, "# in " + "pieces"))
    assert [(one.kind, one.bytes, one.line) for one in told[1:]] == [("join", N, line_of(own, "# here, " + "joined"))]


# --- nothing ------------------------------------------------------------------------------------------------------


def test_an_empty_session_reports_nothing() -> None:
    with copytrace.session() as session:
        pass
    report = session.report
    assert (report.paths, report.layers, report.spans) == ((), (), 0)
    assert report.coverage.unattributed_bytes == 0
    assert len(report.coverage.notes) == (0 if HOOKED else 1)


def test_an_empty_operation_copies_nothing() -> None:
    with copytrace.session() as session, copytrace.operation("nothing", payload_bytes=N):
        pass
    path = only_path(session.report)
    assert (path.steps, path.buffers, path.copied_bytes, path.extra_at_peak_bytes) == ((), (), 0, 0)


def test_views_and_what_is_already_there_are_no_copies() -> None:
    kept: list[Any] = []
    with copytrace.session() as session, copytrace.operation("views", payload_bytes=N):
        kept += [source[3:], source.view("i1"), matrix.T, matrix.reshape(-1), matrix.ravel(), memoryview(blob)[5:]]
        kept += [bytes(blob), np.asarray(source), np.ascontiguousarray(source), source.astype("u1", copy=False)]
        kept += [np.array(source, copy=False), np.frombuffer(blob, "u1"), blob[:], b"".join([blob])]
    path = only_path(session.report)
    assert copies(path.steps) == []
    assert path.extra_at_peak_bytes < 4096


def test_an_import_is_on_no_path() -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] in ("pydoc", "pydoc_data", "ctypes", "decimal")]:
        if name != "ctypes":
            sys.modules.pop(name)
    with copytrace.session() as session, copytrace.operation("import", payload_bytes=100_003):
        import pydoc_data.topics  # noqa: F401
    assert copies(only_path(session.report).steps) == []
