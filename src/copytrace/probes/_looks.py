"""What is looked at before and after a call at a site. Errors made here stay here."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

from copytrace.callers import callers
from copytrace.model import DESTINATION, INPUT
from copytrace.probes._site import COPIES, Call, Site
from copytrace.recorder import parent_span, recorder, thread_state
from copytrace.spans import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    type Before = Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[int, int]]


def plan_of(site: Site, index: int, original: Any, learn: Callable[[type], None]) -> Plan:
    """What is done around a call of ``original`` at ``site``, which has ``index`` in the spool.

    ``learn`` is told of the class of a result when the site has sites on that.
    """
    asked = [argument for argument in (*site.inputs, *site.destinations) if not isinstance(argument, int)]
    names = parameters(original) if asked or site.describe or site.payload else {}
    looks = [(INPUT, argument) for argument in site.inputs]
    looks += [(DESTINATION, argument) for argument in site.destinations]
    plain = tuple(
        (role, argument, "") if isinstance(argument, int) else (role, names.get(argument, sys.maxsize), argument)
        for role, argument in looks
        if not callable(argument)
    )
    found = [(role, argument) for role, argument in looks if callable(argument)]
    before = _before(site, names, found) if found or site.describe or site.payload else None
    after = _learning(site, learn) if site.returns else None
    return Plan(site.name, index, plain, before, site.output, after, site.kind in COPIES)


def parameters(original: Any) -> dict[str, int]:
    """Parameter name -> position, of those that can be given by position; empty when the signature is not known."""
    code = getattr(original, "__code__", None)
    if code is not None and not hasattr(original, "__wrapped__"):
        return {name: index for index, name in enumerate(code.co_varnames[: code.co_argcount])}
    return _compiled(original) if isinstance(original, BuiltinFunctionType) else _from_signature(original)


def _from_signature(original: Any) -> dict[str, int]:
    try:
        found = inspect.signature(original).parameters.values()
    except (ValueError, TypeError):
        return {}
    positional = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {name: index for index, name in enumerate(positional)}


_compiled = cache(_from_signature)
"""Of a function of a compiled library, whose signature takes most of a millisecond to read."""


def _before(site: Site, names: Mapping[str, int], looks: list[tuple[int, Callable[[Call], Any]]]) -> Before:
    describe, payload_of, name = site.describe, site.payload, site.name
    operation = site.kind == "operation"

    def look(span: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        state = thread_state()
        state.busy = True
        attributes = payload = 0
        try:
            call = Call(names, args, kwargs)
            for role, get in looks:
                recorder.see(span, role, get(call))
            description = describe(call) if describe is not None else None
            if isinstance(description, int):
                attributes = description
            elif description:
                if operation and not parent_span.get():
                    description = {**description, "called_from": callers()}
                attributes = recorder.attributes(description)
            if payload_of is not None:
                payload = payload_of(call)
        except Exception as error:
            recorder.failed(error, name)
        finally:
            state.busy = False
        return attributes, payload

    return look


def _learning(site: Site, learn: Callable[[type], None]) -> Callable[[Any], None]:
    name, learnt = site.name, {type(None)}

    def look(result: Any) -> None:
        if type(result) not in learnt:
            learnt.add(type(result))
            try:
                learn(type(result))
            except Exception as error:
                recorder.failed(error, name)

    return look
