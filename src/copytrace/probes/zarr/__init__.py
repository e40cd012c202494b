"""zarr 3.0.6 to 3.4: arrays, codec pipelines, buffers, codecs and stores."""

from copytrace.probes._site import Probe
from copytrace.probes.zarr.arrays import ARRAYS
from copytrace.probes.zarr.buffers import BUFFERS
from copytrace.probes.zarr.codecs import CODECS, PIPELINES
from copytrace.probes.zarr.stores import HELPERS, STORES

PROBE = Probe(
    name="zarr",
    library="zarr",
    versions=">=3",
    sites=(*ARRAYS, *PIPELINES, *BUFFERS, *HELPERS),
    families=(STORES, CODECS),
)
