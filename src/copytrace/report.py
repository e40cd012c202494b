"""The report of a session: its data, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from copytrace.model import ReportData

if TYPE_CHECKING:
    from collections.abc import Mapping

type By = Literal["path", "layer", "site", "process"]


@dataclass(frozen=True, slots=True)
class Report(ReportData):
    """Which layer made which copy, on which path.

    The data are :attr:`paths`, :attr:`layers`, :attr:`coverage` and :attr:`environment`; all sizes are bytes.
    """

    @classmethod
    def from_data(cls, data: ReportData) -> Self:
        """The same data with renderings."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(ReportData)})

    def to_text(self, by: By = "path", width: int = 80, color: bool = False, file: str = "FILE") -> str:
        """The report for a terminal of ``width`` columns (60 at least), grouped by ``path``, ``layer``, ``site``
        or ``process``.

        ``file`` is what the commands that the report suggests call the trace. Raises ValueError for another ``by``.
        """
        from copytrace.reports.text import render

        return render(self, by, width, color, file)

    def to_markdown(self, by: By = "path") -> str:
        """The report for an issue on GitHub: at most 65,536 characters, no raw HTML from names in it.

        Raises ValueError for another ``by`` than ``path``, ``layer``, ``site`` or ``process``.
        """
        from copytrace.reports.markdown import render

        return render(self, by)

    def to_html(self) -> str:
        """The report as one HTML document that makes no request: pictures, tables and stacks."""
        from copytrace.reports.html import render

        return render(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text; its schema is ``copytrace/report.schema.json``."""
        from copytrace.reports.json import dumps

        return dumps(self, indent)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain dicts and lists, in the form of :meth:`to_json`."""
        from copytrace.reports.json import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "report") -> Self:
        """The report that :meth:`to_dict` gave; raises :class:`CopytraceError` naming ``name`` when it is none."""
        from copytrace.reports.json import from_dict

        return from_dict(cls, data, name)

    @classmethod
    def from_json(cls, text: str, name: str = "report") -> Self:
        """The report that :meth:`to_json` gave; raises :class:`CopytraceError` naming ``name`` when it is none."""
        from copytrace.reports.json import loads

        return loads(cls, text, name)

    def _repr_html_(self) -> str:
        from copytrace.reports.html import render_fragment

        return render_fragment(self)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def __str__(self) -> str:
        return self.to_text()
