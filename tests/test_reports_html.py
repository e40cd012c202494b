"""The HTML report: its pictures by their geometry, its text by what is in it, and all of it in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

import browser
import reportdata
from copytrace.model import Timeline
from copytrace.reports import flowgraph, html, timeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from copytrace.report import Report

LIVE = Timeline(
    (0.0, 1.0, 2.0, 4.0), ("obstore", "zarr", "numcodecs"), ((0, 700, 700, 0), (0, 8, 0, 0), (0, 0, 1001, 0)), 1000
)


def fifty() -> Report:
    """A report of 50 paths."""
    kinds = [path for path in reportdata.everything().paths if path.copies is not None and len(path.steps) < 40]
    paths = [
        replace(path, store=f"{path.store}{number}", label=f"{path.label} {number}")
        for number in range(10)
        for path in kinds
    ]
    return reportdata.report(*paths[:50])


# --- the flow graph --------------------------------------------------------------------------------------------------


def test_moves_are_as_wide_as_their_bytes_and_lead_downwards() -> None:
    path = reportdata.zstd_read()
    picture = flowgraph.draw(path)
    assert [ribbon.step for ribbon in picture.ribbons] == list(path.steps)
    assert picture.payload == flowgraph.WIDTH
    for ribbon in picture.ribbons:
        assert ribbon.width == pytest.approx(flowgraph.WIDTH * ribbon.step.bytes / path.payload_bytes)
        assert ribbon.nodes[0].y < ribbon.y < ribbon.nodes[-1].y
    roles = [node.role for node in sorted(picture.nodes, key=lambda node: node.y)]
    assert roles == ["io", "extra", "extra", "result"]
    assert picture.height == max(node.y for node in picture.nodes) + flowgraph.ROW


def test_labels_never_share_a_place() -> None:
    for path in reportdata.everything().paths:
        picture = flowgraph.draw(path)
        rows = sorted({node.y for node in picture.nodes} | {ribbon.y for ribbon in picture.ribbons})
        assert len({ribbon.y for ribbon in picture.ribbons}) == len(picture.ribbons)
        assert all(below - above >= flowgraph.ROW for above, below in pairwise(rows))
        for y in {node.y for node in picture.nodes}:
            row = sorted((node for node in picture.nodes if node.y == y), key=lambda node: node.x)
            for left, right in pairwise(row):
                assert left.x + left.width < right.x
            assert row[-1].x + row[-1].width <= flowgraph.WIDTH + 0.1


def test_bytes_that_stay_in_a_buffer_are_drawn_as_a_stage_of_it() -> None:
    path = reportdata.multipart_write()
    within = replace(path.steps[1], destination="b2")
    flushed = replace(path.steps[2], source="b2", destination=None)
    picture = flowgraph.draw(replace(path, steps=(path.steps[0], within, flushed)))
    assert [(node.role, node.stage) for node in picture.nodes] == [("source", 0), ("extra", 0), ("extra", 1), ("io", 0)]
    assert [ribbon.nodes[0].stage for ribbon in picture.ribbons] == [0, 0, 1]
    back = replace(path.steps[1], source="b2", destination="b1")
    picture = flowgraph.draw(replace(path, steps=(path.steps[0], back)))
    assert [(node.role, node.stage) for node in picture.nodes] == [("source", 0), ("extra", 0), ("source", 1)]


def test_a_move_that_passes_a_row_has_a_lane_there() -> None:
    path = reportdata.zstd_read()
    past = replace(path.steps[2], source="b2")
    picture = flowgraph.draw(replace(path, steps=(*path.steps, past)))
    around = picture.ribbons[3]
    assert [node.lane for node in around.nodes] == [False, True, False]
    lane, beside = around.nodes[1], picture.ribbons[1].nodes[-1]
    assert lane.y == beside.y
    assert lane.x >= beside.x + beside.width or beside.x >= lane.x + lane.width


def test_pieces_are_cut_apart() -> None:
    nodes = {node.buffer.id: node for node in flowgraph.draw(reportdata.multipart_write()).nodes if node.buffer}
    assert nodes["b1"].cuts == []
    assert len(nodes["b2"].cuts) == flowgraph.MOST_PIECES - 1
    assert all(nodes["b2"].x < cut < nodes["b2"].x + nodes["b2"].width for cut in nodes["b2"].cuts)


# --- the timeline ----------------------------------------------------------------------------------------------------


def test_the_timeline_stacks_layers_and_marks_the_payload() -> None:
    drawn = timeline.chart(LIVE)
    assert drawn is not None
    room = timeline.HEIGHT - 8
    assert [layer for layer, _ in drawn.areas] == ["obstore", "numcodecs"]
    assert drawn.payload == pytest.approx(timeline.HEIGHT - 1000 / 1701 * room, abs=0.1)
    top = min(float(y) for y in re.findall(r"V([\d.]+)", drawn.areas[1][1]))
    assert top == 8
    assert drawn.areas[0][1].startswith("M0.0 160.0H180.0V")
    assert [size for _, size in drawn.ticks] == ["1.7 kB", "850 B", "0 B"]
    assert [moment for _, moment in drawn.moments] == ["0.0 ms", "2.0 ms", "4.0 ms"]


@pytest.mark.parametrize("empty", [Timeline((), (), (), 0), Timeline((0.0, 1.0), ("a",), ((0, 0),), 5)])
def test_a_timeline_of_nothing_is_not_drawn(empty: Timeline) -> None:
    assert timeline.chart(empty) is None


# --- the document ----------------------------------------------------------------------------------------------------


def test_names_from_user_code_are_escaped() -> None:
    page = reportdata.report(reportdata.hostile_read()).to_html()
    assert "<script>alert" not in page
    assert page.count("<script") == 1
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert 'href="https://example.org' not in page


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://github.com/a/b/blob/v1/c.py#L3", True),
        ("http://example.org", True),
        ("javascript:alert(1)", False),
        ("data:text/html,x", False),
        ('https://x/"onclick="alert(1)', False),
        ("", False),
    ],
)
def test_links_lead_to_web_pages_only(url: str, kept: bool) -> None:
    assert html.link(url) == (url if kept else "")


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = reportdata.everything().to_html()
    assert not re.findall(r"(?:src|@import|url\()[^>]*https?:", page)
    assert "default-src 'none'" in page


def test_what_is_known_of_a_copy_stands_once_above_its_picture_and_at_each_row() -> None:
    page = reportdata.report(reportdata.multipart_write(), reportdata.clean_write()).to_html()
    (known,) = re.findall(r'<p class="known">(.*?)</p>', page, re.DOTALL)
    url = "https://github.com/developmentseed/obstore/issues/771"
    link = f'<b><a href="{url}">fixed in obstore 0.11.1 (obstore#771)</a></b>'
    assert known.startswith(f"{link}: upgrade obstore; a buffer is then uploaded from where it lies ")
    assert re.findall(r'class="code">([^<]+)<', known) == [
        "_obstore::put::put_multipart_inner",
        "object_store::upload::WriteMultipart::put",
    ]
    assert page.index('<p class="known">') < page.index('<div class="flow"')
    assert page.count('<span class="tag good">fixed in obstore 0.11.1</span>') == 4
    assert "fixed in obstore" in reportdata.report(reportdata.multipart_write())._repr_html_()


def test_a_remedy_leads_to_web_pages_only() -> None:
    path = reportdata.multipart_write()
    steps = tuple(replace(step, remedy="<b>x</b>: y", remedy_url="javascript:alert(1)") for step in path.steps)
    page = reportdata.report(replace(path, steps=steps)).to_html()
    assert "javascript:" not in page
    assert "<b>&lt;b&gt;x&lt;/b&gt;</b>: y" in page


def test_an_empty_report_says_so() -> None:
    assert "Nothing to report" in reportdata.report().to_html()


# --- in a browser ----------------------------------------------------------------------------------------------------

ROWS = "[...document.querySelectorAll('#copies tbody tr')]"

needs_browser = pytest.mark.skipif(browser.find() is None, reason="no Chromium here")

OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll("details[open] .flow .at")].map((one) => one.getBoundingClientRect());
  let found = 0;
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length; j++)
      if (Math.min(boxes[i].bottom, boxes[j].bottom) - Math.max(boxes[i].top, boxes[j].top) > 1) found++;
  return [boxes.length, found];
})()"""

