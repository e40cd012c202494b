"""A few paths on a temporary directory, traced: what ``copytrace demo`` shows."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from copytrace._session import Session

SHAPE = (2048, 2048)
"""Of the float32 array that is written and read, as one chunk: 16 MiB."""

PIPELINE = """
import copytrace

def main(values):
    with copytrace.operation("transpose and serialise", payload_bytes=values.nbytes):
        encoded = values.T.tobytes()
    with copytrace.operation("split and join", payload_bytes=values.nbytes):
        middle = len(encoded) // 2
        b"".join([encoded[:middle], encoded[middle:]])
"""
"""What is traced without zarr. It is a program of its own, because copytrace's own frames are on no path."""


def trace() -> Session:
    """Write and read an array through the stores that are installed, in a session; the session, closed.

    Without zarr a small pipeline of numpy and bytes is traced instead.
    """
    import numpy as np

    from copytrace._session import session

    values = np.arange(SHAPE[0] * SHAPE[1], dtype="float32").reshape(SHAPE)
    with TemporaryDirectory(prefix="copytrace-demo-") as folder:
        work = _with_zarr(Path(folder)) if find_spec("zarr") else _without_zarr()
        with session("demo") as traced:
            work(values)
    return traced


def _with_zarr(folder: Path) -> Callable[[NDArray[np.float32]], None]:
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
    arrays = [
        zarr.create_array(store, shape=SHAPE, chunks=SHAPE, dtype="float32", compressors=compressor, fill_value=-1)
        for store, compressor in stores
    ]

    def work(values: NDArray[np.float32]) -> None:
        for array in arrays:
            array[:] = values
            array[:]

    return work


def _without_zarr() -> Callable[[NDArray[np.float32]], None]:
    program: dict[str, Any] = {"__name__": "demo"}
    exec(compile(PIPELINE, "demo.py", "exec"), program)
    main: Callable[[NDArray[np.float32]], None] = program["main"]
    return main
