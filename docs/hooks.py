"""What of the site is made when it is built: the reference of the command line and of JSON, and the navigation."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.testing import CliRunner

from copytrace.cli import app

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

NAVIGATION: list[tuple[str, str | list[tuple[str, str]]]] = [
    ("Overview", "index.md"),
    ("Getting started", "getting-started.md"),
    ("Tutorial", "tutorial.md"),
    (
        "How to",
        [
            ("My notebook's reads use 3 x the memory", "how-to/notebook.md"),
            ("Which layer do I report to?", "how-to/report.md"),
            ("A memory budget for dask or cubed", "how-to/budget.md"),
            ("An array larger than memory", "how-to/iterate.md"),
            ("Several processes", "how-to/processes.md"),
            ("Write a probe", "probes.md"),
        ],
    ),
    (
        "Understand",
        [
            ("What the numbers mean", "numbers.md"),
            ("How attribution works", "attribution.md"),
            ("Beside memray, Scalene, memray-array", "comparison.md"),
            ("Reliability", "reliability.md"),
            ("Performance", "performance.md"),
            ("Design", "design.md"),
        ],
    ),
    ("Measured", [("Results", "results.md"), ("Findings", "findings.md")]),
    (
        "Reference",
        [("Command line", "reference/cli.md"), ("Python", "reference/api.md"), ("JSON", "reference/json.md")],
    ),
]
"""Title -> page, or section -> its pages; what is not there is left out."""
OTHERS = {"how-to": "How to", "": "Understand"}
"""Directory -> section of its pages that are not named above."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put those pages into the navigation that are there."""
    there = Path(config.docs_dir)
    named = {page for _, pages in NAVIGATION for _, page in ([("", pages)] if isinstance(pages, str) else pages)}
    found = sorted(str(page.relative_to(there)) for page in there.rglob("*.md"))
    config.nav = []
    for title, pages in NAVIGATION:
        listed = [(title, pages)] if isinstance(pages, str) else pages
        kept: list[Any] = [{name: page} for name, page in listed if (there / page).exists()]
        kept += [page for page in found if page not in named and OTHERS.get(str(Path(page).parent).strip(".")) == title]
        if kept:
            config.nav += kept if isinstance(pages, str) else [{title: kept}]
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in the reference pages."""
    made = {"reference/cli.md": command_line, "reference/json.md": schema}.get(page.file.src_uri)
    return markdown + made() if made else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Take the roles of docstrings away that Markdown does not know."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)


def command_line() -> str:
    """The help of every command."""
    command = typer.main.get_command(app)
    names = list(getattr(command, "commands", {}))
    told = []
    for name in names:
        shown = CliRunner().invoke(app, [name, "--help"], prog_name="copytrace", terminal_width=100)
        assert shown.exit_code == 0, shown.output
        told.append(f"\n## copytrace {name}\n\n```text\n{shown.output.strip()}\n```\n")
    return "".join(told)


def schema() -> str:
    """A table of each object of the JSON Schema."""
    found = json.loads((files("copytrace") / "report.schema.json").read_text("utf-8"))
    return "\n" + _object("report", found) + "".join(_object(name, one) for name, one in found.get("$defs", {}).items())


def _object(name: str, described: dict[str, Any]) -> str:
    rows = []
    for key, one in described.get("properties", {}).items():
        told = str(one.get("description", "")).replace("|", "\\|").replace("\n", " ")
        rows.append(f"| `{key}` | {_type(one)} | {told} |\n")
        if "properties" in one:
            rows += [
                f"| `{key}.{inner}` | {_type(sub)} | {sub.get('description', '')} |\n"
                for inner, sub in one["properties"].items()
            ]
    return (
        f"\n## {name}\n\n{described.get('description', '')}\n\n| key | type | meaning |\n|---|---|---|\n{''.join(rows)}"
        if rows
        else ""
    )


def _type(one: dict[str, Any]) -> str:
    if "$ref" in one:
        name = one["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in one:
            return " or ".join(_type(choice) for choice in one[several])
    if "enum" in one:
        return ", ".join(f"`{json.dumps(value)}`" for value in one["enum"])
    kinds = one.get("type", "any")
    if kinds == "array":
        return f"list of {_type(one.get('items', {}))}"
    return kinds if isinstance(kinds, str) else " or ".join(kinds)
