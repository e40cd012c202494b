"""Engines of tasks: which task a process was at work on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Probe, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from copytrace.probes._site import Call

_LONGEST = 200


def _of_dask(call: Call) -> Mapping[str, Any]:
    return {"task": str(call.get("key"))[:_LONGEST]}


def _of_cubed(call: Call) -> Mapping[str, Any]:
    """An operation of cubed's runs its function once a block: ``op-003 [0, 1]``."""
    name, block = call.get("name", ""), call.get("input")
    if not isinstance(block, list | tuple | int):
        block = ""
    return {"task": f"{name} {block!s}".strip()[:_LONGEST], "of": str(name)}


DISTRIBUTED = Probe(
    name="distributed",
    library="distributed",
    sites=(
        Site(
            target=("distributed.worker:_run_task", "distributed.worker:apply_function"),
            kind="context",
            describe=_of_dask,
        ),
    ),
)

CUBED = Probe(
    name="cubed",
    library="cubed",
    sites=(
        Site(target="cubed.runtime.executors.local:exec_stage_func", kind="context", describe=_of_cubed),
        Site(target="cubed.runtime.executors.local:run_func_threads", kind="context", describe=_of_cubed),
        Site(target="cubed.runtime.utils:execute_with_memray", kind="context", describe=_of_cubed),
        Site(target="cubed.runtime.executors.dask:run_func", kind="context", describe=_of_cubed),
    ),
)
