"""icechunk 2.1 to 2.3: what its store hands to Rust and gets back.

The store itself is one of zarr's, see :mod:`copytrace.probes.zarr.stores`.
"""

from __future__ import annotations

from copytrace.probes._site import Probe, Site

_STORE = "icechunk._icechunk_python:PyStore"

PROBE = Probe(
    name="icechunk",
    library="icechunk",
    sites=(
        Site(target=f"{_STORE}.get", kind="context", direction="read", output=True),
        Site(target=f"{_STORE}.get_partial_values", kind="context", direction="read", output=True),
        Site(target=f"{_STORE}.set", kind="context", direction="write", inputs=("value",)),
        Site(target=f"{_STORE}.set_if_not_exists", kind="context", direction="write", inputs=("value",)),
    ),
)
