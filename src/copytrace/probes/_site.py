"""How a library says which of its callables move data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FunctionType

    from copytrace.model import SiteInfo

COPIES = frozenset({"copy", "join", "gather", "convert", "scatter"})
"""Kinds of sites that make one copy and nothing else: what they call need not be recorded."""

KINDS = frozenset(
    {"operation", "request", "context", "copy", "join", "gather", "convert", "encode", "decode", "scatter"}
)


class Call:
    """The arguments of one call at a site. Valid until the original is called; do not keep it."""

    __slots__ = ("_names", "args", "kwargs")

    def __init__(self, names: Mapping[str, int], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._names = names
        self.args = args
        self.kwargs = kwargs

    @property
    def instance(self) -> Any:
        """``self`` or ``cls`` of a method."""
        return self.args[0]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument for parameter ``name``, or ``default`` when it was not given."""
        index = self._names.get(name)
        if index is not None and index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)


type Argument = str | int | Callable[[Call], Any]
"""Which object to look at: a parameter by name or position (``self`` is 0), or a function that finds it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Site:
    """A callable whose calls are recorded.

    ``target`` is ``"package.module:Class.method"`` or several of these, of which the first that exists is taken; in a
    :class:`Family` it is the name of a method. ``kind`` is ``operation`` (moves an array region), ``request`` (a store
    is asked for or given bytes), ``context`` (names who called), or the kind of copy it makes: ``copy``, ``join``,
    ``gather``, ``convert``, ``encode``, ``decode`` or ``scatter``. ``direction`` is ``read``, ``write`` or empty.

    ``inputs`` are read from, ``destinations`` are written to and exist before the call, ``output`` says that the return
    value is what came out. ``describe`` returns what is to be known of the call (``api``, ``store``, ``codecs``,
    ``key``, ...; JSON values, tuples for lists), or the index of such a description in the recorder, and ``payload``
    the bytes of the region that it moves. They must be quick, and nothing that they call is recorded. ``versions`` are
    the library's versions that have it, such as ``">=3.1,<3.4"``: elsewhere its absence is not a fault. ``returns`` are
    sites on the class of what is returned, for classes that cannot be got at otherwise; their targets are names of
    methods, and they are attached when the first is returned. ``unless(args, kwargs)`` is true of calls that need not
    be recorded, such as those that return a view; it must not raise. ``instead(original)`` is what stands in for the
    callable while a session is open, where that is to be no record of calls.
    """

    target: str | tuple[str, ...]
    kind: str
    name: str = ""
    direction: str = ""
    primitive: str = ""
    inputs: tuple[Argument, ...] = ()
    destinations: tuple[Argument, ...] = ()
    output: bool = False
    describe: Callable[[Call], Mapping[str, Any] | int | None] | None = None
    payload: Callable[[Call], int] | None = None
    versions: str = ""
    returns: tuple[Site, ...] = ()
    unless: Callable[[tuple[Any, ...], Mapping[str, Any]], bool] | None = None
    instead: Callable[[Any], FunctionType] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Site {self.target!r}: kind {self.kind!r} is not one of {', '.join(sorted(KINDS))}")
        if self.direction not in ("", "read", "write"):
            raise ValueError(f"Site {self.target!r}: direction {self.direction!r} is neither 'read', 'write' nor empty")

    @property
    def targets(self) -> tuple[str, ...]:
        """``target`` as a tuple."""
        return (self.target,) if isinstance(self.target, str) else self.target


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A base class all of whose subclasses are probed, those that are defined during a session too.

    Each class has a site for every name in ``methods`` that it defines itself. ``adapt(cls, site)`` may return another
    site for a class, or None for none. ``more`` returns classes that belong to the family without being subclasses.
    """

    base: str
    methods: tuple[Site, ...]
    adapt: Callable[[type, Site], Site | None] | None = None
    more: Callable[[], Iterable[type]] | None = None


class Switch:
    """Something that is switched on for a session and is no patch. ``attach`` returns why it cannot be, or an empty
    string.
    """

    info: SiteInfo

    def attach(self) -> str:
        raise NotImplementedError

    def detach(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The sites of one library.

    ``library`` is the distribution's name and ``module`` its top-level module, the same when not given. ``versions``
    are those that it is for, such as ``"<3"``: where another probe of the library is for the installed one, it is left
    out. A library ships its own through an entry point of the group ``copytrace.probes`` that names a ``Probe``.
    """

    name: str
    library: str
    module: str = ""
    versions: str = ""
    sites: tuple[Site, ...] = ()
    families: tuple[Family, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def package(self) -> str:
        """The top-level module whose import makes the library usable."""
        return self.module or self.library

    def owns(self, module: str) -> bool:
        """Whether ``module`` is part of the library."""
        return module.partition(".")[0] == self.package.partition(".")[0]
