"""Comparing two reports: by path, layer and function, never by line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from markdown_it import MarkdownIt

import reportdata
from copytrace.model import Path, Step
from copytrace.report import Report
from copytrace.reports import diff
from copytrace.reports.diff import compare
from test_reports import assert_fits, reports

PAYLOAD = 10_000_000


def a_step(layer: str, function: str, nbytes: int = PAYLOAD, kind: str = "copy", line: int = 1, count: int = 1) -> Step:
    where = reportdata.site(function, f"{layer}.py", line)
    return reportdata.step(kind, "b1", "b2", layer, where, nbytes, PAYLOAD, count=count)


def a_path(*steps: Step, store: str = "LocalStore", payload: int = PAYLOAD) -> Path:
    return reportdata.path("write", "zarr.Array.__setitem__", store, ("bytes",), payload, steps, ())


def changes(old: Path, new: Path) -> list[tuple[str, str | None, str | None]]:
    """(verb, layer and function before, the same after) of each change."""
    found = compare(reportdata.report(old), reportdata.report(new)).changes
    names = [[f"{one.layer}.{one.function}" if one else None for one in (change.old, change.new)] for change in found]
    return [(change.verb, *name) for change, name in zip(found, names, strict=True)]


def test_the_same_report_has_no_changes() -> None:
    found = compare(reportdata.everything(), reportdata.everything())
    assert (found.changes, found.only_old, found.only_new, found.versions, found.notes) == ((), (), (), {}, ())
    assert found.verdict == "The same copies on 9 paths."
    assert not found.worse


def test_lines_files_and_order_do_not_matter() -> None:
    old = a_path(a_step("a", "f", line=1), a_step("b", "g", line=2))
    new = a_path(a_step("b", "g", line=20), a_step("a", "f", line=10))
    assert changes(old, new) == []


def test_went_and_came() -> None:
    one, two = a_path(a_step("a", "f"), a_step("b", "g")), a_path(a_step("a", "f"))
    assert changes(one, two) == [("went", "b.g", None)]
    assert changes(two, one) == [("came", None, "b.g")]


def test_grew_and_shrank_over_all_steps_of_a_function() -> None:
    one = a_path(a_step("a", "f"), a_step("a", "f", kind="join"))
    two = a_path(a_step("a", "f"))
    assert changes(one, two) == [("shrank", "a.f", "a.f")]
    assert changes(two, one) == [("grew", "a.f", "a.f")]
    [change] = compare(reportdata.report(two), reportdata.report(one)).changes
    assert change.new is not None
    assert (change.new.bytes, change.new.kinds, change.new.count, change.new.ratio) == (
        2 * PAYLOAD,
        ("copy", "join"),
        2,
        2.0,
    )


@pytest.mark.parametrize(("percent", "verbs"), [(2, []), (3, ["grew"]), (-2, []), (-3, ["shrank"])])
def test_small_changes_are_noise(percent: int, verbs: list[str]) -> None:
    new = a_path(a_step("a", "f", PAYLOAD + percent * PAYLOAD // 100))
    assert [verb for verb, _, _ in changes(a_path(a_step("a", "f")), new)] == verbs


@pytest.mark.parametrize(("percent", "verbs"), [(2, []), (3, ["came"])])
def test_small_copies_that_come_are_noise(percent: int, verbs: list[str]) -> None:
    assert [verb for verb, _, _ in changes(a_path(), a_path(a_step("a", "f", percent * PAYLOAD // 100)))] == verbs


def test_moved_to_another_function_rather_than_another_layer_of_the_project() -> None:
    old = a_path(a_step("zarr.array", "f"), a_step("zarr.buffer", "f"))
    new = a_path(a_step("zarr.buffer", "g"), a_step("zarr.codecs", "h"))
    assert changes(old, new) == [
        ("moved", "zarr.buffer.f", "zarr.buffer.g"),
        ("moved", "zarr.array.f", "zarr.codecs.h"),
    ]


def test_what_another_project_copies_is_not_a_move() -> None:
    assert changes(a_path(a_step("zarr.buffer", "f")), a_path(a_step("aiohttp", "g"))) == [
        ("came", None, "aiohttp.g"),
        ("went", "zarr.buffer.f", None),
    ]


def test_what_is_done_otherwise_is_not_a_move() -> None:
    assert changes(a_path(a_step("a", "f")), a_path(a_step("b", "g", kind="decode"))) == [
        ("came", None, "b.g"),
        ("went", "a.f", None),
    ]
    assert changes(a_path(a_step("a", "f")), a_path(a_step("b", "g", 2 * PAYLOAD))) == [
        ("came", None, "b.g"),
        ("went", "a.f", None),
    ]


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        (a_path(a_step("a", "f")), a_path(), False),
        (a_path(), a_path(a_step("a", "f")), True),
        (a_path(a_step("a", "f")), a_path(a_step("a", "f", 2 * PAYLOAD)), True),
        (a_path(a_step("a", "f", 2 * PAYLOAD)), a_path(a_step("a", "f")), False),
        (a_path(a_step("a", "f")), a_path(a_step("a", "renamed")), False),
        (a_path(a_step("a", "f")), a_path(a_step("b", "f")), True),
        (a_path(a_step("zarr.array", "f")), a_path(a_step("zarr.buffer", "f")), True),
    ],
)
def test_worse(old: Path, new: Path, worse: bool) -> None:
    assert compare(reportdata.report(old), reportdata.report(new)).worse is worse


def test_another_size_of_array_is_compared_by_ratio() -> None:
    small = a_path(replace(a_step("a", "f", PAYLOAD // 10), ratio=1.0), payload=PAYLOAD // 10)
    assert changes(a_path(a_step("a", "f")), small) == []


def test_fetches_and_flushes_are_no_copies() -> None:
    assert changes(a_path(), a_path(a_step("a", "f", kind="flush"), a_step("a", "g", kind="fetch"))) == []


def test_a_path_that_was_not_run_again_is_not_a_fix() -> None:
    old = reportdata.report(a_path(a_step("a", "f"), store="Old"), a_path(a_step("a", "f")))
    new = reportdata.report(a_path(a_step("a", "f")), a_path(a_step("a", "f"), store="New"))
    found = compare(old, new)
    assert found.changes == ()
    assert found.only_old == ("write . zarr.Array . Old . bytes",)
    assert found.only_new == ("write . zarr.Array . New . bytes",)
    nothing = compare(reportdata.report(a_path(store="Old")), reportdata.report(a_path(store="New")))
    assert nothing.verdict == "The reports have no path in common: nothing can be compared."


def test_empty_payloads_are_not_compared_with_full_ones() -> None:
    empty = a_path(payload=0)
    assert changes(empty, a_path(a_step("a", "f"))) == []
    assert changes(empty, empty) == []


def two_versions() -> tuple[Report, Report]:
    old = reportdata.report(reportdata.multipart_write(), reportdata.clean_write())
    joined = replace(a_step("zarr.storage", "zarr.storage._obstore._put", 100_000_000, "join"), ratio=1.0)
    steps = (joined, reportdata.multipart_write().steps[2])
    new = reportdata.report(
        replace(reportdata.multipart_write(), steps=steps, copies=1.0, extra_at_peak=0.0),
        reportdata.clean_write(),
        reportdata.memory_write(),
        coverage=replace(reportdata.COVERAGE, transfers=False, lost_transfers=1),
    )
    packages = {**reportdata.ENVIRONMENT["packages"], "obstore": "0.11.1", "fsspec": "2025.3.0"}
    del packages["numpy"]
    return old, replace(new, environment={**reportdata.ENVIRONMENT, "python": "3.13.0", "packages": packages})


def test_versions_that_changed() -> None:
    assert compare(*two_versions()).versions == {
        "python": ("3.12.1", "3.13.0"),
        "obstore": ("0.11.0", "0.11.1"),
        "numpy": ("2.3.1", None),
        "fsspec": (None, "2025.3.0"),
    }


def test_text() -> None:
    assert diff.to_text(compare(*two_versions())) == (
        "1 copy came (zarr.storage); 2 copies went (obstore) on 2 paths.\n"
        "\n"
        "write . zarr.Array . ObjectStore(LocalStore) . bytes\n"
        "  copies 2.00 x -> 1.00 x; extra at peak 0.58 x -> 0.00 x\n"
        "  came: zarr.storage _obstore._put join 100.0 MB = 1.00 x\n"
        "  went: obstore _obstore::put::put_multipart_inner copy 100.0 MB = 1.00 x\n"
        "  went: obstore upload::WriteMultipart::put join 100.0 MB = 1.00 x\n"
        "\n"
        "write . zarr.Array . LocalStore . bytes\n"
        "  copies 0.00 x -> 0.00 x; extra at peak 0.00 x -> 0.00 x\n"
        "\n"
        "python 3.12.1 -> 3.13.0\n"
        "obstore 0.11.0 -> 0.11.1\n"
        "numpy 2.3.1 -> absent\n"
        "fsspec absent -> 2025.3.0\n"
        "only in the new report: write . zarr.Array . MemoryStore . bytes\n"
        "only the old session recorded transfers: compare with care\n"
        "the new session lost 1 transfer: its figures are lower bounds\n"
    )


def test_markdown() -> None:
    text = diff.to_markdown(compare(*two_versions()))
    lines = text.splitlines()
    assert lines[0] == r"**1 copy came \(zarr.storage\); 2 copies went \(obstore\) on 2 paths.**"
    assert (
        "- went: `obstore _obstore::put::put_multipart_inner` copy 100.0 MB = 1.00 x, "
        "on `write . zarr.Array . ObjectStore(LocalStore) . bytes`"
    ) in lines
    assert "| `write . zarr.Array . ObjectStore(LocalStore) . bytes` | 2.00 x | 1.00 x | 0.58 x | 0.00 x |" in lines
    assert "- `obstore` `0.11.0` -> `0.11.1`" in lines
    assert [token.type for token in MarkdownIt().enable("table").parse(text)].count("tr_open") == 3


def test_json() -> None:
    data = json.loads(diff.to_json(compare(*two_versions())))
    assert data["schema"] == "copytrace.diff/1"
    assert [(change["verb"], change["path"]) for change in data["changes"]] == [
        (verb, "write . zarr.Array . ObjectStore(LocalStore) . bytes") for verb in ("came", "went", "went")
    ]
    assert data["changes"][1]["new"] is None
    assert data["changes"][0]["new"]["bytes"] == 100_000_000
    assert data["versions"]["numpy"] == ["2.3.1", None]
    assert data["worse"] is True


def test_markdown_fits_a_comment() -> None:
    old, new = (reportdata.report(reportdata.many_rows(3000, name)) for name in ("a", "b"))
    new = replace(new, paths=tuple(replace(path, steps=()) for path in new.paths))
    text = diff.to_markdown(compare(old, new))
    assert len(text.encode()) <= 65_536
    assert "changes more" in text


@given(reports, reports)
@settings(max_examples=60, deadline=None)
def test_any_two_reports_can_be_compared(old: Report, new: Report) -> None:
    found = compare(old, replace(new, paths=new.paths + old.paths))
    assert_fits(diff.to_text(found), 80)
    json.loads(diff.to_json(found))
    assert len(diff.to_markdown(found).encode()) <= 65_536
    both = {path.label for path in old.paths}
    assert {change.path for change in found.changes} <= both
