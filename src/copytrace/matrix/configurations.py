"""What the matrix runs, as data: stacks, their versions, and the figures published for them."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace

from copytrace.errors import CopytraceError

TABLES = ("current", "latest", "legacy", "s3")

LOCAL, HTTP, HTTPS = "local", "S3, http", "S3, https"

Published = tuple[int, int]
"""Extra copies at peak, rounded, of an uncompressed and of a compressed write or read: the table of memray-array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One row: a stack with its versions.

    ``driver`` names an entry of :data:`copytrace.matrix.drivers.DRIVERS`. ``exclude_newer`` is the day after which no
    release counts, empty for none. ``writes`` and ``reads`` say which of the two are tabulated.
    """

    name: str
    table: str
    filesystem: str
    store: str
    driver: str
    requirements: tuple[str, ...]
    exclude_newer: str = ""
    published_write: Published | None = None
    published_read: Published | None = None
    writes: bool = True
    reads: bool = True

    @property
    def format(self) -> int:
        """The Zarr format that is written."""
        return 2 if self.driver.startswith("zarr2-") else 3


_ZARR = ("zarr==3.3.0", "numcodecs[crc32c]==0.17.1")
_ZARR342 = ("zarr==3.4.2", "numcodecs[crc32c]==0.17.1")
_ZARR2 = ("zarr==2.18.7", "numcodecs==0.15.1", "fsspec")
_ZARR306 = ("zarr==3.0.6", "numcodecs[crc32c]==0.15.1")
_ZARR308 = ("zarr==3.0.8", "numcodecs[crc32c]==0.16.1")


def _row(
    table: str, filesystem: str, store: str, driver: str, *requirements: str, name: str, **more: object
) -> Configuration:
    row = Configuration(
        name=name, table=table, filesystem=filesystem, store=store, driver=driver, requirements=requirements
    )
    return replace(row, **more)  # type: ignore[arg-type]


_CURRENT = (
    _row(
        "current",
        LOCAL,
        "LocalStore",
        "zarr-local",
        *_ZARR,
        name="zarr-local",
        published_write=(0, 1),
        published_read=(1, 2),
    ),
    _row(
        *("current", LOCAL, "obstore LocalStore", "zarr-obstore", *_ZARR, "obstore==0.11.1"),
        name="zarr-obstore",
        published_write=(0, 1),
        published_read=(1, 2),
    ),
    _row(
        *("current", LOCAL, "icechunk", "zarr-icechunk", *_ZARR, "icechunk==2.1.2"),
        name="zarr-icechunk",
        published_write=(1, 2),
        published_read=(2, 2),
    ),
    _row(
        *("current", LOCAL, "zarrista FilesystemStore", "zarrista-local", "zarrista==0.1.0"),
        name="zarrista-local",
        published_write=(1, 1),
        published_read=(0, 1),
    ),
    _row(
        *("current", LOCAL, "zarrista, obstore LocalStore", "zarrista-obstore", "zarrista==0.1.0", "obstore==0.11.1"),
        name="zarrista-obstore",
        published_write=(1, 1),
        published_read=(0, 1),
    ),
    _row(
        *("current", LOCAL, "zarrista, icechunk", "zarrista-icechunk", *_ZARR, "zarrista==0.1.0", "icechunk==2.1.2"),
        name="zarrista-icechunk",
        published_read=(1, 1),
        writes=False,
    ),
    _row("current", LOCAL, "obstore LocalStore", "zarr-obstore", *_ZARR, "obstore==0.11.0", name="zarr-obstore-0.11.0"),
    _row("current", LOCAL, "obstore LocalStore", "zarr-obstore", *_ZARR, "obstore==0.12.1", name="zarr-obstore-0.12.1"),
    _row("current", LOCAL, "icechunk", "zarr-icechunk", *_ZARR, "icechunk==2.3.0", name="zarr-icechunk-2.3.0"),
    _row("current", LOCAL, "LocalStore", "zarr-local", *_ZARR342, name="zarr-3.4.2-local"),
    _row(
        "current", LOCAL, "obstore LocalStore", "zarr-obstore", *_ZARR342, "obstore==0.12.1", name="zarr-3.4.2-obstore"
    ),
    _row("current", LOCAL, "icechunk", "zarr-icechunk", *_ZARR342, "icechunk==2.3.0", name="zarr-3.4.2-icechunk"),
    _row("current", LOCAL, "LocalStore, zarrs pipeline", "zarrs-local", *_ZARR, "zarrs==0.2.3", name="zarrs-local"),
    _row(
        *("current", LOCAL, "obstore LocalStore, zarrs pipeline", "zarrs-obstore", *_ZARR, "zarrs==0.2.3"),
        "obstore==0.12.1",
        name="zarrs-obstore",
    ),
    _row(
        *("current", LOCAL, "zarrista, obstore LocalStore", "zarrista-obstore", "zarrista==0.1.0", "obstore==0.12.1"),
        name="zarrista-obstore-0.12.1",
    ),
    _row(
        *("current", LOCAL, "zarrista FilesystemStore, by chunks", "zarrista-local-chunks", "zarrista==0.1.0"),
        name="zarrista-local-chunks",
    ),
    _row(
        *("current", LOCAL, "zarrista, obstore LocalStore, by chunks", "zarrista-obstore-chunks", "zarrista==0.1.0"),
        "obstore==0.12.1",
        name="zarrista-obstore-chunks",
    ),
    _row(
        *("current", LOCAL, "zarrista FilesystemStore, by index", "zarrista-local-index", "zarrista==0.1.0"),
        name="zarrista-local-index",
    ),
)

_S3_ZARR = (
    ("s3fs", "s3fs", "zarr-s3fs", ("s3fs==2026.9.0",)),
    ("obstore", "obstore S3Store", "zarr-s3-obstore", ("obstore==0.12.1",)),
)

_SCHEMES = (("http", HTTP), ("https", HTTPS))

_S3 = tuple(
    _row("s3", filesystem, store, driver, *_ZARR, *extra, name=f"zarr-{short}-{scheme}")
    for scheme, filesystem in _SCHEMES
    for short, store, driver, extra in _S3_ZARR
)


def _legacy(period: str, before: str, obstore: str) -> tuple[Configuration, ...]:
    """The legacy rows with what else they need as it was then (``before`` a day, None for today's)."""

    def row(name: str, filesystem: str, store: str, driver: str, *requirements: str, **more: object) -> Configuration:
        newest = {"zarr-2.18": "2025-04-15", "zarr-3.0.6": "2025-04-10", "zarr-3.0.8": "2025-05-28"}
        day = next(day for start, day in newest.items() if name.startswith(start)) if before else ""
        return _row(
            "legacy", filesystem, store, driver, *requirements, name=f"{name}-{period}", exclude_newer=day, **more
        )

    return (
        row(
            "zarr-2.18.7-local",
            LOCAL,
            "DirectoryStore",
            "zarr2-local",
            *_ZARR2,
            published_write=(0, 2),
            published_read=(1, 1),
        ),
        row(
            "zarr-3.0.6-local",
            LOCAL,
            "LocalStore",
            "zarr-local",
            *_ZARR306,
            published_write=(1, 2),
            published_read=(1, 2),
        ),
        row("zarr-3.0.8-local", LOCAL, "LocalStore", "zarr-local", *_ZARR308, published_write=(0, 1)),
        row(
            *("zarr-3.0.8-obstore", LOCAL, "obstore LocalStore", "zarr-obstore", *_ZARR308, f"obstore=={obstore}"),
            published_write=(0, 1),
            published_read=(1, 2),
        ),
        *(
            row(
                *(f"zarr-2.18.7-s3fs-{scheme}", filesystem, "s3fs", "zarr2-s3fs", *_ZARR2, "s3fs"),
                published_write=(1, 2),
                published_read=(2, 2),
            )
            for scheme, filesystem in _SCHEMES
        ),
        *(
            row(
                *(f"zarr-3.0.6-s3fs-{scheme}", filesystem, "s3fs", "zarr-s3fs", *_ZARR306, "s3fs"),
                published_write=(1, 2),
                published_read=(2, 2),
            )
            for scheme, filesystem in _SCHEMES
        ),
        *(
            row(
                *(f"zarr-3.0.8-obstore-{scheme}", filesystem, "obstore S3Store", "zarr-s3-obstore", *_ZARR308),
                f"obstore=={obstore}",
                published_write=(0, 1),
                published_read=(1, 2),
            )
            for scheme, filesystem in _SCHEMES
        ),
    )


_LEGACY = (*_legacy("period", "then", "0.6.0"), *_legacy("today", "", "0.12.1"))


def _unpinned(row: Configuration) -> Configuration:
    """The same stack with whatever is released today."""
    requirements = tuple(requirement.split("==", 1)[0] for requirement in row.requirements)
    return replace(row, table="latest", requirements=requirements, published_write=None, published_read=None)


_LATEST = tuple(
    _unpinned(row) for row in (*_CURRENT[:5], *(r for r in _CURRENT if r.driver.startswith("zarrs-")), *_S3[:2])
)


def select(table: str, only: str = "") -> list[Configuration]:
    """The rows of a table whose names match the glob ``only``. Raises CopytraceError when there are none."""
    rows = [row for row in (*_CURRENT, *_LATEST, *_LEGACY, *_S3) if row.table == table]
    if not rows:
        raise CopytraceError(f"table {table!r} is not known: choose one of {', '.join(TABLES)}")
    found = [row for row in rows if not only or fnmatch.fnmatchcase(row.name, only)]
    if not found:
        raise CopytraceError(
            f"--only {only!r} matches no row of {table}: there are {', '.join(row.name for row in rows)}"
        )
    return found
