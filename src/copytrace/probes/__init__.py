"""Probes: which callables of which libraries are recorded, one module a library.

A library ships its own probe as an entry point of the group ``copytrace.probes``.
``COPYTRACE_DISABLE_PROBES="numcodecs,obstore"`` switches some off.
"""

from copytrace.probes._attach import Attachment, attach_all, targets_of
from copytrace.probes._site import Argument, Call, Family, Probe, Site

__all__ = ["Argument", "Attachment", "Call", "Family", "Probe", "Site", "attach_all", "targets_of"]
