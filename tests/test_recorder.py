"""The recorder and what it knows of objects' memory."""

from __future__ import annotations

import array
import asyncio
import itertools
import mmap
import os
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copytrace.extents import extents
from copytrace.model import SEEN_DTYPE, SPAN_DTYPE, SiteInfo
from copytrace.pending import Pending
from copytrace.probes import Probe, Site
from copytrace.recorder import native, pack_seen, pack_span, parent_span, recorder, thread_state
from spooled import Recorded, read_spans, read_spool, recording


def address_of(value: object) -> int:
    return np.frombuffer(value, "u1").__array_interface__["data"][0]  # type: ignore[call-overload]


class TestExtents:
    @pytest.mark.parametrize(
        "value",
        [
            b"x" * 1009,
            bytearray(1009),
            memoryview(b"y" * 1009),
            array.array("B", bytes(1009)),
            np.arange(1009, dtype="u1"),
        ],
        ids=["bytes", "bytearray", "memoryview", "array.array", "ndarray"],
    )
    def test_contiguous_memory(self, value: object) -> None:
        assert extents(value) == ((1, address_of(value), 1009, 1009),)

    @pytest.mark.parametrize(
        "value", [b"", bytearray(), memoryview(b""), np.empty((0, 3)), np.empty((3, 0), order="F"), [], ()]
    )
    def test_nothing_has_no_extent(self, value: object) -> None:
        assert extents(value) == ()

    @pytest.mark.parametrize(
        "value", [None, 1, 1.5, "text", {"a": b"x"}, slice(3), object(), int, np.float64(3), iter([b"abc"])]
    )
    def test_what_holds_no_array_data(self, value: object) -> None:
        assert extents(value) == ()

    def test_zero_dimensional(self) -> None:
        value = np.array(3.25)
        assert extents(value) == ((1, value.ctypes.data, 8, 8),)

    @pytest.mark.parametrize(
        "dtype", ["M8[ns]", "m8[s]", "U5", "S7", "V3", "O", [("a", "<i4"), ("b", "<f8")], ">f4", "c16"]
    )
    def test_every_dtype(self, dtype: object) -> None:
        value = np.zeros(7, dtype)
        assert extents(value) == ((1, value.ctypes.data, value.nbytes, value.nbytes),)

    def test_fortran_order_is_contiguous(self) -> None:
        value = np.zeros((3, 5, 7), order="F")
        assert extents(value) == ((1, value.ctypes.data, 840, 840),)

    def test_axes_in_any_order_are_contiguous(self) -> None:
        value = np.zeros((3, 5, 7)).transpose(1, 2, 0)
        assert not value.flags.forc
        assert extents(value) == ((1, value.ctypes.data, 840, 840),)

    @given(
        st.lists(st.tuples(st.integers(1, 6), st.integers(-3, 3).filter(bool)), min_size=1, max_size=4),
        st.sampled_from(["u1", "<i2", "f8"]),
    )
    def test_strided_views_span_their_lowest_to_their_highest_byte(
        self, axes: list[tuple[int, int]], dtype: str
    ) -> None:
        whole = np.zeros([length * 3 for length, _ in axes], dtype)
        view = whole[tuple(slice(None, None, step) for _, step in axes)]
        ((contiguous, low, extent, size),) = extents(view)
        first, last = np.lib.array_utils.byte_bounds(view)
        assert (low, extent, size) == (first, last - first, view.nbytes)
        assert contiguous == (extent == size)

    def test_broadcast_is_smaller_than_its_size(self) -> None:
        value = np.broadcast_to(np.zeros(4, "u1"), (1000, 4))
        assert extents(value) == ((0, value.ctypes.data, 4, 4000),)

    def test_subclasses_and_memory_maps(self, tmp_path: Path) -> None:
        file = tmp_path / "m"
        file.write_bytes(bytes(8192))
        mapped = np.memmap(file, "u1")
        assert extents(mapped) == ((1, mapped.ctypes.data, 8192, 8192),)
        with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as raw:
            ((contiguous, _, extent, size),) = extents(raw)
            assert (contiguous, extent, size) == (1, 8192, 8192)

    def test_lists_and_tuples_of_buffers(self) -> None:
        first, second = b"a" * 100, np.zeros(25)
        assert extents([first, "no", None, second]) == (*extents(first), *extents(second))
        assert extents((second,)) == extents(second)

    def test_wrappers_that_hold_their_array_in_data(self) -> None:
        class Wrapper:
            def __init__(self, data: object) -> None:
                self._data = data

        held = np.zeros(33)
        assert extents(Wrapper(held)) == extents(held)
        assert extents(Wrapper(memoryview(b"abcdefgh"))) == extents(b"abcdefgh")

    def test_array_interface(self) -> None:
        class Foreign:
            def __init__(self, of: np.ndarray) -> None:
                self.__array_interface__ = of.__array_interface__

        Foreign.__array_interface__ = property(lambda self: self.__dict__["x"])  # type: ignore[attr-defined]
        value = np.zeros((9, 4))[::2]
        foreign = Foreign.__new__(Foreign)
        foreign.__dict__["x"] = value.__array_interface__
        assert extents(foreign) == extents(value)

    def test_released_memoryview_has_none(self) -> None:
        view = memoryview(b"abc")
        view.release()
        assert extents(view) == ()

    def test_no_export_stays_open(self) -> None:
        value = bytearray(100)
        extents(value)
        value.extend(b"more")

    def test_without_the_layout_of_this_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        values = [np.zeros((5, 6)), np.zeros((5, 6))[::2, 1:3], bytearray(77), memoryview(b"abcd")[::2]]
        fast = [extents(value) for value in values]
        monkeypatch.setattr("copytrace.extents._ARRAY_OFFSET", None)
        monkeypatch.setattr("copytrace.extents._VIEW_OFFSET", None)
        assert [extents(value) for value in values] == fast


