"""Attaching the probes for a session, and taking them off again."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
import threading
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from copytrace.model import ProbeStatus, SiteInfo
from copytrace.probes._calls import stand_in
from copytrace.probes._imports import ImportWatch, is_initializing
from copytrace.probes._looks import plan_of
from copytrace.probes._patch import Patch, PatchError, find, is_compiled, take_back
from copytrace.probes._site import Family, Probe, Site
from copytrace.recorder import recorder, thread_state
from copytrace.versions import covers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.machinery import ModuleSpec
    from types import FunctionType


_GROUP = "copytrace.probes"


@dataclass(slots=True)
class _Attached:
    """How one probe fares. ``waiting`` are sites and families whose module is not imported yet; ``rows`` are (name,
    status, reason).
    """

    probe: Probe
    waiting: list[Site | Family]
    rows: dict[str, tuple[str, str]] = field(default_factory=dict)
    absent: list[Site] = field(default_factory=list)


def _nothing() -> None:
    pass


class Attachment:
    """Probes attached to the libraries that are imported, and waiting for those that are not. :meth:`detach` puts
    everything back.
    """

    def __init__(self, probes: Iterable[Probe], broken: tuple[ProbeStatus, ...] = ()) -> None:
        self._broken = broken
        self._imported_before = frozenset(sys.modules)
        self.changed: Callable[[], None] = _nothing
        """Called when a library was imported and its probe attached."""
        self._lock = threading.RLock()
        self._patches: dict[tuple[int, str], Patch] = {}
        self._attached = [_Attached(probe, [*probe.families, *probe.sites]) for probe in probes]
        self._watch = ImportWatch(set(), self._imported)
        with self._quietly():
            for attached in self._attached:
                self._try(attached)
                for switch in attached.probe.switches:
                    recorder.site(switch.info)
                    reason = switch.attach()
                    attached.rows[switch.info.name] = ("failed", reason) if reason else ("attached", "")
        self._watch.start()

    def detach(self) -> None:
        """Put back the identical originals and stop waiting for imports. May be called again."""
        with self._quietly():
            self._watch.stop()
            for attached in self._attached:
                for switch in attached.probe.switches:
                    switch.detach()
            for patch in reversed(self._patches.values()):
                patch.remove()
            take_back(self._patches.values(), sys.modules.keys() - self._imported_before)
            self._patches = {}

    def after_fork(self) -> None:
        """In a forked child, which goes on with what is attached: a thread that held the lock is not there."""
        self._lock = threading.RLock()

    def statuses(self) -> tuple[ProbeStatus, ...]:
        """How each probe fares now."""
        with self._quietly():
            return (*(_status(attached) for attached in self._attached), *self._broken)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        state = thread_state()
        before, state.busy = state.busy, True
        try:
            with self._lock:
                yield
        finally:
            state.busy = before

    def _imported(self, name: str) -> None:
        with self._quietly():
            for attached in self._attached:
                if attached.probe.package.partition(".")[0] == name.partition(".")[0]:
                    self._try(attached, name)
            self.changed()

    def _try(self, attached: _Attached, imported: str = "") -> None:
        """Attach what of ``attached`` waits and can be attached. ``imported`` is the module that is done just now."""
        waiting, attached.waiting = attached.waiting, []
        for item in waiting:
            try:
                if isinstance(item, Family):
                    self._attach_family(attached, item, imported)
                else:
                    self._attach_site(attached, item, imported)
            except Exception as error:
                name = item.base if isinstance(item, Family) else item.name or item.targets[0]
                attached.rows[name] = ("failed", f"{type(error).__name__}: {error}")
                recorder.failed(error, name)

    def _attach_site(self, attached: _Attached, site: Site, imported: str) -> None:
        loaded = True
        for target in site.targets:
            module, _, path = target.partition(":")
            if module not in sys.modules:
                loaded = False
                self._watch.names |= {module, module.partition(".")[0]}
            elif (found := find(sys.modules[module], path)) is not None:
                self._patch(attached, *found, site if site.name else _named(site, f"{_public(module)}.{path}"))
                return
            elif module != imported and is_initializing(sys.modules[module]):
                loaded = False
        if loaded:
            attached.absent.append(site)
        else:
            attached.waiting.append(site)

    def _attach_family(self, attached: _Attached, family: Family, imported: str) -> None:
        module, _, path = family.base.partition(":")
        if module not in sys.modules:
            self._watch.names |= {module, module.partition(".")[0]}
            attached.waiting.append(family)
            return
        found = find(sys.modules[module], path)
        base = vars(found[0]).get(found[1]) if found else None
        if not isinstance(base, type):
            if module != imported and is_initializing(sys.modules[module]):
                attached.waiting.append(family)
                return
            reason = f"{attached.probe.library} {_version(attached.probe.library)} has no {family.base}"
            attached.rows[f"{_public(module)}.{path}"] = ("missing", reason)
            return

        def attach(kind: type) -> None:
            with self._quietly():
                try:
                    self._attach_class(attached, family, kind)
                except Exception as error:
                    recorder.failed(error, f"probe {attached.probe.name}")

        for kind in [base, *_subclasses(base), *(family.more() if family.more else ())]:
            self._attach_class(attached, family, kind)
        self._add(Patch.of_subclassing(base, attach))

    def _attach_class(self, attached: _Attached, family: Family, kind: type) -> None:
        adapt = _adapted_once if attached.probe.owns(kind.__module__) else _adapted
        for method in family.methods:
            attribute = method.targets[0]
            if attribute in vars(kind) and not getattr(vars(kind)[attribute], "__isabstractmethod__", False):
                site = adapt(family, kind, method)
                if site is not None:
                    self._patch(attached, kind, attribute, site)

    def _patch(self, attached: _Attached, owner: Any, attribute: str, site: Site) -> None:
        inherited = isinstance(owner, type) and attribute not in vars(owner)
        if (id(owner), attribute) in self._patches or (
            inherited and any(p.serves(owner, attribute) for p in self._patches.values())
        ):
            attached.rows.setdefault(site.name, ("attached", ""))
            return
        module = owner.__module__ if isinstance(owner, type) else owner.__name__
        library = attached.probe.library if attached.probe.owns(module) else module.partition(".")[0]
        info = SiteInfo(site.name, library, site.kind, site.direction, site.primitive)
        try:
            self._add(
                Patch.of_callable(owner, attribute, lambda original: self._stand_in(attached, site, info, original))
            )
        except PatchError as error:
            attached.rows[site.name] = ("failed", str(error))
        else:
            attached.rows[site.name] = ("attached", "")

    def _stand_in(self, attached: _Attached, site: Site, info: SiteInfo, original: Any) -> FunctionType:
        if site.instead is not None:
            return site.instead(original)
        for returned in site.returns:
            attached.rows.setdefault(returned.name, ("waiting", f"{site.name} has returned nothing yet"))

        def learn(kind: type) -> None:
            with self._quietly():
                for returned in site.returns:
                    if _defines(kind, returned.targets[0]):
                        self._patch(attached, kind, returned.targets[0], returned)

        stays = is_compiled(original) or attached.probe.owns(getattr(original, "__module__", None) or "")
        if stays and not site.returns:
            return _stand_in_once(site, info, original)
        return stand_in(plan_of(site, recorder.site(info), original, learn), original, site.unless)

    def _add(self, patch: Patch) -> None:
        patch.install()
        self._patches[id(patch.owner), patch.attribute] = patch


def _adapted(family: Family, kind: type, method: Site) -> Site | None:
    site = family.adapt(kind, method) if family.adapt else method
    if site is None or site.name:
        return site
    return replace(site, name=f"{_public(kind.__module__)}.{kind.__qualname__}.{method.targets[0]}")


@lru_cache(maxsize=1024)
def _named(site: Site, name: str) -> Site:
    return replace(site, name=name)


_adapted_once = lru_cache(maxsize=1024)(_adapted)
"""For the classes of libraries, which stay: each session has the same sites."""


@lru_cache(maxsize=1024)
def _stand_in_once(site: Site, info: SiteInfo, original: Any) -> FunctionType:
    """For the functions of libraries, which stay: each session has the same stand-ins."""
    return stand_in(plan_of(site, recorder.site(info), original, _learn_nothing), original, site.unless)


def _learn_nothing(kind: type) -> None:
    del kind


def attach_all(*, imports: bool = False) -> Attachment:
    """Attach every probe that is not switched off by ``COPYTRACE_DISABLE_PROBES``; with ``imports`` the libraries are
    imported first.

    A probe that a library ships takes the place of ours of the same name. Raises nothing: what cannot be attached is in
    :meth:`Attachment.statuses`.
    """
    disabled = {name.strip() for name in os.environ.get("COPYTRACE_DISABLE_PROBES", "").split(",")}
    shipped, broken = _shipped()
    probes = {probe.name: probe for probe in (*_builtin(), *shipped) if probe.name not in disabled}
    served = {probe.library for probe in probes.values() if _concerns(probe)}
    probes = {name: probe for name, probe in probes.items() if _concerns(probe) or probe.library not in served}
    if imports:
        for probe in probes.values():
            with suppress(Exception):
                importlib.import_module(probe.package)
    return Attachment(probes.values(), broken)


def targets_of(name: str) -> dict[str, tuple[str, ...]]:
    """Of the probe ``name``: the name of a site or family that is not there -> where it is looked for."""
    found: dict[str, tuple[str, ...]] = {}
    for probe in (*_builtin(), *_shipped()[0]):
        if probe.name == name:
            found |= {each: site.targets for site in probe.sites for each in (site.name, site.targets[0])}
            for family in probe.families:
                module, _, path = family.base.partition(":")
                found |= dict.fromkeys((family.base, f"{_public(module)}.{path}"), (family.base,))
    return found


def _concerns(probe: Probe) -> bool:
    """Whether a probe is for the installed version of its library."""
    return not probe.versions or covers(probe.versions, _version(probe.library))


@cache
def _builtin() -> tuple[Probe, ...]:
    from copytrace.probes import (
        cloudpickle,
        cramjam,
        engines,
        fsspec,
        h5py,
        icechunk,
        numcodecs,
        obstore,
        python,
        s3fs,
        tensorstore,
        xarray,
        zarr,
        zarr2,
        zarrista,
        zarrs,
    )

    return (
        *(python.PROBE, zarr.PROBE, zarr2.PROBE, zarrs.PROBE, numcodecs.PROBE, obstore.PROBE, icechunk.PROBE),
        *(zarrista.PROBE, fsspec.PROBE, s3fs.S3FS, s3fs.AIOBOTOCORE, s3fs.AIOHTTP),
        *(xarray.XARRAY, xarray.DASK, h5py.PROBE, tensorstore.PROBE, cramjam.PROBE),
        *(engines.DISTRIBUTED, engines.CUBED, cloudpickle.PROBE),
    )


@cache
def _shipped() -> tuple[tuple[Probe, ...], tuple[ProbeStatus, ...]]:
    """The probes that installed libraries ship, and what is to be said of those that cannot be loaded."""
    found, broken = [], []
    for entry in importlib.metadata.entry_points(group=_GROUP):
        try:
            probe = entry.load()
            if not isinstance(probe, Probe):
                raise TypeError(f"{entry.value} is a {type(probe).__name__}, not a copytrace.Probe")
            found.append(probe)
        except Exception as error:
            library = entry.dist.name if entry.dist else ""
            broken.append(
                ProbeStatus(entry.name, library, _version(library), "failed", f"{type(error).__name__}: {error}")
            )
    return tuple(found), tuple(broken)


def _subclasses(base: type) -> list[type]:
    found: list[type] = []
    derived: list[type] = type.__subclasses__(base)
    for kind in derived:
        found += [kind, *_subclasses(kind)]
    return list(dict.fromkeys(found))


def _public(module: str) -> str:
    """A module's name without its private parts."""
    return ".".join(part for part in module.split(".") if not part.startswith("_") or part == "__main__")


