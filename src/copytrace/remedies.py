"""Copies that are known, and what to do about them: which versions make them, where that was reported, what mends it.

``reported`` names a thread upstream in which the copy itself is described. Where there is none the field is empty, and
the entry rests on the code of the versions named.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from copytrace.operations import compresses
from copytrace.versions import covers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from copytrace.model import Path, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One known copy.

    It is made by ``layer`` in a function that matches one of the globs ``functions`` and, when given, is called from
    one that matches ``called_from``, on a path in ``direction`` (any when empty), in the ``versions`` of ``package`` (a
    specifier as in :attr:`copytrace.Site.versions`). ``compressed`` says whether the path's codecs must compress, None
    that either will do. ``fixed_in`` is the first release without it, empty when there is none yet. A function of a
    wheel without symbols goes by its offset, ``+0x204830``.
    """

    name: str
    layer: str
    functions: tuple[str, ...]
    package: str
    advice: str
    kinds: frozenset[str] = frozenset({"copy", "join"})
    called_from: tuple[str, ...] = ()
    direction: str = ""
    compressed: bool | None = None
    versions: str = ""
    fixed_in: str = ""
    reported: str = ""

    @property
    def text(self) -> str:
        """One line: ``fixed in obstore 0.11.1 (obstore#771): upgrade ...``."""
        state = (
            f"fixed in {self.package} {self.fixed_in}" if self.fixed_in else "reported" if self.reported else "known"
        )
        thread = f" ({self.reported})" if self.reported else ""
        return f"{state}{thread}: {self.advice}"

    @property
    def url(self) -> str:
        """The thread upstream, empty when there is none."""
        repository, _, number = self.reported.partition("#")
        return f"https://github.com/{_REPOSITORIES[repository]}/issues/{number}" if number else ""


_REPOSITORIES = {
    "zarr-python": "zarr-developers/zarr-python",
    "numcodecs": "zarr-developers/numcodecs",
    "obstore": "developmentseed/obstore",
    "icechunk": "earth-mover/icechunk",
    "zarrista": "developmentseed/zarrista",
    "s3fs": "fsspec/s3fs",
    "aiohttp": "aio-libs/aiohttp",
}