class TestRows:
    def test_packed_rows_are_the_dtypes(self) -> None:
        row = np.frombuffer(pack_span(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1), SPAN_DTYPE)[0]
        assert row.tolist() == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1)
        seen = np.frombuffer(pack_seen(1, 2, 1, 4, 5, 6), SEEN_DTYPE)[0]
        assert seen.tolist() == (1, 2, 1, 4, 5, 6)


class TestLife:
    def test_inert_before_begin_and_after_end(self, tmp_path: Path) -> None:
        assert recorder.mark is None
        with recorder.operation("nothing"):
            assert parent_span.get() == 0
        recorder.begin(tmp_path, Recorded().mark)
        recorder.end()
        recorder.end()
        spans, seen, _, attributes = read_spool(tmp_path)
        assert (len(spans), len(seen), attributes) == (0, 0, [{}])

    def test_begin_twice_is_refused(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False), pytest.raises(RuntimeError, match="already recording"):
            recorder.begin(tmp_path, Recorded().mark)

    def test_stamp(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="not recording"):
            recorder.stamp()
        with recording(tmp_path, attached=False) as recorded:
            first = recorder.stamp()
            with recorder.operation("work"):
                second = recorder.stamp()
            assert second > first
            assert recorded.marks[first - 1][2] == 0
            assert recorded.marks[second - 1][2] == recorded.marks[first][2] != 0

    def test_ids_are_not_given_again(self, tmp_path: Path) -> None:
        ids = []
        for name in "ab":
            with recording(tmp_path / name, attached=False) as recorded, recorder.operation("work"):
                pass
            ids.append(recorded.spans[0].id)
        assert ids[0] < ids[1]

    def test_sites_are_known_again_in_the_next_session(self, tmp_path: Path) -> None:
        info = SiteInfo("somewhere", "lib", "copy", "read", "memcpy")
        index = recorder.site(info)
        assert recorder.site(SiteInfo("somewhere", "lib", "copy", "read", "memcpy")) == index
        with recording(tmp_path, attached=False):
            late = recorder.site(SiteInfo("found while recording", "lib", "copy"))
            assert recorder.site(SiteInfo("found while recording", "lib", "copy")) == late
            later = recorder.site(SiteInfo("found after that", "lib", "copy"))
        sites = read_spool(tmp_path)[2]
        assert sites[index] == info
        assert (sites[late].name, sites[later].name) == ("found while recording", "found after that")

    def test_span_that_outlives_the_recording_is_left_out(self, tmp_path: Path) -> None:
        operation = recorder.operation("too long")
        with recording(tmp_path / "a", attached=False) as recorded:
            operation.__enter__()
        assert recorded.spans == []
        with recording(tmp_path / "b", attached=False) as again:
            operation.__exit__(None, None, None)
            assert thread_state().current == 0
        assert again.spans == []
        assert parent_span.get() == 0


