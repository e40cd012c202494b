"""Frozen data: what the recorders wrote (spans, allocations, transfers) and what the report says of it.

All sizes and addresses are bytes. Times are nanoseconds of ``time.perf_counter_ns`` unless a name says otherwise.

The order of events of a session is one count, the *sequence*. The recorder takes a number from it at each **mark**
(the innermost open span of a thread changed); the native hook takes a number from it for each transfer. A mark is also
made for memray (see :data:`MARK_ADDRESS`), so that its stream, which has an order but no clock, can be laid against the
same count.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MARK_ADDRESS = 8
"""The n-th mark of a recording unmaps ``1 + n % MARK_COUNT`` bytes here, which the kernel refuses and memray notes,
without a stack.
"""
MARK_COUNT = 1 << 20
MARK_BASE = 11003
"""Where there is no extension it allocates ``MARK_BASE + n % MARK_PERIOD`` bytes and frees them at once."""
MARK_PERIOD = 1024

MUTED = 1 << 63
"""In the id of a span that is left out by sampling, as is what it calls; no such span is in a trace."""

SPAN_DTYPE = np.dtype(
    [
        ("id", "<u8"),  # from 1; 0 is "no span"
        ("parent", "<u8"),  # span that was current in the caller's context, 0 for none
        ("site", "<u4"),  # index into Trace.sites
        ("attributes", "<u4"),  # index into Trace.attributes
        ("thread", "<u8"),  # threading.get_ident() at entry
        ("enter", "<u8"),  # sequence of its entry mark
        ("exit", "<u8"),  # sequence of its exit mark
        ("started", "<u8"),  # ns
        ("ended", "<u8"),  # ns
        ("payload", "<u8"),  # bytes of the region as the caller sees it; 0 for anything but an operation
        ("error", "u1"),  # 1 when it ended by an exception
    ]
)
"""One row a closed span; in a trace they are in the order of their ids."""

SEEN_DTYPE = np.dtype(
    [
        ("span", "<u8"),
        ("role", "u1"),  # 0 input, 1 output, 2 destination that existed before (out=, the target of a scatter)
        ("contiguous", "u1"),  # 1 when its elements are adjacent in memory
        ("address", "<u8"),  # lowest byte
        ("extent", "<u8"),  # from the lowest byte to one past the highest
        ("nbytes", "<u8"),  # elements x itemsize
    ]
)
"""One row a buffer that a probe saw go into or come out of a span."""

INPUT, OUTPUT, DESTINATION = 0, 1, 2

MARK_DTYPE = np.dtype(
    [
        ("sequence", "<u8"),
        ("thread", "<u8"),
        ("span", "<u8"),  # the span that is innermost on that thread from now on, 0 for none
    ]
)

TRANSFER_DTYPE = np.dtype(
    [
        ("sequence", "<u8"),
        ("thread", "<u8"),
        ("kind", "u1"),  # index into TRANSFER_KINDS
        ("source", "<u8"),  # address; for a fetch the file descriptor
        ("destination", "<u8"),  # address; for a flush the file descriptor
        ("nbytes", "<u8"),
        ("caller", "<u4"),  # index into Transfers.callers
        ("count", "<u4"),  # 1, or how many small moves this row sums up (then both addresses are 0)
    ]
)

TRANSFER_KINDS = ("copy", "fetch", "flush")
"""``copy`` is memory to memory (memcpy, memmove and their kin), ``fetch`` kernel to memory, ``flush`` memory to kernel.
"""

COPY_KINDS = frozenset({"copy", "join", "gather", "convert", "encode", "decode", "scatter"})
IO_KINDS = frozenset({"fetch", "flush"})


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack.

    ``function`` is qualified (``zarr.core.buffer.cpu.NDBuffer.__setitem__``, ``object_store::local::read_range``).
    ``file`` is relative to site-packages, the standard library or the working directory, or a library's base name.
    ``layer`` is empty for what only carries out an order: CPython, the standard library, numpy, libc, and frames
    whose library is not known.
    """

    function: str
    file: str
    line: int
    native: bool = False
    layer: str = ""


