"""Two reports compared: which copies went, came, grew, shrank or moved."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from copytrace.layers import project_of
from copytrace.reports import wording
from copytrace.reports.markdown import LIMIT, code, cut, length, prose, table
from copytrace.reports.text import Page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from copytrace.model import Path, ReportData

SCHEMA = "copytrace.diff/1"
VERBS = ("came", "grew", "moved", "shrank", "went")
_RECORDS = {"memray": "allocations (memray)", "native": "native stacks", "transfers": "transfers"}
NOISE = 0.02 + 1e-9
"""Changes up to this share of the payload are none."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What one function of one layer copies on a path: ``bytes`` in ``count`` pieces, ``ratio`` to the payload."""

    path: str
    layer: str
    function: str
    kinds: tuple[str, ...]
    count: int
    bytes: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """A copy that is not the same in both reports.

    ``verb``: went (``new`` is None), came (``old`` is None), grew, shrank, or moved (from another layer or function).
    """

    verb: str
    old: Copied | None
    new: Copied | None

    @property
    def path(self) -> str:
        """Label of the path that it is on."""
        return _one(self.old, self.new).path

    @property
    def layers(self) -> str:
        """The layer that copies, or ``old to new`` where these differ."""
        return " to ".join(dict.fromkeys(wording.plain(copied.layer) for copied in (self.old, self.new) if copied))

    @property
    def is_worse(self) -> bool:
        """True when a layer copies more than before."""
        changed_hands = self.old and self.new and self.old.layer != self.new.layer
        return self.verb in ("came", "grew") or bool(changed_hands)


