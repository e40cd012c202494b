"""A few paths on a temporary directory, traced: what ``copytrace demo`` shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copytrace._session import Session

SHAPE = (2048, 2048)
"""Of the float32 array that is written and read, as one chunk: 16 MiB."""

PROGRAM = """
import copytrace

def write_and_read(values, arrays):
    for array in arrays:
        array[:] = values
        array[:]

def serialise(values):
    with copytrace.operation("transpose and serialise", payload_bytes=values.nbytes):
        encoded = values.T.tobytes()
    with copytrace.operation("split and join", payload_bytes=values.nbytes):
        middle = len(encoded) // 2
        b"".join([encoded[:middle], encoded[middle:]])
"""
"""What is traced, as a program of its own: copytrace's own frames are on no path."""


def trace() -> Session:
    """Write and read an array through the stores that are installed, in a session; the session, closed.

    Without zarr a small pipeline of numpy and bytes is traced instead.
    """
    import numpy as np

    from copytrace._session import session

    program: dict[str, Any] = {"__name__": "demo"}
    exec(compile(PROGRAM, "demo.py", "exec"), program)
    values = np.arange(SHAPE[0] * SHAPE[1], dtype="float32").reshape(SHAPE)
    with TemporaryDirectory(prefix="copytrace-demo-") as folder:
        arrays = _arrays(Path(folder)) if find_spec("zarr") else []
        with session("demo") as traced:
            if arrays:
                program["write_and_read"](values, arrays)
            else:
                program["serialise"](values)
    return traced


def _arrays(folder: Path) -> list[Any]:
    """Empty arrays in stores that are installed."""
    import zarr
    from zarr.codecs import ZstdCodec
    from zarr.storage import LocalStore, MemoryStore

    stores: list[tuple[Any, Any]] = [
        (LocalStore(folder / "raw"), None),
        (LocalStore(folder / "zstd"), ZstdCodec()),
        (MemoryStore(), None),
    ]
    if find_spec("obstore"):
        from obstore.store import LocalStore as ObstoreLocal
        from zarr.storage import ObjectStore

        (folder / "object").mkdir()
        stores.append((ObjectStore(ObstoreLocal(str(folder / "object"))), None))
    return [
        zarr.create_array(store, shape=SHAPE, chunks=SHAPE, dtype="float32", compressors=compressor, fill_value=-1)
        for store, compressor in stores
    ]