CONTRAST = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => { for (; one; one = one.parentElement) {
    const color = numbers(getComputedStyle(one).backgroundColor);
    if (color.length === 3 || color[3] > 0.99) return color; }
    return [255, 255, 255]; };
  let worst = 99;
  for (const one of document.querySelectorAll("body *:not(svg *)")) {
    if (!one.checkVisibility() || ![...one.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const [a, b] = [light(numbers(getComputedStyle(one).color)), light(behind(one))];
    worst = Math.min(worst, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return worst;
})()"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one = replace(reportdata.zstd_read(), timeline=LIVE)
    reports = {
        "one": reportdata.report(one),
        "all": reportdata.everything(),
        "fifty": fifty(),
        "none": reportdata.report(),
    }
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(report.to_html(), "utf-8")
    return {name: folder / f"{name}.html" for name in reports}


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 480])
@pytest.mark.parametrize("name", ["one", "all", "fifty", "none"])
def test_a_page_opens_without_errors_and_can_be_read(
    chromium: browser.Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    chromium.open(pages[name], width=width, dark=dark)
    assert chromium.run("document.scrollingElement.scrollWidth") <= width
    labels, overlapping = chromium.run(OVERLAPS)
    assert (labels > 0, overlapping) == (name != "none", 0)
    assert chromium.run(CONTRAST) >= 4.5
    back = chromium.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 22, 26)" if dark else "rgb(246, 246, 244)")
    chromium.run("document.getElementById('theme').click()")
    assert chromium.run("getComputedStyle(document.body).backgroundColor") != back
    assert chromium.problems == []
    assert [url for url in chromium.requests if not url.startswith(("file:", "data:", "about:"))] == []