@dataclass(frozen=True, slots=True)
class PathChange:
    """A path that both reports have: copies and extra memory at peak, over its payload, in the old and the new one."""

    path: str
    copies: tuple[float | None, float | None]
    extra_at_peak: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Diff:
    """The comparison. ``versions`` maps a package, python or platform that changed to its old and new version."""

    changes: tuple[Change, ...]
    paths: tuple[PathChange, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    versions: Mapping[str, tuple[str | None, str | None]]
    notes: tuple[str, ...]
    said: tuple[str, ...] = ()
    """What the reports themselves note, old and new."""

    @property
    def worse(self) -> bool:
        """True when a copy came, grew or moved into another layer, on a path that both reports have."""
        return any(change.is_worse for change in self.changes)

    @property
    def verdict(self) -> str:
        """The comparison in one sentence."""
        if not self.paths:
            return "The reports have no path in common: nothing can be compared."
        told = []
        for verb in VERBS:
            if found := [change for change in self.changes if change.verb == verb]:
                layers = ", ".join(dict.fromkeys(change.layers for change in found))
                told.append(f"{wording.plural(len(found), 'copy', 'copies')} {verb} ({layers})")
        common = wording.plural(len(self.paths), "path")
        return f"{'; '.join(told)} on {common}." if told else f"The same copies on {common}."


def compare(old: ReportData, new: ReportData) -> Diff:
    """Compare what two reports say of the paths that both have, by layer and function, whatever the lines."""
    before, after = ({path.label: path for path in report.paths} for report in (old, new))
    common = [label for label in before if label in after]
    changes = [change for label in common for change in _changes(before[label], after[label])]
    return Diff(
        tuple(sorted(changes, key=lambda change: VERBS.index(change.verb))),
        tuple(_path_change(before[label], after[label]) for label in common),
        tuple(label for label in before if label not in after),
        tuple(label for label in after if label not in before),
        _versions(old.environment, new.environment),
        tuple(_notes(old, new)),
        tuple(f"{which}: {note}" for which, report in (("old", old), ("new", new)) for note in report.notes),
    )


def _one(old: Copied | None, new: Copied | None) -> Copied:
    present = new or old
    assert present is not None
    return present


def _copied(path: Path) -> dict[tuple[str, str], Copied]:
    found: dict[tuple[str, str], Copied] = {}
    for step in wording.copies_of(path):
        key = step.layer, step.site.function
        before = found.get(key)
        nbytes = step.bytes + (before.bytes if before else 0)
        kinds = (*before.kinds, step.kind) if before else (step.kind,)
        found[key] = Copied(
            path.label,
            *key,
            tuple(dict.fromkeys(kinds)),
            step.count + (before.count if before else 0),
            nbytes,
            nbytes / path.payload_bytes if path.payload_bytes else None,
        )
    return found


def _amount(copied: Copied) -> float:
    return copied.bytes if copied.ratio is None else copied.ratio


def _changes(old: Path, new: Path) -> list[Change]:
    if bool(old.payload_bytes) != bool(new.payload_bytes):
        return []
    before, after = _copied(old), _copied(new)
    changes = []
    for key in before.keys() & after.keys():
        was, now = before.pop(key), after.pop(key)
        change = _amount(now) - _amount(was)
        if abs(change) > _noise(was):
            changes.append(Change("grew" if change > 0 else "shrank", was, now))
    gone = sorted((copied for copied in before.values() if _amount(copied) > _noise(copied)), key=_order)
    for now in sorted((copied for copied in after.values() if _amount(copied) > _noise(copied)), key=_order):
        elsewhere = sorted((was for was in gone if _moved(was, now)), key=lambda was: was.layer != now.layer)
        if elsewhere:
            gone.remove(elsewhere[0])
            changes.append(Change("moved", elsewhere[0], now))
        else:
            changes.append(Change("came", None, now))
    changes += [Change("went", was, None) for was in gone]
    return sorted(changes, key=lambda change: _order(_one(change.old, change.new)))


def _order(copied: Copied) -> tuple[Any, ...]:
    return -copied.bytes, copied.layer, copied.function


def _noise(copied: Copied) -> float:
    return NOISE * copied.bytes if copied.ratio is None else NOISE


def _moved(was: Copied, now: Copied) -> bool:
    """The same bytes by the same means, in another place of the same project."""
    alike = was.kinds == now.kinds and abs(_amount(was) - _amount(now)) <= _noise(was)
    return alike and project_of(was.layer) == project_of(now.layer)


def _path_change(old: Path, new: Path) -> PathChange:
    return PathChange(old.label, (old.copies, new.copies), (old.extra_at_peak, new.extra_at_peak))


def _versions(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str | None, str | None]]:
    before, after = _flat(old), _flat(new)
    names = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _flat(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = environment.get("packages")
    flat = {key: str(value) for key, value in environment.items() if isinstance(value, str)}
    return flat | {str(key): str(value) for key, value in (packages.items() if isinstance(packages, dict) else ())}


def _notes(old: ReportData, new: ReportData) -> list[str]:
    notes = []
    for what in ("memray", "native", "transfers"):
        had, has = getattr(old.coverage, what), getattr(new.coverage, what)
        if had != has:
            notes.append(f"only the {'old' if had else 'new'} session recorded {_RECORDS[what]}: compare with care")
    for which, report in (("old", old), ("new", new)):
        if report.coverage.lost_transfers:
            lost = wording.plural(report.coverage.lost_transfers, "transfer")
            notes.append(f"the {which} session lost {lost}: its figures are lower bounds")
    return notes


# --- renderings -------------------------------------------------------------------------------------------------------


def to_dict(diff: Diff) -> dict[str, Any]:
    """The comparison as plain dicts and lists."""
    data: dict[str, Any] = {"schema": SCHEMA, "verdict": diff.verdict, "worse": diff.worse}
    data.update(asdict(diff))
    for change, plain in zip(diff.changes, data["changes"], strict=True):
        plain["path"] = change.path
    return data


def to_json(diff: Diff) -> str:
    """The comparison as JSON text."""
    return json.dumps(to_dict(diff), indent=2, allow_nan=False)


def to_text(diff: Diff, width: int = 80, color: bool = False) -> str:
    """The comparison for a terminal of ``width`` columns."""
    page = Page(width)
    page.flow(diff.verdict, style="bold red" if diff.worse else "bold green")
    for path in diff.paths:
        page.blank()
        page.flow(wording.plain(path.path), style="bold")
        page.flow(_figures(path), indent=2)
        for change in diff.changes:
            if change.path == path.path:
                style = {"went": "green", "shrank": "green", "moved": "yellow"}.get(change.verb, "red")
                page.flow(_sentence(change, wording.plain), indent=2, style=style)
    if asides := _asides(diff, wording.plain):
        page.blank()
        for aside in asides:
            page.flow(aside)
    return page.to_str(color)


def to_markdown(diff: Diff) -> str:
    """The comparison for an issue or a pull request on GitHub, at most 65,536 characters."""
    head = [f"**{prose(diff.verdict)}**", ""]
    rows = [[code(path.path), *_pair(path.copies), *_pair(path.extra_at_peak)] for path in diff.paths]
    columns = {"path": "left", "copies, old": "right", "new": "right", "extra at peak, old": "right", "new ": "right"}
    changes = [f"- {_sentence(change, code)}, on {code(change.path)}" for change in diff.changes]
    asides = [f"- {aside}" for aside in _asides(diff, code)]
    for shown in (1000, 100, 30, 10):
        lines = [
            *head,
            *(cut(changes, shown, "change") or ["No copy changed."]),
            "",
            *cut([*table(columns, rows)], shown + 2, "path"),
            "",
            *asides[:shown],
        ]
        if length(lines) <= LIMIT:
            break
    return "\n".join(lines).rstrip() + "\n"


def _pair(ratios: tuple[float | None, float | None]) -> list[str]:
    return [wording.times(ratio) for ratio in ratios]


def _figures(path: PathChange) -> str:
    copies, extra = (" -> ".join(_pair(ratios)) for ratios in (path.copies, path.extra_at_peak))
    return f"copies {copies}; extra at peak {extra}"


def _sentence(change: Change, name: wording.Naming) -> str:
    """``went: obstore put::put_multipart_inner  copy 100.0 MB, 1.00 x``."""
    copied = _one(change.old, change.new)
    who = name(f"{copied.layer} {wording.short(copied.function)}")
    text = f"{change.verb}: {who} {'+'.join(copied.kinds)} {_told(copied)}"
    if change.verb == "moved" and change.old:
        return f"{text}, before in {name(f'{change.old.layer} {wording.short(change.old.function)}')}"
    return f"{text}, before {_told(change.old)}" if change.old and change.new else text


def _told(copied: Copied) -> str:
    return f"{wording.size(copied.bytes)}{'' if copied.ratio is None else f' = {wording.times(copied.ratio)}'}"


def _asides(diff: Diff, name: wording.Naming) -> list[str]:
    """Versions, paths that cannot be compared, what the reports note, and differences in what was recorded."""
    told = [
        f"{name(what)} {name(old or 'absent')} -> {name(new or 'absent')}" for what, (old, new) in diff.versions.items()
    ]
    told += [f"only in the old report: {name(path)}" for path in diff.only_old]
    told += [f"only in the new report: {name(path)}" for path in diff.only_new]
    return told + [name(note) for note in diff.said] + list(diff.notes)
