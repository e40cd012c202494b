"""Limits on copies in a test suite: the marker ``limit_copies`` and the fixture ``copytrace``.

Nothing of copytrace, memray or numpy is imported before the first test that uses one of them runs.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from copytrace import Session
    from copytrace.report import Report

MARKER = "limit_copies"
SHOWN = 10
"""Lines of a failure after its first three: the limit and the two guiltiest sites."""

_INI = {
    "copytrace_max_copies": ("string", "", "copies that limit_copies allows when it does not say"),
    "copytrace_path": ("string", "*", "glob of the paths that limit_copies is for when it does not say"),
    "copytrace_min_bytes": (
        "string",
        "0",
        "sites that copy fewer bytes do not count when limit_copies does not say",
    ),
    "copytrace_native": ("bool", True, "record native stacks: names of functions in C and Rust, but slower"),
    "copytrace_tests": ("args", [], "globs of node ids of tests that are limited without a mark"),
}


def limit_copies(
    max_copies: float | None = None,
    *,
    path: str | None = None,
    layer: str = "",
    min_bytes: int | None = None,
    max_extra_at_peak: float | None = None,
) -> Limit:
    """fail when the test copies more than max_copies times the payload on a path whose label fits the glob path; with \
layer (or project) only its copies count, with min_bytes only sites that copy so many; max_extra_at_peak limits \
the extra memory held, over the payload."""
    return Limit(max_copies, path, layer, min_bytes, max_extra_at_peak)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a mark, the fixture or the ini file demands. ``strict``: fail when there is nothing to measure."""

    max_copies: float | None
    path: str | None
    layer: str
    min_bytes: int | None
    max_extra_at_peak: float | None
    strict: bool = True

    def complete(self, defaults: Limit) -> Limit:
        """With what is left open taken from ``defaults``; raises ValueError when the values make no sense."""
        limit = replace(
            self,
            path=defaults.path if self.path is None else self.path,
            min_bytes=defaults.min_bytes if self.min_bytes is None else self.min_bytes,
        )
        if self.max_copies is None and self.max_extra_at_peak is None:
            limit = replace(limit, max_copies=defaults.max_copies)
        if limit.max_copies is None and limit.max_extra_at_peak is None:
            raise ValueError("no limit; give max_copies, or set copytrace_max_copies in the ini file")
        for name in ("max_copies", "max_extra_at_peak", "min_bytes"):
            value = getattr(limit, name)
            if value is not None and (not isinstance(value, int | float) or not value >= 0):
                raise ValueError(f"{name}={value!r}: give a number from 0 up")
        for name in ("path", "layer"):
            if not isinstance(getattr(limit, name), str):
                raise ValueError(f"{name}={getattr(limit, name)!r}: give a string")
        return limit

    def __str__(self) -> str:
        given = [] if self.max_copies is None else [f"{self.max_copies:g}"]
        idle = {"path": "*", "layer": "", "min_bytes": 0, "max_extra_at_peak": None}
        given += [f"{name}={getattr(self, name)!r}" for name, none in idle.items() if getattr(self, name) != none]
        return f"{MARKER}({', '.join(given)})"


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, (kind, default, text) in _INI.items():
        parser.addini(name, text, type=kind, default=default)  # type: ignore[arg-type]