REMEDIES = (
    Remedy(
        name="obstore-multipart",
        layer="obstore",
        functions=("*put_multipart*", "*pyo3_object_store*", "*_obstore::put*", "*std::io*Cursor*", "+0x*"),
        package="obstore",
        direction="write",
        versions="<0.11.1",
        fixed_in="0.11.1",
        reported="obstore#771",
        advice="upgrade obstore; a buffer is then uploaded from where it lies, not copied into parts first",
    ),
    Remedy(
        name="zarr-local-write",
        layer="zarr.storage",
        functions=("*_local._put",),
        called_from=("*LocalStore.set*",),
        package="zarr",
        direction="write",
        versions=">=3.0,<3.0.7",
        fixed_in="3.0.7",
        reported="zarr-python#2944",
        advice="upgrade zarr; the local store then writes the array's own memory",
    ),
    Remedy(
        name="zarr-obstore-write",
        layer="zarr.storage",
        functions=("*Buffer.to_bytes",),
        called_from=("*_obstore.ObjectStore.set*",),
        package="zarr",
        direction="write",
        versions=">=3.0.7,<3.0.8",
        fixed_in="3.0.8",
        reported="zarr-python#2972",
        advice="upgrade zarr; the object store then hands over the array's own memory",
    ),
    Remedy(
        name="zarr-fsspec-write",
        layer="zarr.storage",
        functions=("*Buffer.to_bytes",),
        called_from=("*FsspecStore.set*",),
        package="zarr",
        direction="write",
        versions=">=3",
        reported="s3fs#959",
        advice="fsspec's pipe needs bytes; write through ObjectStore with obstore to avoid it",
    ),
    Remedy(
        name="fsspec-maybe-convert",
        layer="fsspec",
        functions=("fsspec.mapping.maybe_convert",),
        package="fsspec",
        direction="write",
        reported="s3fs#959",
        advice="FSMap turns arrays into bytes before it pipes them; zarr 3 with ObjectStore and obstore does not",
    ),
    Remedy(
        name="zarr-shard-append",
        layer="zarr.buffer",
        functions=("*Buffer.__add__",),
        package="zarr",
        direction="write",
        versions=">=3.0,<3.1.4",
        fixed_in="3.1.4",
        reported="zarr-python#3560",
        advice="upgrade zarr; a shard is then put together once, not copied anew for each of its chunks",
    ),
    Remedy(
        name="zarr-scatter",
        layer="zarr.buffer",
        functions=("*NDBuffer.__setitem__",),
        kinds=frozenset({"scatter"}),
        package="zarr",
        direction="read",
        compressed=False,
        versions=">=3",
        reported="zarr-python#3429",
        advice="stores cannot read into the result, so chunks are copied to their place; open upstream",
    ),
    Remedy(
        name="zarr-scatter-decoded",
        layer="zarr.buffer",
        functions=("*NDBuffer.__setitem__",),
        kinds=frozenset({"scatter"}),
        package="zarr",
        direction="read",
        compressed=True,
        versions=">=3",
        reported="zarr-python#2904",
        advice="codecs do not decode into the result, so chunks are copied to their place; open upstream",
    ),
    Remedy(
        name="numcodecs-slice",
        layer="numcodecs",
        functions=("numcodecs.blosc.*", "numcodecs.lz4.*", "numcodecs.zstd.*"),
        package="numcodecs",
        versions="<0.16",
        fixed_in="0.16.0",
        reported="numcodecs#717",
        advice="upgrade numcodecs; the output of blosc, lz4 and zstd is then cut to size in place",
    ),
    Remedy(
        name="icechunk-write",
        layer="icechunk",
        functions=("*Buffer.to_bytes",),
        package="icechunk",
        direction="write",
        versions="<2.2",
        fixed_in="2.2.0",
        reported="icechunk#2331",
        advice="upgrade icechunk; its store then hands over the array's own memory",
    ),
    Remedy(
        name="icechunk-read",
        layer="icechunk",
        functions=("icechunk::asset_manager::*", "*StreamReader as *::poll_read"),
        package="icechunk",
        direction="read",
        reported="icechunk#2345",
        advice="the pieces of a chunk are gathered and then joined into one block; open upstream",
    ),
    Remedy(
        name="zarrista-write",
        layer="zarrs",
        functions=("*store_chunk_opt*",),
        package="zarrista",
        direction="write",
        reported="zarrista#186",
        advice="Array.store_encoded_chunk writes bytes that are encoded already without the copy",
    ),
    Remedy(
        name="aiohttp-getbuffer",
        layer="aiohttp",
        functions=("aiohttp.payload.BytesIOPayload.__init__",),
        package="aiohttp",
        direction="write",
        versions=">=3.12.1",
        advice="getbuffer() makes BytesIO copy the bytes that it shares; write through obstore to avoid it",
    ),
    Remedy(
        name="aiohttp-stream-read",
        layer="aiohttp",
        functions=("aiohttp.streams.StreamReader.read",),
        package="aiohttp",
        direction="read",
        reported="aiohttp#10550",
        advice="read() keeps all received blocks and joins them; read a body in ranges, or through obstore",
    ),
    Remedy(
        name="s3fs-concurrent-cat",
        layer="s3fs",
        functions=("s3fs.core.S3FileSystem._cat_file_concurrent*",),
        kinds=frozenset({"copy", "join", "scatter"}),
        package="s3fs",
        direction="read",
        versions=">=2026.3",
        advice="ranges are put together in a bytearray, then copied into bytes; max_concurrency=1 avoids it",
    ),
)


def remedy(step: Step, path: Path, packages: Mapping[str, str]) -> Remedy | None:
    """The remedy for a step of ``path``, None when it is no known copy of the installed ``packages`` (name -> version).

    Of several the first in :data:`REMEDIES`; one for other versions than the installed ones is none.
    """
    callers = [reference.function for reference in step.called_from]
    compressed = compresses(path.codecs)
    return next(
        (
            known
            for known in REMEDIES
            if step.layer == known.layer
            and step.kind in known.kinds
            and known.direction in ("", path.direction)
            and known.compressed in (None, compressed)
            and any(fnmatchcase(step.site.function, pattern) for pattern in known.functions)
            and (not known.called_from or any(fnmatchcase(c, p) for c in callers for p in known.called_from))
            and known.package in packages
            and covers(known.versions, packages[known.package])
        ),
        None,
    )
