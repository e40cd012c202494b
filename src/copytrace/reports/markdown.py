"""The report as Markdown, for an issue on GitHub."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from copytrace.model import ReportData


def render(report: ReportData, by: str) -> str:
    raise NotImplementedError