@dataclass(frozen=True, slots=True)
class SiteInfo:
    """A probed site as the trace remembers it.

    ``kind`` is one of :data:`COPY_KINDS`, ``operation`` (moves an array region), ``request`` (a store is asked for or
    given bytes), or ``context`` (names who called).
    """

    name: str
    library: str
    kind: str
    direction: str = ""
    primitive: str = ""
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True)
class Transfers:
    """What the native hook saw, in order of ``rows["sequence"]``."""

    rows: NDArray[Any]
    callers: tuple[Frame, ...] = ()
    """Function (demangled) and library (base name) of each return address."""
    small: tuple[tuple[int, int, int], ...] = ()
    """(index into callers, moves, bytes) of moves below the threshold, summed."""
    lost: int = 0
    recorded: bool = True
    """False when there was no hook: then moves are inferred."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Allocations:
    """What memray saw, one row an allocation, in order.

    ``born`` and ``died`` are positions in memray's stream over all segments, ``enter`` and ``leave`` the sequences of
    the last mark before each; ``died`` is the stream's length for blocks that outlived the session. A realloc ends
    one row and begins another, which names it in ``previous``.
    """

    address: NDArray[np.uint64]
    size: NDArray[np.uint64]
    born: NDArray[np.uint64]
    died: NDArray[np.uint64]
    enter: NDArray[np.uint64]
    leave: NDArray[np.uint64]
    span: NDArray[np.uint64]
    """The span that was innermost on the allocating thread, 0 when that thread had none."""
    thread: NDArray[np.uint32]
    stack: NDArray[np.uint32]
    """Index into ``stacks``."""
    previous: NDArray[np.int64]
    """Row of the block that a realloc turned into this one, -1 for none."""
    moved: NDArray[np.bool_]
    """True when that realloc copied the bytes to another place."""
    stacks: tuple[tuple[Frame, ...], ...] = ()
    """Innermost frame first, Python and native frames mixed, the probes' own frames left out; empty when it was not
    resolved.
    """
    recorded: bool = True
    reason: str = ""
    records: int = 0
    """memray records read."""


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """Whether a library's probe worked. ``status``: attached | not-installed | not-imported | partial | unsupported |
    failed.
    """

    name: str
    library: str
    version: str
    status: str
    reason: str = ""
    sites: tuple[Mapping[str, str], ...] = ()
    """One mapping a site: ``name``, ``status`` (attached | missing | waiting | failed), ``reason``."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a traced run.

    ``kind``: main | forked | started (another program, as multiprocessing's spawn starts one) | worker (of a cluster).
    ``status``: complete | cut-off (it was killed, crashed or became another program) | running (it had not ended when
    the session closed) | untraced. ``reason`` says why it is not complete.
    """

    name: str
    kind: str = "main"
    status: str = "complete"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work that an engine ran in a process, as the engine names it.

    ``attempt`` counts from 1. ``projected_bytes`` is what the engine expected it to need, ``peak_bytes`` is the memory
    that it allocated and held at once; None where that is not known.
    """

    key: str
    process: str = ""
    attempt: int = 1
    error: bool = False
    operations: int = 0
    payload_bytes: int = 0
    copied_bytes: int = 0
    peak_bytes: int | None = None
    projected_bytes: int | None = None
    paths: tuple[str, ...] = ()
    """Labels of the paths of its operations."""


@dataclass(frozen=True, slots=True)
class Trace:
    """All that a session recorded, resolved: it can be read on a machine that has none of the libraries."""

    spans: NDArray[Any]
    seen: NDArray[Any]
    marks: NDArray[Any]
    sites: tuple[SiteInfo, ...]
    attributes: tuple[Mapping[str, Any], ...]
    """Distinct descriptions of spans: ``api``, ``store``, ``codecs``, ``key``, ``label``."""
    allocations: Allocations
    transfers: Transfers
    environment: Mapping[str, Any]
    probes: tuple[ProbeStatus, ...] = ()
    notes: tuple[str, ...] = ()
    label: str = ""
    native: bool = True
    min_bytes: int = 0
    complete: bool = True
    """False when the trace was recovered from a run that did not end."""
    process: Process = Process("main")
    """Whose trace it is."""
    continued: bool = False
    """True for a stretch of a long trace: it goes on where the part before it ended, in the same process."""
    parts: Sequence[Trace] = ()
    """The stretches that continue this one, and then the traces of the other processes of the run, in the order in
    which these began, each with the stretches that continue it. A part has no parts. They may be in a file, from which
    each is read when it is asked for.
    """
    untraced: tuple[Process, ...] = ()
    """Processes of the run of which there is no trace."""


# --- the report


@dataclass(frozen=True, slots=True)
class Share:
    """What one process has of a path."""

    process: str
    operations: int
    payload_bytes: int
    copied_bytes: int
    extra_at_peak_bytes: int
    extra_at_peak: float | None


@dataclass(frozen=True, slots=True)
class SiteRef:
    """Where a copy is made. ``url`` is a permalink at the installed version's tag, or empty."""

    function: str
    file: str = ""
    line: int = 0
    url: str = ""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that holds payload on a path (or a temporary), allocations of one site taken together.

    ``role``: source | result | extra | temporary | io. ``bytes`` were allocated in all, ``peak_bytes`` were alive at
    the path's high-water mark.
    """

    id: str
    role: str
    label: str
    layer: str
    site: SiteRef
    bytes: int
    peak_bytes: int
    pieces: int = 1
    required: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """An edge of the flow graph: bytes moved from ``source`` to ``destination`` (buffer ids, None when not found).

    ``kind``: copy | join | gather | convert | encode | decode | scatter | fetch | flush. ``ratio`` is ``bytes`` over
    the path's payload. ``evidence``: transfer | pointer | stack | call | native | inferred. ``held_ms`` is how long
    the destination lived, None when unknown.
    """

    kind: str
    source: str | None
    destination: str | None
    layer: str
    project: str
    site: SiteRef
    primitive: str
    called_from: tuple[SiteRef, ...]
    count: int
    bytes: int
    ratio: float | None
    at_peak_bytes: int
    held_ms: float | None
    evidence: str
    avoidable_bytes: int = 0
    required: bool = False
    """True when the layer must own these bytes (MemoryStore) and the copy is no fault."""
    remedy: str = ""
    """What is known of this copy in the installed version: fixed or reported where, and one line of advice."""
    remedy_url: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes that the extra buffers and temporaries of a path's largest operation hold, over its course.

    ``live`` has a row for each of ``layers`` and in it a figure for each of ``milliseconds``: what is alive from then
    on.
    """

    milliseconds: tuple[float, ...]
    layers: tuple[str, ...]
    live: tuple[tuple[int, ...], ...]
    payload_bytes: int
    """Of that operation."""


@dataclass(frozen=True, slots=True)
class Path:
    """All operations of one kind through the same stack: the unit of the report."""

    label: str
    direction: str
    api: str
    store: str
    codecs: tuple[str, ...]
    operations: int
    chunks: int
    errors: int
    payload_bytes: int
    copied_bytes: int
    copies: float | None
    extra_at_peak_bytes: int
    extra_at_peak: float | None
    best_achievable: int
    avoidable: float | None
    fetched_bytes: int
    flushed_bytes: int
    read_amplification: float | None
    decode_amplification: float | None
    unattributed_bytes: int
    explained: float | None
    """Share of the bytes that the native hook saw moving between the path's buffers that the steps explain; None
    without the hook.
    """
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    timeline: Timeline | None = None
    """None when allocations were not recorded."""
    processes: tuple[Share, ...] = ()
    """Of a run with several processes. Bytes, operations and chunks of the path are their sums; what it holds at peak
    is the most that one of them holds.
    """


@dataclass(frozen=True, slots=True)
class Coverage:
    """What could be seen, and what could not."""

    memray: bool
    native: bool
    transfers: bool
    lost_transfers: int
    probes: tuple[ProbeStatus, ...]
    unattributed_bytes: int
    off_path_bytes: int
    """Bytes moved in the session that led nowhere near a payload (imports, metadata, TLS)."""
    off_path_moves: int
    explained: float | None
    notes: tuple[str, ...]
    processes: tuple[Process, ...] = ()
    """Of a run with several."""


@dataclass(frozen=True, slots=True)
class LayerTotal:
    """What one layer copied: ``copies`` maps a path's label to bytes over that path's payload."""

    layer: str
    project: str
    copies: Mapping[str, float]
    bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class ReportData:
    """The report as data; :class:`copytrace.Report` adds the renderings."""

    environment: Mapping[str, Any]
    coverage: Coverage
    paths: tuple[Path, ...]
    layers: tuple[LayerTotal, ...]
    label: str = ""
    spans: int = 0
    records: int = 0
    notes: tuple[str, ...] = field(default=())
    tasks: tuple[Task, ...] = ()
    """In the order in which they began, of a run on an engine of tasks."""
