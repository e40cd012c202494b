"""The zarrs 0.2 codec pipeline under zarr: it reads, decodes and scatters in Rust, past zarr's stores and codecs."""

from __future__ import annotations

from copytrace.probes._site import Probe, Site

PROBE = Probe(
    name="zarrs",
    library="zarrs",
    sites=(
        Site(target="zarrs.pipeline:ZarrsCodecPipeline.read", kind="context", direction="read", destinations=("out",)),
        Site(target="zarrs.pipeline:ZarrsCodecPipeline.write", kind="context", direction="write", inputs=("value",)),
    ),
)