def pytest_configure(config: pytest.Config) -> None:
    signature = "max_copies, *, path='*', layer='', min_bytes=0, max_extra_at_peak=None"
    config.addinivalue_line("markers", f"{MARKER}({signature}): {limit_copies.__doc__}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    __tracebackhide__ = True
    limits = _limits(item)
    if not limits:
        return (yield)
    with _limited(item, limits):
        return (yield)


@pytest.fixture
def copytrace(request: pytest.FixtureRequest) -> Copytrace:
    """Trace parts of a test: ``with copytrace(0, path="write*") as session: ...`` and then ``session.report``."""
    return Copytrace(request.node)


class Copytrace:
    """The fixture: called, it opens a session that fails the test when its block copies more than allowed."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    @contextmanager
    def __call__(self, max_copies: float | None = None, **limits: Any) -> Iterator[Session]:
        """A session; its limits are those of the marker ``limit_copies``, none where none are given."""
        __tracebackhide__ = True
        demanded = [] if max_copies is None and not limits else [_complete(self._item, (max_copies,), limits)]
        with _limited(self._item, demanded) as session:
            yield session


@contextmanager
def _limited(item: pytest.Item, limits: Sequence[Limit]) -> Iterator[Session]:
    __tracebackhide__ = True
    from copytrace import session

    recording = session(
        item.nodeid,
        native=item.config.getini("copytrace_native"),
        memray=not _tracked_by_memray(item),
        min_bytes=min((limit.min_bytes or 0 for limit in limits), default=0),
    )
    with recording:
        yield recording
    if limits and (lines := _verdict(recording.report, limits)):
        rest = len(lines) - 3 - SHOWN
        more = [f"and {rest} more"] if rest > 0 else []
        pytest.fail("\n".join([*lines[: 3 + SHOWN], *more]), pytrace=False)


def _verdict(report: Report, limits: Sequence[Limit]) -> list[str]:
    """What the report says against the limits, the worst first; empty when it keeps them."""
    from copytrace.errors import CopytraceError
    from copytrace.reports.limits import Limits, exceeded

    if not report.coverage.transfers and not report.coverage.memray:
        return ["neither moves nor allocations were recorded, so no limit can be checked; see copytrace doctor"]
    found = []
    for limit in limits:
        if limit.max_extra_at_peak is not None and not report.coverage.memray:
            return [f"{limit}: memory at peak was not recorded: {'; '.join(report.coverage.notes)}"]
        asked = Limits(limit.max_copies, limit.max_extra_at_peak, limit.path or "*", limit.layer)
        try:
            found += [(excess, limit) for excess in exceeded(_without_small(report, limit.min_bytes or 0), asked)]
        except CopytraceError as error:
            if limit.strict:
                return [f"{limit}: {str(error).replace('--', '')}"]
    found.sort(key=lambda pair: pair[0].limit - pair[0].actual)
    lines = []
    for excess, limit in found:
        lines.append(f"{excess.actual:.2f} {excess.what} on {excess.path}, but {limit}")
        lines += [f"  {culprit}" for culprit in excess.culprits]
    return lines


def _without_small(report: Report, min_bytes: int) -> Report:
    """The report without steps of fewer bytes."""
    from copytrace.model import COPY_KINDS

    paths = []
    for path in report.paths:
        steps = tuple(step for step in path.steps if step.bytes >= min_bytes)
        copied = sum(step.bytes for step in steps if step.kind in COPY_KINDS)
        copies = copied / path.payload_bytes if path.payload_bytes else None
        paths.append(replace(path, steps=steps, copied_bytes=copied, copies=copies))
    return replace(report, paths=tuple(paths))


def _limits(item: pytest.Item) -> list[Limit]:
    """The limits of a test, its own marks before those of its class and module, the ini file's last."""
    limits: dict[tuple[str | None, str], Limit] = {}
    for mark in item.iter_markers(MARKER):
        limit = _complete(item, mark.args, mark.kwargs)
        limits.setdefault((limit.path, limit.layer), limit)
    if not limits and any(fnmatchcase(item.nodeid, glob) for glob in item.config.getini("copytrace_tests")):
        return [replace(_complete(item, (), {}), strict=False)]
    return list(limits.values())


def _complete(item: pytest.Item, arguments: Sequence[Any], named: Mapping[str, Any]) -> Limit:
    __tracebackhide__ = True
    ini = item.config.getini
    try:
        max_copies = float(ini("copytrace_max_copies")) if ini("copytrace_max_copies") else None
        defaults = Limit(max_copies, ini("copytrace_path"), "", int(ini("copytrace_min_bytes")), None)
        return limit_copies(*arguments, **named).complete(defaults)
    except (TypeError, ValueError) as error:
        wrong = str(error).removeprefix(f"{MARKER}() ")
    pytest.fail(f"{MARKER}: {wrong}", pytrace=False)


def _tracked_by_memray(item: pytest.Item) -> bool:
    """Whether pytest-memray tracks this test: memray allows one tracker, and it is pytest-memray's then."""
    manager = item.config.pluginmanager.get_plugin("memray_manager")
    if manager is None:
        return False
    marked = any(item.get_closest_marker(name) for name in ("limit_memory", "limit_leaks", "limit_leaked_objects"))
    return marked or bool(item.config.getoption("memray", False)) or bool(item.config.getini("memray"))
