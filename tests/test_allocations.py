"""Reading captures: by the block, with the extension and without, and several captures in a row."""

from __future__ import annotations

import gc
import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import copytrace
from copytrace import allocations, transfers
from copytrace.allocations import Segment, first_ahead, match_marks, number_marks
from copytrace.model import MARK_COUNT, MARK_PERIOD

if TYPE_CHECKING:
    from pathlib import Path

    from copytrace.model import Allocations

COLUMNS = ("address", "size", "born", "died", "enter", "leave", "span", "thread", "previous", "moved")


def read(spool: Path) -> Allocations:
    facts = json.loads((spool / "session.json").read_text())
    segments = [Segment(spool / name, first, native) for name, first, native in facts["segments"]]
    notes: list[str] = []
    (found,) = allocations.read(segments, transfers.read(spool)[1], notes=notes)
    assert notes == []
    return found


def same(one: Allocations, other: Allocations) -> bool:
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)
        and [one.stacks[number] for number in one.stack] == [other.stacks[number] for number in other.stack]
        and one.records == other.records
    )


@pytest.fixture(scope="module")
def spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a session leaves that grew a bytearray, kept blocks over two captures and named an operation."""
    path = tmp_path_factory.mktemp("captured") / "spool"
    kept = []
    with copytrace.session(spool=str(path)):
        grown = bytearray()
        with copytrace.operation("grow", payload_bytes=300_007):
            while len(grown) < 300_007:
                grown += b"x" * 1_013
        kept += [bytearray(40_009 + number) for number in range(300)]
        with copytrace.session():
            kept += [bytearray(70_001)]
        del kept[::2]
    assert len(list(path.glob("memray-*.bin"))) == 2
    return path


@pytest.mark.parametrize("batch", [2, 7, 1000])
def test_where_blocks_of_records_end_makes_no_difference(
    spool: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(spool)
    assert whole.records > 1_000
    monkeypatch.setattr(allocations, "_BATCH", batch)
    assert same(read(spool), whole)


def test_without_the_extension_the_same_is_read(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = read(spool)
    monkeypatch.setitem(sys.modules, "copytrace._captures", None)
    without = read(spool)
    assert all(np.array_equal(getattr(without, name), getattr(with_it, name)) for name in COLUMNS)


@pytest.mark.parametrize("batch", [5, 1 << 16])
def test_a_session_in_stretches(spool: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stretch has what was alive in it, as the whole table has it; what outlives a stretch ends with it."""
    monkeypatch.setattr(allocations, "_BATCH", batch)
    whole = read(spool)
    facts = json.loads((spool / "session.json").read_text())
    segments = [Segment(spool / name, first, native) for name, first, native in facts["segments"]]
    marks = transfers.read(spool)[1]
    cuts = [int(marks["sequence"][len(marks) * part // 5]) for part in (1, 2, 2, 4)]
    stretches = list(allocations.read(segments, marks, sorted(set(cuts))))
    assert len(stretches) == len(set(cuts)) + 1
    begun = 0
    for stretch in stretches:
        expected = np.flatnonzero((whole.born < stretch.records) & (whole.died >= begun))
        assert np.array_equal(stretch.born, whole.born[expected])
        for name in ("address", "size", "enter", "span", "thread", "moved"):
            assert np.array_equal(getattr(stretch, name), getattr(whole, name)[expected]), name
        assert np.array_equal(stretch.died, np.minimum(whole.died[expected], stretch.records))
        assert [stretch.stacks[n][:3] for n in stretch.stack] == [whole.stacks[n][:3] for n in whole.stack[expected]]
        linked = stretch.previous >= 0
        before = whole.previous[expected][linked]
        assert np.array_equal(stretch.born[stretch.previous[linked]], whole.born[before])
        begun = stretch.records
    assert begun == whole.records


def test_the_garbage_collector_is_on_between_stretches(spool: Path) -> None:
    marks = transfers.read(spool)[1]
    cut = int(marks["sequence"][len(marks) // 2])
    tables = allocations.read([Segment(spool / "memray-1.bin", 0, True)], marks, [cut])
    assert next(tables).records > 0
    assert gc.isenabled()


def test_a_growing_block_is_one_chain(spool: Path) -> None:
    found = read(spool)
    last = int(np.flatnonzero((found.size >= 300_007) & (found.size < 400_000))[0])
    chain = [last]
    while (before := int(found.previous[chain[-1]])) >= 0:
        assert found.died[before] == found.born[chain[-1]] - 1
        assert found.size[before] < found.size[chain[-1]]
        chain.append(before)
    assert len(chain) > 20
    assert found.size[chain[-1]] < 4_096


def test_blocks_of_one_capture_that_end_in_the_next(spool: Path) -> None:
    found = read(spool)
    sizes = [int(np.flatnonzero(found.size == 40_009 + number + 1)[0]) for number in range(300)]
    ended = found.died[sizes] < found.records
    assert ended.tolist() == [number % 2 == 0 for number in range(300)]


@pytest.mark.parametrize(
    ("residues", "following", "total", "marks"),
    [
        ([], 0, 10, []),
        ([0, 1, 2], 0, 3, [(0, 0), (1, 1), (2, 2)]),
        ([0, 500, 1, 2], 0, 3, [(0, 0), (2, 1), (3, 2)]),
        ([7, 7, 0, 1], 0, 2, [(2, 0), (3, 1)]),
        ([0, 1, 2, 3], 0, 2, [(0, 0), (1, 1)]),
        ([MARK_PERIOD - 1, 0], MARK_PERIOD - 1, MARK_PERIOD + 1, [(0, MARK_PERIOD - 1), (1, MARK_PERIOD)]),
        ([3], 5, 9, []),
        ([0], 1, 1, []),
    ],
)
def test_marks_among_blocks_of_their_size(
    residues: list[int], following: int, total: int, marks: list[tuple[int, int]]
) -> None:
    position, index = match_marks(np.array(residues, np.int64), following, total)
    assert list(zip(position.tolist(), index.tolist(), strict=True)) == marks


@pytest.mark.parametrize(
    ("numbers", "following"),
    [([], 0), ([0, 1, 2], 0), ([5, 6, 9], 2), ([MARK_COUNT - 1, MARK_COUNT, MARK_COUNT + 7], 3), ([1 << 21], 1 << 21)],
)
def test_unmappings_say_which_marks_they_are(numbers: list[int], following: int) -> None:
    sizes = 1 + np.array(numbers, np.int64) % MARK_COUNT
    assert number_marks(sizes, following).tolist() == numbers


@pytest.mark.parametrize(
    ("residues", "following", "ahead"),
    [
        ([], 5, 0),
        ([5, 6, 7], 5, 0),
        ([9, 10], 5, 4),
        ([500, 9, 10, 11], 5, 4),
        ([MARK_PERIOD - 1, 0], MARK_PERIOD - 3, 2),
        ([9], 5, 0),
    ],
)
def test_a_capture_begins_after_marks_that_it_has_not(residues: list[int], following: int, ahead: int) -> None:
    assert first_ahead(np.array(residues, np.int64), following) == ahead
