"""s3fs and what it stands on, aiobotocore and aiohttp: who called whom on the way to the socket.

The methods of its file system and files are those of :mod:`copytrace.probes.fsspec`. The copies on this way are made by
methods of C types and by C code; these sites tell the operation that they belong to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from copytrace.probes._site import Call, Probe, Site

if TYPE_CHECKING:
    from collections.abc import Mapping


def _method(call: Call) -> Mapping[str, Any]:
    method = call.args[1] if len(call.args) > 1 else ""
    return {"call": method if isinstance(method, str) else ""}


S3FS = Probe(
    name="s3fs",
    library="s3fs",
    sites=(
        Site(target="s3fs.core:S3FileSystem._call_s3", kind="context", describe=_method),
        Site(target="s3fs.core:S3FileSystem.set_session", kind="context"),
        Site(
            target="s3fs.core:S3FileSystem._cat_file_concurrent",
            kind="context",
            direction="read",
            output=True,
            versions=">=2026.9",
        ),
    ),
)

AIOBOTOCORE = Probe(
    name="aiobotocore",
    library="aiobotocore",
    sites=(
        Site(target="aiobotocore.client:AioBaseClient._make_api_call", kind="context", describe=_method),
        Site(target="aiobotocore.httpsession:AIOHTTPSession.send", kind="context"),
    ),
)

AIOHTTP = Probe(
    name="aiohttp",
    library="aiohttp",
    sites=(
        Site(target="aiohttp.client:ClientSession._request", kind="context"),
        Site(target="aiohttp.streams:StreamReader.read", kind="context", direction="read", output=True),
        Site(target="aiohttp.client_reqrep:ClientResponse.read", kind="context", direction="read", output=True),
    ),
)
