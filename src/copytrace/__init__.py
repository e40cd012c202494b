"""copytrace shows which layer of an array storage stack made which copy of the data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copytrace._session import Session, operation, session
    from copytrace.probes import Probe, Site
    from copytrace.report import Report
    from copytrace.trace import load

__version__ = "0.1.0"

__all__ = ["Probe", "Report", "Session", "Site", "__version__", "load", "operation", "session"]

_HOME = {
    "Probe": "probes",
    "Report": "report",
    "Session": "_session",
    "Site": "probes",
    "load": "trace",
    "operation": "_session",
    "session": "_session",
}


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext copytrace``."""
    from copytrace.notebook import register

    register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext copytrace``."""
    from copytrace.notebook import unregister

    unregister(shell)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"copytrace.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