def _defines(kind: type, attribute: str) -> bool:
    return any(attribute in vars(base) for base in kind.__mro__[:-1])


def _status(attached: _Attached) -> ProbeStatus:
    probe = attached.probe
    version = _version(probe.library)
    rows = dict(attached.rows)
    imported = probe.package in sys.modules
    for site in attached.absent:
        if covers(site.versions, version):
            rows[site.name or site.targets[0]] = (
                "missing",
                f"{probe.library} {version} has no {' or '.join(site.targets)}",
            )
    for item in attached.waiting:
        targets = (item.base,) if isinstance(item, Family) else item.targets
        modules = [target.partition(":")[0] for target in targets]
        if imported and not any(_exists(module) for module in modules):
            if isinstance(item, Family) or covers(item.versions, version):
                rows[targets[0]] = ("missing", f"{probe.library} {version} has no {' or '.join(modules)}")
        else:
            rows[targets[0]] = ("waiting", f"{' or '.join(modules)} is not imported")
    faults = {status for status, _ in rows.values()} & {"missing", "failed"}
    if not _concerns(probe):
        status, reason = "unsupported", f"{probe.library} {version} is not {probe.versions}"
    elif not version and not imported:
        status, reason = "not-installed", f"{probe.library} is not installed"
    elif not imported:
        status, reason = "not-imported", f"{probe.package} is not imported"
    elif faults:
        status, reason = "partial", "; ".join(reason for status, reason in rows.values() if status in faults)
    else:
        status, reason = "attached", ""
    sites = tuple({"name": name, "status": status, "reason": reason} for name, (status, reason) in rows.items())
    return ProbeStatus(probe.name, probe.library, version, status, reason, sites)


@cache
def _exists(module: str) -> bool:
    """Whether it can be imported, without importing the packages that it lies in."""
    try:
        return module in sys.modules or _spec(module) is not None
    except (ImportError, ValueError):
        return False


def _spec(module: str) -> ModuleSpec | None:
    parent = module.rpartition(".")[0]
    if module in sys.modules or not parent:
        return importlib.util.find_spec(module)
    package = _spec(parent)
    places = package.submodule_search_locations if package else None
    return PathFinder.find_spec(module, places) if places else None


@cache
def _version(library: str) -> str:
    if library == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
