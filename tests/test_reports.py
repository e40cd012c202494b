"""What every rendering must keep, whatever the data: nothing lost, nothing too wide, nothing taken for markup."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from dataclasses import fields, replace
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path as File

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from markdown_it import MarkdownIt
from rich.cells import cell_len

import reportdata
from copytrace import model
from copytrace.errors import CopytraceError
from copytrace.report import Report
from copytrace.reports import wording

GOLDEN = File(__file__).parent / "golden"
SCHEMA = json.loads((files("copytrace") / "report.schema.json").read_text())
BY = ("path", "layer", "site")

texts = st.text(max_size=30) | st.sampled_from(["zarr.buffer", "a::b::c", reportdata.HOSTILE, "x" * 300])
sizes = st.integers(0, 1 << 40)
ratios = st.none() | st.floats(0, 1e6, allow_nan=False)
notes = st.lists(texts, max_size=2).map(tuple)
ids = st.none() | st.sampled_from(["b1", "b2", "b3"])
sites = st.builds(model.SiteRef, texts, texts, st.integers(0, 9999), texts | st.just("https://example.org/x.py#L1"))
buffers = st.builds(
    model.Buffer,
    st.sampled_from(["b1", "b2", "b3"]),
    st.sampled_from(["source", "result", "extra", "temporary", "io"]),
    texts,
    texts,
    sites,
    sizes,
    sizes,
    st.integers(1, 5000),
    st.booleans(),
)
steps = st.builds(
    model.Step,
    st.sampled_from(sorted(model.COPY_KINDS | model.IO_KINDS)),
    ids,
    ids,
    texts,
    texts,
    sites,
    texts,
    st.lists(sites, max_size=3).map(tuple),
    st.integers(0, 5000),
    sizes,
    ratios,
    sizes,
    ratios,
    st.sampled_from(["transfer", "pointer", "stack", "call", "native", "inferred"]),
    sizes,
    st.booleans(),
)
paths = st.builds(
    model.Path,
    texts,
    st.sampled_from(["write", "read", "encode", "decode", ""]),
    texts,
    texts,
    st.lists(texts, max_size=2).map(tuple),
    *[st.integers(0, 9)] * 3,
    sizes,
    sizes,
    ratios,
    sizes,
    ratios,
    st.integers(0, 2),
    ratios,
    sizes,
    sizes,
    ratios,
    ratios,
    sizes,
    st.none() | st.floats(0, 1),
    st.lists(buffers, max_size=3).map(tuple),
    st.lists(steps, max_size=5).map(tuple),
    notes,
)
probes = st.builds(
    model.ProbeStatus,
    texts,
    texts,
    texts,
    st.sampled_from(["attached", "not-installed", "not-imported", "partial", "unsupported", "failed"]),
    texts,
    st.lists(
        st.fixed_dictionaries({"name": texts, "status": st.sampled_from(["attached", "missing"])}), max_size=2
    ).map(tuple),
)
coverages = st.builds(
    model.Coverage,
    *[st.booleans()] * 3,
    st.integers(0, 9),
    st.lists(probes, max_size=3).map(tuple),
    *[sizes] * 3,
    st.none() | st.floats(0, 1),
    notes,
)
reports = st.builds(
    Report,
    st.fixed_dictionaries({"python": texts, "packages": st.dictionaries(texts, texts, max_size=3)}),
    coverages,
    st.lists(paths, max_size=3).map(tuple),
    st.lists(
        st.builds(model.LayerTotal, texts, texts, st.dictionaries(texts, st.floats(0, 99), max_size=2), sizes, sizes),
        max_size=3,
    ).map(tuple),
    texts,
    sizes,
    sizes,
    notes,
)


# --- golden renderings -----------------------------------------------------------------------------------------------

EXAMPLES = {
    "zstd_read": lambda: reportdata.report(reportdata.zstd_read()),
    "obstore_write": lambda: reportdata.report(reportdata.multipart_write(), reportdata.clean_write()),
    "icechunk_read": lambda: reportdata.report(reportdata.icechunk_read()),
    "clean": lambda: reportdata.report(
        reportdata.clean_write(), reportdata.memory_write(), coverage=replace(reportdata.COVERAGE, probes=())
    ),
    "small_slice": lambda: reportdata.report(
        reportdata.sharded_read(),
        reportdata.empty_write(),
        coverage=replace(reportdata.COVERAGE, memray=False, transfers=False, native=False, explained=None),
    ),
    "nothing": lambda: reportdata.report(notes=("the run did not end: this is what it had recorded until then",)),
    "hostile": lambda: reportdata.report(reportdata.hostile_read()),
}


@cache
def golden() -> dict[str, str]:
    """File name -> what it must hold."""
    rendered = {}
    for name, make in EXAMPLES.items():
        for by in BY:
            rendered[f"{name}.{by}.txt"] = make().to_text(by=by, file="write.copytrace")
            rendered[f"{name}.{by}.md"] = make().to_markdown(by=by)
    return rendered


@pytest.mark.parametrize("name", [f"{name}.{by}.{kind}" for name in EXAMPLES for by in BY for kind in ("txt", "md")])
def test_golden(name: str) -> None:
    """Written anew by ``python tests/test_reports.py``; read what changed before it is committed."""
    assert golden()[name] == (GOLDEN / name).read_text("utf-8")


def test_golden_files_are_all_compared() -> None:
    assert {file.name for file in GOLDEN.iterdir()} == set(golden())


# --- text ------------------------------------------------------------------------------------------------------------


def assert_fits(text: str, width: int) -> None:
    for line in text.split("\n"):
        assert cell_len(line) <= width, line
        assert not [char for char in line if unicodedata.category(char) in ("Cc", "Cf", "Cs")], ascii(line)


@given(reports, st.sampled_from(BY), st.integers(60, 200))
@settings(max_examples=150, deadline=None)
def test_text_never_exceeds_its_width(report: Report, by: str, width: int) -> None:
    assert_fits(report.to_text(by=by, width=width), width)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("width", [0, 1, 60])
def test_text_is_60_columns_wide_at_least(by: str, width: int) -> None:
    text = reportdata.everything().to_text(by=by, width=width)
    assert_fits(text, 60)
    assert text == reportdata.everything().to_text(by=by, width=60)


def test_every_copy_of_forty_is_shown() -> None:
    report = reportdata.report(reportdata.many_rows(40))
    for by in ("path", "site"):
        text = report.to_text(by=by)
        assert all(re.search(rf"method_{number}\b", text) for number in range(40))


def test_color_changes_nothing_but_the_color() -> None:
    report = reportdata.everything()
    colored = report.to_text(color=True)
    assert "\x1b[" in colored
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in stripped.splitlines()] == report.to_text().splitlines()


def test_an_unknown_grouping_is_refused() -> None:
    report = reportdata.everything()
    for render in (report.to_text, report.to_markdown):
        with pytest.raises(ValueError, match="by='file': choose path, layer, site or process"):
            render(by="file")  # type: ignore[arg-type]


def test_str_is_the_text_by_path() -> None:
    report = reportdata.report(reportdata.zstd_read())
    assert str(report) == report.to_text(by="path", width=80)


def test_steps_that_do_not_follow_each_other_name_the_row_they_start_from() -> None:
    text = reportdata.report(reportdata.icechunk_read()).to_text()
    rows = [line.split("->")[0].split() for line in text.splitlines() if re.match(r"  \d ", line)]
    assert rows == [["1", "file"], ["2"], ["3", "?"], ["4", "#2"]]


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (8192, "8.2 kB"),
        (99_949, "99.9 kB"),
        (99_950, "0.1 MB"),
        (16_777_216, "16.8 MB"),
        (12_345_678_901, "12,345.7 MB"),
    ],
)
def test_sizes(nbytes: int, words: str) -> None:
    assert wording.size(nbytes) == words


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("zarr.core.buffer.cpu.NDBuffer.__setitem__", "NDBuffer.__setitem__"),
        ("numcodecs.zstd.Zstd.decode", "Zstd.decode"),
        ("zarr.storage._local._put", "_local._put"),
        ("__main__.main.<locals>.inner", "main.inner"),
        ("main", "main"),
        ("", ""),
        ("object_store::local::read_range", "object_store::local::read_range"),
        ("a_very_long_crate_name::a_module::another_one::function", "a_module::another_one::function"),
        ("<_obstore::put::PullSource as std::io::Read>::read", "PullSource::read"),
        ("<alloc::vec::Vec<T> as core::convert::From<U>>::from", "Vec::from"),
        ("<&mut T as a::B>::f", "<&mut T as a::B>::f"),
        ("void std::fill<char>(char*, char*)", "void std::fill<char>(char*, char*)"),
    ],
)
def test_short_names(function: str, words: str) -> None:
    assert wording.short(function) == words


def test_shares_are_never_rounded_up_to_all() -> None:
    assert [wording.share(part) for part in (0, 0.5, 0.99999, 1.0)] == ["0.0 %", "50.0 %", "99.9 %", "100.0 %"]


# --- the figures of all renderings are those of the data -------------------------------------------------------------


def test_avoidable_comes_from_the_data_not_from_a_rule() -> None:
    path = replace(reportdata.multipart_write(), avoidable=0.0, best_achievable=2)
    assert "2.0 copies, none avoidable" in reportdata.report(path).to_text()
    assert "No avoidable copies on 1 path." in reportdata.report(path).to_markdown()


def test_peaks_are_not_claimed_when_allocations_were_not_recorded() -> None:
    report = reportdata.report(reportdata.zstd_read(), coverage=replace(reportdata.COVERAGE, memray=False))
    assert "peak not recorded" in report.to_text()
    assert "extra at peak" not in report.to_text(by="layer")
    assert "| - |" in report.to_markdown()


def test_what_was_not_seen_is_said() -> None:
    coverage = replace(
        reportdata.COVERAGE,
        transfers=False,
        lost_transfers=3,
        unattributed_bytes=5_000_000,
        explained=None,
        notes=("x",),
    )
    text = reportdata.report(reportdata.zstd_read(), coverage=coverage).to_text()
    for words in (
        "transfers: not recorded, inferred from probes and allocations",
        "3 transfers lost: figures are lower bounds",
        "5.0 MB belong to no layer that could be named",
        "12.3 MB in 1,234 moves led near no payload and are on no path",
        "not imported here: s3fs",
        "obstore 0.11.0 partial: no obstore.put_file",
        "tensorstore 9.0 unsupported: needs <1",
    ):
        assert words in text


# --- JSON ------------------------------------------------------------------------------------------------------------

VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@given(reports)
@settings(max_examples=100, deadline=None)
def test_json_keeps_everything_and_follows_the_schema(report: Report) -> None:
    data = json.loads(report.to_json())
    VALIDATOR.validate(data)
    assert data == report.to_dict()
    assert Report.from_dict(data) == report
    assert Report.from_json(report.to_json(indent=None)) == report


def test_examples_follow_the_schema() -> None:
    VALIDATOR.validate(reportdata.everything().to_dict())


@pytest.mark.parametrize(
    ("definition", "of"),
    [
        ("coverage", model.Coverage),
        ("probe", model.ProbeStatus),
        ("path", model.Path),
        ("timeline", model.Timeline),
        ("buffer", model.Buffer),
        ("step", model.Step),
        ("site", model.SiteRef),
        ("layer", model.LayerTotal),
        ("process", model.Process),
        ("share", model.Share),
        ("task", model.Task),
        (None, Report),
    ],
)
def test_the_schema_describes_every_field(definition: str | None, of: type) -> None:
    described = SCHEMA if definition is None else SCHEMA["$defs"][definition]
    names = {field.name for field in fields(of)} | ({"schema"} if definition is None else set())
    assert set(described["properties"]) == names


def test_the_schema_refuses_what_is_no_report() -> None:
    good = reportdata.report(reportdata.zstd_read()).to_dict()
    for spoil in (
        lambda data: data.pop("paths"),
        lambda data: data.update(schema="copytrace.report/2"),
        lambda data: data["paths"][0]["steps"][0].update(kind="teleport"),
        lambda data: data["paths"][0]["steps"][0].update(bytes=-1),
        lambda data: data["paths"][0].pop("copies"),
    ):
        data = json.loads(json.dumps(good))
        spoil(data)
        assert not VALIDATOR.is_valid(data)


def test_null_where_there_is_no_ratio() -> None:
    path = json.loads(reportdata.report(reportdata.empty_write()).to_json())["paths"][0]
    for key in ("copies", "extra_at_peak", "avoidable", "read_amplification"):
        assert path[key] is None


def test_other_minor_versions_are_read() -> None:
    report = reportdata.report(reportdata.zstd_read())
    data = report.to_dict() | {"schema": "copytrace.report/1.7", "news": [1]}
    del data["notes"], data["paths"][0]["notes"], data["paths"][0]["steps"][0]["required"]
    data["paths"][0]["mood"] = "good"
    assert Report.from_dict(data) == report


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data.update(schema="copytrace.report/2"), "x: made by another version .copytrace.report/2."),
        (lambda data: data.update(schema="other"), "x: not a copytrace report"),
        (lambda data: data.pop("schema"), "x: not a copytrace report"),
        (lambda data: data.pop("paths"), "x: damaged report: report has no 'paths'"),
        (lambda data: data.update(paths={}), r"report.paths is a dict, not a tuple"),
        (lambda data: data["paths"][0].update(copies="2"), r"report.paths\[0\].copies is a str, not a float"),
        (lambda data: data["paths"][0].update(operations=True), r"paths\[0\].operations is a bool, not a int"),
        (lambda data: data["paths"][0].update(steps=[None]), r"steps\[0\] is a NoneType, not an object"),
        (lambda data: data["layers"][0].update(copies={"p": None}), r"layers\[0\].copies\['p'\] is a NoneType"),
    ],
)
def test_damaged_reports_are_refused_in_one_line(spoil, message: str) -> None:
    data = reportdata.report(reportdata.zstd_read()).to_dict()
    spoil(data)
    with pytest.raises(CopytraceError, match=message) as caught:
        Report.from_dict(data, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, '{"schema": 1}'])
def test_text_that_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(CopytraceError, match="x: not a "):
        Report.from_json(text, "x")


# --- Markdown --------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        assert all(name in ("href", "style") for name, _ in attrs), attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(markdown: str) -> Tags:
    page = Tags()
    page.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))
    return page


OURS = {
    "p",
    "strong",
    "h3",
    "h4",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "ul",
    "ol",
    "li",
    "code",
    "a",
    "details",
} | {"summary"}


@given(reports, st.sampled_from(BY))
@settings(max_examples=150, deadline=None)
def test_markdown_holds_no_elements_but_ours(report: Report, by: str) -> None:
    assert set(page_of(report.to_markdown(by=by)).elements) <= OURS


@pytest.mark.parametrize("by", BY)
def test_every_row_of_every_table_has_all_its_cells(by: str) -> None:
    tokens = MarkdownIt().enable("table").parse(reportdata.everything().to_markdown(by=by))
    columns: list[int] = []
    for token in tokens:
        if token.type == "tr_open":
            columns.append(0)
        elif token.type in ("td_open", "th_open"):
            columns[-1] += 1
    rows = len(columns)
    assert rows > 20
    widths = {"path": {7, 2}, "layer": {4 + 9, 2}, "site": {11, 2}}[by]
    assert set(columns) == widths


def test_hostile_names_come_through_as_text() -> None:
    page = page_of(reportdata.report(reportdata.hostile_read()).to_markdown())
    assert "script" not in page.elements
    assert r"evil|`x`<script>alert(1)</script>\x1b[31m\n| a | b |\u202e@team #1 \| **bold** 数据ééé" in page.text


def test_mentions_and_references_are_broken() -> None:
    report = reportdata.report(reportdata.clean_write(), notes=("cc @team, fixes #12",))
    assert "@\u200bteam, fixes \\#\u200b12" in report.to_markdown()


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    "make",
    [
        lambda: reportdata.report(reportdata.many_rows(3000)),
        lambda: reportdata.report(*(replace(reportdata.many_rows(40, f"l{n}x"), label=f"p{n}") for n in range(50))),
        lambda: reportdata.report(*(replace(reportdata.hostile_read(), label=f"p{n}") for n in range(400))),
        lambda: replace(
            reportdata.report(reportdata.hostile_read()),
            notes=("<数据>" * 5000,) * 50,
            environment={"packages": {"数" * 999: "1"}},
        ),
    ],
    ids=["rows", "paths", "hostile", "notes"],
)
def test_markdown_fits_an_issue(make, by: str) -> None:
    report = make()
    text = report.to_markdown(by=by)
    assert 0 < len(text.encode()) <= 65_536
    assert text.startswith("**")
    assert text.count("<details>") == text.count("</details>")
    if len(report.paths) > 30 or any(len(path.steps) > 100 for path in report.paths):
        assert re.search(r"^and [\d,]+ (row|path|layer|stack)s? more$", text, re.MULTILINE)


def test_rows_that_matter_most_are_kept() -> None:
    path = reportdata.many_rows(3000)
    heavy = replace(path.steps[1777], bytes=path.payload_bytes * 9, avoidable_bytes=path.payload_bytes * 9)
    path = replace(path, steps=(*path.steps[:1777], heavy, *path.steps[1778:]))
    text = reportdata.report(path).to_markdown()
    assert "method_1777" in text
    assert "and 2," in text


def test_functions_link_to_their_source_only_by_http() -> None:
    path = reportdata.zstd_read()
    for url, linked in (("https://example.org/f.py#L3", True), ("javascript:alert(1)", False), ("", False)):
        step = replace(path.steps[2], site=replace(path.steps[2].site, url=url))
        page = page_of(reportdata.report(replace(path, steps=(step,))).to_markdown())
        assert ("a" in page.elements) is linked


def test_reports_load_their_renderings_when_asked_only() -> None:
    import subprocess

    code = (
        "import sys, copytrace.report; print([m for m in sys.modules if m.startswith(('copytrace.reports', 'rich'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in golden().items():
        (GOLDEN / name).write_text(text, "utf-8")
