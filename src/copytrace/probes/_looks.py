"""What is looked at before and after a call at a site. Errors made here stay here."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from copytrace.callers import callers
from copytrace.extents import extents
from copytrace.model import DESTINATION, INPUT, OUTPUT
from copytrace.probes._site import Argument, Call, Site
from copytrace.recorder import pack_seen, parent_span, recorder, threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from copytrace.probes._span import After, Before

    type _Getter = Callable[[Call], Any]


def before(site: Site, original: Any) -> Before | None:
    """What notes the inputs, destinations, description and payload of a call at ``site``; None when there is nothing to
    note.
    """
    asked = [argument for argument in (*site.inputs, *site.destinations) if not isinstance(argument, int)]
    names = parameters(original) if asked or site.describe or site.payload else {}
    looks = [(INPUT, argument) for argument in site.inputs] + [
        (DESTINATION, argument) for argument in site.destinations
    ]
    if site.describe is None and site.payload is None:
        if not looks:
            return None
        if len(looks) == 1 and not callable(looks[0][1]):
            return _one_input(site, *looks[0], names)
    return _all(site, names, [(role, _getter(argument)) for role, argument in looks])


def after(site: Site, learn: Callable[[type], None]) -> After | None:
    """What notes the result of a call at ``site``, and tells ``learn`` of its class when the site has sites on that."""
    if site.returns:
        return _learning(site, learn)
    if not site.output:
        return None
    seen, name = recorder.seen, site.name

    def look(span: int, result: Any) -> None:
        try:
            for extent in extents(result):
                seen.extend(pack_seen(span, OUTPUT, *extent))
        except Exception as error:
            recorder.failed(error, name)

    return look


def parameters(original: Any) -> dict[str, int]:
    """Parameter name -> position, of those that can be given by position; empty when the signature is not known."""
    code = getattr(original, "__code__", None)
    if code is not None and not hasattr(original, "__wrapped__"):
        return {name: index for index, name in enumerate(code.co_varnames[: code.co_argcount])}
    try:
        found = inspect.signature(original).parameters.values()
    except (ValueError, TypeError):
        return {}
    positional = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {name: index for index, name in enumerate(positional)}


def _one_input(site: Site, role: int, argument: Argument, names: Mapping[str, int]) -> Before:
    """The frequent case written out: one argument to note and nothing to describe."""
    seen, name = recorder.seen, site.name
    index = argument if isinstance(argument, int) else names.get(str(argument), sys.maxsize)
    keyword = str(argument)

    def look(span: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        try:
            for extent in extents(args[index] if len(args) > index else kwargs.get(keyword)):
                seen.extend(pack_seen(span, role, *extent))
        except Exception as error:
            recorder.failed(error, name)
        return 0, 0

    return look


def _all(site: Site, names: Mapping[str, int], looks: list[tuple[int, _Getter]]) -> Before:
    describe, payload_of, name, seen = site.describe, site.payload, site.name, recorder.seen
    operation = site.kind == "operation"

    def look(span: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        state = threads.state
        state.busy = True
        attributes = payload = 0
        try:
            call = Call(names, args, kwargs)
            for role, get in looks:
                for extent in extents(get(call)):
                    seen.extend(pack_seen(span, role, *extent))
            if describe is not None and (description := describe(call)):
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


def _learning(site: Site, learn: Callable[[type], None]) -> After:
    output, name, learnt = site.output, site.name, {type(None)}

    def look(span: int, result: Any) -> None:
        try:
            if output:
                recorder.see(span, OUTPUT, result)
            if type(result) not in learnt:
                learnt.add(type(result))
                learn(type(result))
        except Exception as error:
            recorder.failed(error, name)

    return look


def _getter(argument: Argument) -> _Getter:
    if isinstance(argument, int):
        return lambda call: call.args[argument] if len(call.args) > argument else None
    if isinstance(argument, str):
        return lambda call: call.get(argument)
    return argument