class TestOperation:
    def test_is_a_span_with_its_callers(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False) as recorded, recorder.operation("ingest", 1234):
            pass
        (span,) = recorded.spans
        assert (span.name, span.kind, span.payload, span.error) == ("copytrace.operation", "operation", 1234, False)
        assert span.attributes["label"] == "ingest"
        function, file, _line = span.attributes["called_from"][0]
        assert function.endswith("TestOperation.test_is_a_span_with_its_callers")
        assert file.endswith("test_recorder.py")
        assert not Path(file).is_absolute()

    def test_error_is_noted_and_passes(self, tmp_path: Path) -> None:
        with (
            recording(tmp_path, attached=False) as recorded,
            pytest.raises(ZeroDivisionError),
            recorder.operation("bad"),
        ):
            raise ZeroDivisionError
        assert recorded.spans[0].error

    def test_nests_and_marks(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False) as recorded, recorder.operation("outer"), recorder.operation("inner"):
            pass
        outer, inner = recorded.spans
        assert inner.parent == outer.id
        assert [span for _, _, span in recorded.marks] == [outer.id, inner.id, outer.id, 0]

    def test_in_tasks_is_only_a_parent(self, tmp_path: Path) -> None:
        async def work(name: str, gate: asyncio.Event) -> None:
            with recorder.operation(name):
                await gate.wait()
                with recorder.operation(name + " inside"):
                    await asyncio.sleep(0)

        async def main() -> None:
            gate = asyncio.Event()
            tasks = [asyncio.create_task(work(name, gate)) for name in ("a", "b")]
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*tasks)

        with recording(tmp_path, attached=False) as recorded:
            asyncio.run(main())
        by_label = {span.attributes["label"]: span for span in recorded.spans}
        assert by_label["a inside"].parent == by_label["a"].id
        assert by_label["b inside"].parent == by_label["b"].id
        for sequence, thread, span in recorded.marks:
            if span:
                assert recorded.innermost_at(sequence + 1, thread) in (0, span)

    def test_threads_have_their_own(self, tmp_path: Path) -> None:
        barrier = threading.Barrier(2)

        def work(name: str) -> None:
            with recorder.operation(name):
                barrier.wait(10)

        with recording(tmp_path, attached=False) as recorded, recorder.operation("main"):
            started = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
        spans = {span.attributes["label"]: span for span in recorded.spans}
        assert len({span.thread for span in spans.values()}) == 3
        assert spans["a"].parent == spans["b"].parent == 0


