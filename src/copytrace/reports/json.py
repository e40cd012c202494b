"""The report as JSON: the contract that other programs read, described by ``report.schema.json``."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

from copytrace.errors import CopytraceError
from copytrace.model import ReportData

SCHEMA = "copytrace.report/1"


def to_dict(report: ReportData) -> dict[str, Any]:
    """The report as plain dicts, lists, strings, numbers, booleans and None."""
    data: dict[str, Any] = {"schema": SCHEMA}
    data.update(_plain(report))
    return data


def dumps(report: ReportData, indent: int | None = 2) -> str:
    """The report as JSON text, ASCII only."""
    return json.dumps(to_dict(report), indent=indent, allow_nan=False)


def from_dict[R: ReportData](cls: type[R], data: object, name: str = "report") -> R:
    """Build a report of class ``cls`` from :func:`to_dict`'s form.

    Unknown keys are passed over and keys that have a default may be missing, so that other minor versions can be read.
    ``name`` says in errors where the data came from. Raises :class:`CopytraceError` when the data are no report.
    """
    schema = data.get("schema") if isinstance(data, Mapping) else None
    if not isinstance(schema, str) or not schema.startswith("copytrace.report/"):
        raise CopytraceError(f"{name}: not a copytrace report")
    if not re.fullmatch(re.escape(SCHEMA) + r"(\.\d+)?", schema):
        raise CopytraceError(f"{name}: made by another version ({schema}); this one reads {SCHEMA}")
    try:
        return typing.cast(R, _build(cls, data, "report"))
    except _MismatchError as error:
        raise CopytraceError(f"{name}: damaged report: {error}") from None


def loads[R: ReportData](cls: type[R], text: str, name: str = "report") -> R:
    """Build a report of class ``cls`` from JSON text. Raises :class:`CopytraceError` when it is no report."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CopytraceError(f"{name}: not a JSON report ({error})") from None
    return from_dict(cls, data, name)


class _MismatchError(Exception):
    pass


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, localns={"Mapping": Mapping})


def _build(wanted: Any, value: object, where: str) -> Any:
    """``value`` as an instance of the type ``wanted``; raises _MismatchError naming ``where`` it does not fit."""
    if wanted is Any:
        return value
    if is_dataclass(wanted):
        return _build_dataclass(typing.cast(type, wanted), value, where)
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is types.UnionType:
        present = next(argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _build(present, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _build(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if wanted is float and type(value) is int:
        return float(value)
    if isinstance(wanted, type) and type(value) is wanted:
        return value
    expected = getattr(origin or wanted, "__name__", str(wanted))
    raise _MismatchError(f"{where} is a {type(value).__name__}, not a {expected}")


def _build_dataclass(cls: type, value: object, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _MismatchError(f"{where} is a {type(value).__name__}, not an object")
    hints, arguments = _hints(cls), {}
    for field in fields(cls):
        if field.name in value:
            arguments[field.name] = _build(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise _MismatchError(f"{where} has no {field.name!r}")
    return cls(**arguments)