@needs_browser
def test_tables_sort_and_filter(chromium: browser.Browser, pages: dict[str, Path]) -> None:
    chromium.open(pages["fifty"])
    column = "[...document.querySelectorAll('#paths tbody tr')].map((row) => Number(row.cells[2].dataset.v))"
    assert len(set(chromium.run(column))) > 3
    press = "document.querySelectorAll('#paths th')[2].querySelector('button').click()"
    chromium.run(press)
    falling = chromium.run(column)
    assert falling == sorted(falling, reverse=True)
    chromium.run(press)
    assert chromium.run(column) == sorted(falling)
    chromium.run("document.querySelectorAll('#copies th')[1].querySelector('button').click()")
    names = chromium.run(
        "[...document.querySelectorAll('#copies tbody tr')].map((row) => row.cells[1].textContent.trim())"
    )
    assert chromium.run(f"{names!r}.every((name, i, all) => !i || all[i - 1].localeCompare(name) <= 0)")
    chromium.run(
        "(() => { const field = document.querySelector('input[data-for=copies]');"
        "field.value = 'icechunk PYSTORE'; field.dispatchEvent(new Event('input')); })()"
    )
    shown = chromium.run(f"{ROWS}.filter((row) => !row.hidden).map((row) => row.textContent)")
    assert 0 < len(shown) < len(names)
    assert all("icechunk" in text and "PyStore::get" in text for text in shown)
    assert chromium.problems == []


@needs_browser
def test_of_many_paths_the_worst_is_open_and_links_open_others(
    chromium: browser.Browser, pages: dict[str, Path]
) -> None:
    opened = "[...document.querySelectorAll('details.path')].filter((one) => one.open).map((one) => one.id)"
    chromium.open(pages["fifty"])
    (worst,) = chromium.run(opened)
    assert chromium.run("document.querySelector('#paths a').getAttribute('href')") == f"#{worst}"
    chromium.open(pages["fifty"], fragment="#path-7")
    assert set(chromium.run(opened)) == {worst, "path-7"}
    assert abs(chromium.run("document.getElementById('path-7').getBoundingClientRect().top")) < 2


@needs_browser
def test_hostile_names_run_nothing(chromium: browser.Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(reportdata.report(reportdata.hostile_read()).to_html(), "utf-8")
    chromium.open(page)
    assert chromium.run("document.querySelectorAll('script').length") == 1
    assert "<script>alert(1)</script>" in chromium.run("document.querySelector('.name').textContent")
    chromium.run("document.body.append(Object.assign(document.createElement('script'), {text: 'window.got = 1'}))")
    assert chromium.run("window.got") is None
    assert chromium.run("getComputedStyle(document.querySelector('.ribbon')).fill") != "none"