class TestSpool:
    def test_cut_off_rows_and_lines_are_left_out(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False):
            for number in range(5):
                with recorder.operation(f"work {number}"):
                    pass
        for name in ("spans.bin", "attributes.jsonl"):
            path = tmp_path / name
            path.write_bytes(path.read_bytes()[:-3])
        spans, _, _, attributes = read_spool(tmp_path)
        assert len(spans) == 4
        assert [entry.get("label") for entry in attributes] == [None, "work 0", "work 1", "work 2", "work 3"]

    @pytest.mark.parametrize("added", [True, False])
    def test_an_interrupt_costs_no_later_span_its_description(
        self, added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of, name = (Pending, "add") if native is None else (native, "add")
        add = getattr(of, name)

        def interrupted(*row: Any) -> None:
            monkeypatch.setattr(of, name, add)
            if added:
                add(*row)
            raise KeyboardInterrupt

        with recording(tmp_path, attached=False):
            monkeypatch.setattr(of, name, interrupted)
            with pytest.raises(KeyboardInterrupt), recorder.operation("interrupted"):
                pass
            for number in range(3):
                with recorder.operation(f"work {number}"):
                    pass
        assert [span.attributes["label"] for span in read_spans(tmp_path)] == ["work 0", "work 1", "work 2"]

    def test_missing_spool(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            read_spool(tmp_path / "none")

    def test_flush_leaves_everything_readable_while_recording(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False):
            with recorder.operation("first"):
                recorder.see(1, 0, b"x")
            assert (tmp_path / "spans.bin").stat().st_size == 0
            assert len(read_spool(tmp_path)[0]) == 1
            recorder.flush()
            assert [span.attributes["label"] for span in read_spans(tmp_path)] == ["first"]

    def test_seen_of_spans_that_never_closed_is_left_out(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False):
            recorder.see(10**9, 0, b"x" * 10)
            recorder.flush()
            assert (tmp_path / "seen.bin").stat().st_size == SEEN_DTYPE.itemsize
        assert len(read_spool(tmp_path)[1]) == 0

    def test_equal_attributes_are_written_once_and_requests_each_time(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False):
            first = recorder.attributes({"store": "LocalStore", "codecs": ("bytes", "zstd")})
            assert recorder.attributes({"store": "LocalStore", "codecs": ("bytes", "zstd")}) == first
            keyed = [recorder.request('c/0 "é\n', "S") for _ in range(2)]
        written = read_spool(tmp_path)[3]
        assert keyed == [first + 1, first + 2]
        assert written[first] == {"store": "LocalStore", "codecs": ["bytes", "zstd"]}
        assert written[keyed[0]] == written[keyed[1]] == {"key": 'c/0 "é\n', "store": "S"}

    def test_many_different_attributes_keep_their_indices(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False):
            indices = [recorder.attributes({"label": str(number)}) for number in range(10_000)]
            assert recorder.attributes({}) == 0
        written = read_spool(tmp_path)[3]
        assert [written[index]["label"] for index in indices] == [str(number) for number in range(10_000)]

    def test_what_an_interrupt_left_open_is_forgotten(self, tmp_path: Path) -> None:
        state = thread_state()
        state.current, state.copying = 41, True
        parent_span.set(41)
        with recording(tmp_path, attached=False) as recorded, recorder.operation("work"):
            pass
        assert [span.parent for span in recorded.spans] == [0]
        assert (state.current, state.base, state.copying, parent_span.get()) == (0, None, False, 0)

    def test_concurrent_threads_lose_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("copytrace.recorder._BLOCK", 2048)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)

        def work() -> None:
            for number in range(3000):
                with recorder.operation(f"work {number % 7}"):
                    recorder.see(0, 0, b"1234")

        with recording(tmp_path, attached=False) as recorded:
            started = [threading.Thread(target=work) for _ in range(4)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
        sys.setswitchinterval(interval)
        assert len(recorded.spans) == 12_000
        assert len({span.id for span in recorded.spans}) == 12_000
        assert (tmp_path / "seen.bin").stat().st_size == 12_000 * SEEN_DTYPE.itemsize

    def test_memory_does_not_grow_with_spans(self, tmp_path: Path) -> None:
        class Work:
            def step(self, data: bytes) -> bytes:
                return data

        module = type(os)("growing")
        module.Work = Work
        import sys

        sys.modules["growing"] = module
        try:
            site = Site(
                target="growing:Work.step",
                kind="request",
                inputs=("data",),
                output=True,
                describe=lambda _call: {"key": str(next(numbers))},
            )
            numbers = itertools.count()
            counter = itertools.count(1)
            recorder.begin(tmp_path, lambda _span: next(counter))
            from copytrace.probes import Attachment

            attachment = Attachment([Probe(name="growing", library="growing", sites=(site,))])
            work = Work()
            for _ in range(2000):
                work.step(b"x" * 100)
            tracemalloc.start()
            try:
                before = tracemalloc.get_traced_memory()[0]
                for _ in range(20_000):
                    work.step(b"x" * 100)
                grown = tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()
            attachment.detach()
            recorder.end()
        finally:
            del sys.modules["growing"]
        assert grown < 300_000, f"{grown} bytes for 20,000 spans"
        assert len(read_spool(tmp_path)[0]) == 22_000


class TestFork:
    def test_child_records_nothing_and_leaves_the_files_alone(self, tmp_path: Path) -> None:
        with recording(tmp_path, attached=False) as recorded:
            with recorder.operation("before"):
                pass
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    inert = recorder.mark is None
                    with recorder.operation("in the child"):
                        pass
                    recorder.flush()
                    recorder.end()
                    status = 0 if inert else 2
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            with recorder.operation("after"):
                pass
        assert [span.attributes["label"] for span in recorded.spans] == ["before", "after"]


class TestFailures:
    def test_are_swallowed_and_counted_for_users(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("COPYTRACE_STRICT")
        recorder.begin(tmp_path, Recorded().mark)
        try:
            recorder.failed(ValueError("first"), "here")
            recorder.failed(ValueError("second"), "there")
            assert recorder.failures == 2
            assert recorder.first_failure == "here: ValueError: first"
        finally:
            recorder.end()

    def test_are_raised_in_tests(self, tmp_path: Path) -> None:
        recorder.begin(tmp_path, Recorded().mark)
        try:
            with pytest.raises(ValueError, match="first"):
                recorder.failed(ValueError("first"), "here")
        finally:
            recorder.end()
