"""Engines of tasks: which task a process was at work on."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Probe, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from copytrace.probes._site import Call

_LONGEST = 200


def _of_dask(call: Call) -> Mapping[str, Any]:
    return {"task": str(call.get("key"))[:_LONGEST]}


def _of_cubed(call: Call) -> Mapping[str, Any]:
    """An operation of cubed's runs its function once a block, ``op-003 [0, 1]``, or once an array."""
    name, block = call.get("name", ""), call.get("input", call.args[0] if call.args else "")
    if not isinstance(block, list | tuple | int | str):
        block = "/".join(filter(None, (os.path.basename(str(getattr(block, "store", ""))), getattr(block, "path", ""))))
    return {"task": f"{name} {block}".strip()[:_LONGEST]}


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and lists of these, and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _plain(pickled: object) -> Any:
    try:
        return _Plain(io.BytesIO(pickled)).load() if isinstance(pickled, bytes) else ""
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, TypeError):
        return ""


def _of_cubed_pickled(call: Call) -> Mapping[str, Any]:
    """The same in a process that is sent both pickled; what is no block is told from others by its checksum."""
    name, block = _plain(call.get("name")), _plain(call.get("inp"))
    if not block and isinstance(pickled := call.get("inp"), bytes):
        block = f"#{zlib.crc32(pickled):08x}"
    return {"task": f"{name} {block}".strip()[:_LONGEST]}


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
        Site(target="cubed.runtime.executors.local:unpickle_and_call", kind="context", describe=_of_cubed_pickled),
    ),
)
