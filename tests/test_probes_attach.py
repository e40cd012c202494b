"""Attaching and detaching: what is found, what is said of what is not, and that everything is as it was afterwards."""

from __future__ import annotations

import abc
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wrapt

from copytrace.model import ProbeStatus
from copytrace.probes import Attachment, Family, Probe, Site, attach_all
from copytrace.probes._attach import _shipped, covers
from probed import calls
from spooled import recording


def of(target: str | tuple[str, ...], kind: str = "request", **options: Any) -> Probe:
    return Probe(name="probed", library="probed", sites=(Site(target=target, kind=kind, **options),))


def status(attachment: Attachment) -> ProbeStatus:
    (found,) = attachment.statuses()
    return found


def sites(attachment: Attachment) -> dict[str, str]:
    return {site["name"]: site["status"] for site in status(attachment).sites}


@pytest.fixture
def attach() -> Iterator[Callable[..., Attachment]]:
    made: list[Attachment] = []

    def make(*probes: Probe) -> Attachment:
        made.append(Attachment(probes))
        return made[-1]

    yield make
    for attachment in reversed(made):
        attachment.detach()
    assert not any(type(finder).__name__ == "ImportWatch" for finder in sys.meta_path)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Makes packages that can be imported: ``library(init, module=source)`` returns a name."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(init: str = "", **modules: str) -> str:
        name = f"copytrace_test_library_{len(made)}_{tmp_path.name}"
        made.append(name)
        package = tmp_path / name
        package.mkdir()
        for module, source in {"__init__": init, **modules}.items():
            (package / f"{module}.py").write_text(textwrap.dedent(source).replace("NAME", name))
        importlib.invalidate_caches()
        return name

    yield make
    for name in list(sys.modules):
        if name.partition(".")[0] in made:
            del sys.modules[name]


class TestSite:
    def test_kind_and_direction_are_checked(self) -> None:
        with pytest.raises(ValueError, match=r"Site 'a:b': kind 'move' is not one of context, convert, copy"):
            Site(target="a:b", kind="move")
        with pytest.raises(ValueError, match=r"Site 'a:b': direction 'up' is neither 'read', 'write' nor empty"):
            Site(target="a:b", kind="copy", direction="up")

    @pytest.mark.parametrize(
        ("specifier", "version", "inside"),
        [
            ("", "3.0.6", True),
            (">=3.1", "3.0.6", False),
            (">=3.1", "3.1.0", True),
            (">=3.1", "3.1", True),
            (">=3.0.7,<3.4", "3.3.9", True),
            (">=3.0.7, <3.4", "3.4.0", False),
            ("==3.3", "3.3.0", True),
            ("!=3.3", "3.3.0", False),
            (">3.3", "3.10.1", True),
            ("<=3.3", "3.3.0.dev5+g123", True),
            (">=3.1", "", True),
        ],
    )
    def test_versions(self, specifier: str, version: str, inside: bool) -> None:
        assert covers(specifier, version) is inside


class TestIdentity:
    PLACES = ("function", "waits", "numbers", "stream", "decorated", "natively")
    METHODS = ("method", "made", "still", "__getitem__", "__eq__")

    def test_everything_is_the_identical_object_again(self, attach: Callable[..., Attachment]) -> None:
        before = {**{n: vars(calls)[n] for n in self.PLACES}, **{n: vars(calls.Base)[n] for n in self.METHODS}}
        order = list(vars(calls.Base))
        names = [*(f"probed.calls:{n}" for n in self.PLACES), *(f"probed.calls:Base.{n}" for n in self.METHODS)]
        for _ in range(2):
            attachment = attach(
                Probe(name="p", library="probed", sites=tuple(Site(target=n, kind="copy") for n in names))
            )
            assert status(attachment).status == "attached"
            assert all(vars(calls)[n] is not before[n] for n in self.PLACES)
            assert all(vars(calls.Base)[n] is not before[n] for n in self.METHODS)
            attachment.detach()
            attachment.detach()
            assert all(vars(calls)[n] is before[n] for n in self.PLACES)
            assert all(vars(calls.Base)[n] is before[n] for n in self.METHODS)
            assert list(vars(calls.Base)) == order

    def test_inherited_method_is_patched_where_it_was_asked_for(self, tmp_path: Path) -> None:
        with recording(tmp_path, of("probed.calls:Derived.inherited")) as recorded:
            assert "inherited" in vars(calls.Derived)
            assert calls.Derived().inherited(b"1") == b"1"
            assert calls.Base().inherited(b"2") == b"2"
        assert "inherited" not in vars(calls.Derived)
        assert recorded.names == ["probed.calls.Derived.inherited"]

    def test_inherited_method_whose_original_is_patched_too_is_one_span(self, tmp_path: Path) -> None:
        both = tuple(Site(target=f"probed.calls:{kind}.inherited", kind="copy") for kind in ("Base", "Derived"))
        with recording(tmp_path, Probe(name="p", library="probed", sites=both)) as recorded:
            assert recorded.attachment is not None
            assert set(sites(recorded.attachment).values()) == {"attached"}
            calls.Derived().inherited(b"1")
        assert len(recorded.spans) == 1
        assert "inherited" not in vars(calls.Derived)

    def test_same_place_named_twice_is_one_span(self, tmp_path: Path) -> None:
        twice = (
            Site(target="probed.calls:function", kind="copy"),
            Site(target="probed.calls:function", kind="copy", name="again"),
        )
        with recording(tmp_path, Probe(name="p", library="probed", sites=twice)) as recorded:
            calls.function(b"1")
        assert recorded.names == ["probed.calls.function"]

    def test_beneath_another_tools_proxy(self, tmp_path: Path) -> None:
        original = vars(calls.Base)["method"]

        def pass_on(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        with recording(tmp_path, of("probed.calls:Base.method")) as recorded:
            proxy = wrapt.wrap_function_wrapper(calls.Base, "method", pass_on)
            assert calls.Base().method(b"1") == b"1"
        assert vars(calls.Base)["method"] is proxy
        assert proxy.__wrapped__ is original
        assert calls.Base().method(b"2") == b"2"
        wrapt.unwrap_object(calls.Base, "method", proxy)
        assert vars(calls.Base)["method"] is original
        assert len(recorded.spans) == 1

    def test_beneath_another_tools_function(self, tmp_path: Path) -> None:
        original = vars(calls)["function"]
        try:
            with recording(tmp_path, of("probed.calls:function")) as recorded:
                calls.function = other = functools.wraps(calls.function)(functools.partial(calls.function))
                calls.function(b"1")
            assert calls.function is other
            assert calls.function(b"2") == b"22"
        finally:
            calls.function = original
        assert len(recorded.spans) == 1

    @pytest.mark.parametrize("name", ["method", "made", "still"])
    def test_on_top_of_another_tools_proxy(self, tmp_path: Path, name: str) -> None:
        seen: list[Any] = []

        def pass_on(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            seen.append(instance)
            return wrapped(*args, **kwargs)

        proxy = wrapt.wrap_function_wrapper(calls.Base, name, pass_on)
        try:
            base = calls.Base()
            expected = [getattr(base, name)(b"1"), seen.pop()]
            with recording(tmp_path, of(f"probed.calls:Base.{name}", inputs=("data",))) as recorded:
                assert [getattr(base, name)(b"1"), seen.pop()] == expected
                assert getattr(base, name).__name__ == name
                if name != "method":
                    assert getattr(calls.Base, name)(b"1") == expected[0]
            assert vars(calls.Base)[name] is proxy
        finally:
            wrapt.unwrap_object(calls.Base, name, proxy)
        assert {span.name for span in recorded.spans} == {f"probed.calls.Base.{name}"}

    def test_nested_attachments_come_off_in_any_order(self) -> None:
        original = vars(calls)["function"]
        first, second = Attachment([of("probed.calls:function")]), Attachment([of("probed.calls:function")])
        second.detach()
        first.detach()
        assert vars(calls)["function"] is original


class TestStatus:
    def test_alternatives(self, attach: Callable[..., Attachment]) -> None:
        attachment = attach(of(("probed.calls:nowhere", "probed.calls:function"), name="here"))
        assert sites(attachment) == {"here": "attached"}

    def test_missing_is_said_with_library_and_version(self, attach: Callable[..., Attachment]) -> None:
        probe = Probe(name="numpy", library="numpy", sites=(Site(target="numpy:nowhere", kind="copy"),))
        found = status(attach(probe))
        assert (found.status, found.version) == ("partial", importlib.metadata.version("numpy"))
        assert found.reason == f"numpy {found.version} has no numpy:nowhere"
        assert found.sites == ({"name": "numpy:nowhere", "status": "missing", "reason": found.reason},)

    def test_missing_outside_of_its_versions_is_no_fault(self, attach: Callable[..., Attachment]) -> None:
        probe = Probe(
            name="numpy", library="numpy", sites=(Site(target="numpy:nowhere", kind="copy", versions="<1.0"),)
        )
        found = status(attach(probe))
        assert (found.status, found.sites) == ("attached", ())

    def test_module_that_does_not_exist_is_missing(self, attach: Callable[..., Attachment]) -> None:
        probe = Probe(name="numpy", library="numpy", sites=(Site(target="numpy.nothing:nowhere", kind="copy"),))
        assert status(attach(probe)).status == "partial"

    def test_not_installed(self, attach: Callable[..., Attachment]) -> None:
        probe = Probe(name="none", library="no-such-distribution", sites=(Site(target="no_such:thing", kind="copy"),))
        found = status(attach(probe))
        assert (found.status, found.version, found.reason) == (
            "not-installed",
            "",
            "no-such-distribution is not installed",
        )

    @pytest.mark.parametrize("name", ["shape", "constant", "Base"])
    def test_what_is_no_function_fails(self, attach: Callable[..., Attachment], name: str) -> None:
        target = f"probed.calls:{name}" if name == "Base" else f"probed.calls:Base.{name}"
        before = vars(calls.Base).get(name, calls.Base)
        found = status(attach(of(target)))
        assert found.sites[0]["status"] == "failed"
        assert "not a function" in found.sites[0]["reason"]
        assert vars(calls.Base).get(name, calls.Base) is before

    def test_immutable_type_fails(self, attach: Callable[..., Attachment]) -> None:
        probe = Probe(name="io", library="python", module="io", sites=(Site(target="io:BytesIO.read", kind="copy"),))
        found = status(attach(probe))
        assert "cannot be set" in found.sites[0]["reason"]

    def test_statuses_of_all(self) -> None:
        attachment = attach_all()
        attachment.detach()
        names = [found.name for found in attachment.statuses()]
        assert {"python", "zarr", "numcodecs", "obstore"} <= set(names)
        assert len(names) == len(set(names))

    def test_disabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COPYTRACE_DISABLE_PROBES", "numcodecs, obstore")
        attachment = attach_all()
        attachment.detach()
        names = {found.name for found in attachment.statuses()}
        assert {"python", "zarr"} <= names
        assert not {"numcodecs", "obstore"} & names


class TestShippedProbes:
    @pytest.fixture
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
        monkeypatch.syspath_prepend(tmp_path)
        _shipped.cache_clear()

        def install(body: str) -> None:
            (tmp_path / "shipping.py").write_text(textwrap.dedent(body))
            info = tmp_path / "shipping-1.2.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipping\nVersion: 1.2\n")
            (info / "entry_points.txt").write_text("[copytrace.probes]\nshipping = shipping:PROBE\n")
            importlib.invalidate_caches()

        yield install
        _shipped.cache_clear()
        sys.modules.pop("shipping", None)

    def test_are_attached(self, installed: Callable[[str], None]) -> None:
        installed(
            """
            from copytrace.probes import Probe, Site
            def work(data): return data
            PROBE = Probe(name="shipping", library="shipping", sites=(Site(target="shipping:work", kind="copy"),))
            """
        )
        attachment = attach_all()
        attachment.detach()
        found = attachment.statuses()[-1]
        assert (found.name, found.version, found.status) == ("shipping", "1.2", "attached")

    def test_take_the_place_of_ours(self, installed: Callable[[str], None]) -> None:
        installed(
            """
            from copytrace.probes import Probe
            PROBE = Probe(name="numcodecs", library="shipping")
            """
        )
        attachment = attach_all()
        attachment.detach()
        assert [found.library for found in attachment.statuses() if found.name == "numcodecs"] == ["shipping"]

    @pytest.mark.parametrize(
        ("body", "reason"),
        [
            ("PROBE = 3", "TypeError: shipping:PROBE is a int, not a copytrace.Probe"),
            ("raise RuntimeError('broken')", "RuntimeError: broken"),
            ("", "AttributeError"),
        ],
    )
    def test_that_cannot_be_loaded_are_said(self, installed: Callable[[str], None], body: str, reason: str) -> None:
        installed(body)
        attachment = attach_all()
        attachment.detach()
        found = attachment.statuses()[-1]
        assert (found.name, found.library, found.status) == ("shipping", "shipping", "failed")
        assert found.reason.startswith(reason)


class TestImports:
    SOURCE = """
        class Store:
            def get(self, data): return data
        def work(data): return data
    """

    def probe(self, name: str, *targets: str, **options: Any) -> Probe:
        return Probe(
            name=name,
            library=name,
            sites=tuple(Site(target=f"{name}{t}", kind="copy", **options) for t in targets),
            module=name,
        )

    def test_library_imported_later(self, tmp_path: Path, library: Callable[..., str]) -> None:
        name = library("from NAME.inner import work as imported_by_name", inner=self.SOURCE)
        with recording(tmp_path / "s", self.probe(name, ".inner:work", ".inner:Store.get")) as recorded:
            assert recorded.attachment is not None
            assert set(sites(recorded.attachment).values()) == {"waiting"}
            assert status(recorded.attachment).status == "not-installed"
            module = importlib.import_module(name)
            assert set(sites(recorded.attachment).values()) == {"attached"}
            module.inner.work(b"1")
            module.inner.Store().get(b"2")
        assert recorded.names == [f"{name}.inner.work", f"{name}.inner.Store.get"]
        assert not hasattr(module.inner.work, "__wrapped__")
        # The package took the original, not what was to stand for it for a while.
        assert module.imported_by_name is module.inner.work

    def test_submodule_imported_later(self, tmp_path: Path, library: Callable[..., str]) -> None:
        name = library("", late=self.SOURCE)
        importlib.import_module(name)
        with recording(tmp_path / "s", self.probe(name, ".late:work")) as recorded:
            module = importlib.import_module(f"{name}.late")
            module.work(b"1")
        assert recorded.names == [f"{name}.late.work"]
        assert not hasattr(module.work, "__wrapped__")

    def test_module_that_imports_another_before_it_defines_its_functions(
        self, tmp_path: Path, library: Callable[..., str]
    ) -> None:
        """As fsspec.asyn and aiobotocore.client do, of packages that are imported before."""
        name = library("", late=f"from NAME import other\n{textwrap.dedent(self.SOURCE)}", other=self.SOURCE)
        importlib.import_module(name)
        family = Family(base=f"{name}.late:Store", methods=(Site(target="get", kind="request"),))
        targets = (f"{name}.late:work", f"{name}.other:work", f"{name}.late:gone")
        probe = Probe(
            name=name,
            library=name,
            families=(family,),
            sites=tuple(Site(target=target, kind="copy") for target in targets),
        )
        with recording(tmp_path / "s", probe) as recorded:
            assert recorded.attachment is not None
            module = importlib.import_module(f"{name}.late")
            assert sites(recorded.attachment) == {
                f"{name}.other.work": "attached",
                f"{name}.late.work": "attached",
                f"{name}.late.Store.get": "attached",
                f"{name}.late:gone": "missing",
            }
            module.work(b"1")
            module.Store().get(b"2")
        assert recorded.names == [f"{name}.late.work", f"{name}.late.Store.get"]

    def test_saying_what_waits_imports_nothing(
        self, tmp_path: Path, library: Callable[..., str], attach: Callable[..., Attachment]
    ) -> None:
        """As ``import dask`` in a session, which is not the time to import ``dask.array``."""
        name = library("", plain="")
        (tmp_path / name / "inner").mkdir()
        (tmp_path / name / "inner" / "__init__.py").write_text("raise ImportError('too early')")
        (tmp_path / name / "inner" / "core.py").write_text("")
        attachment = attach(self.probe(name, ".inner.core:work", ".inner.gone:work", ".plain.json:dumps"))
        importlib.import_module(name)
        assert sites(attachment) == {
            f"{name}.inner.core:work": "waiting",
            f"{name}.inner.gone:work": "missing",
            f"{name}.plain.json:dumps": "missing",
        }
        assert [module for module in sys.modules if module.startswith(name)] == [name]

    def test_library_imported_after_the_session_is_left_alone(
        self, tmp_path: Path, library: Callable[..., str]
    ) -> None:
        name = library(self.SOURCE)
        finders = list(sys.meta_path)
        with recording(tmp_path / "s", self.probe(name, ":work")):
            assert sys.meta_path != finders
        assert sys.meta_path == finders
        module = importlib.import_module(name)
        assert not hasattr(module.work, "__wrapped__")

    def test_session_that_ends_during_an_import(
        self, library: Callable[..., str], attach: Callable[..., Attachment]
    ) -> None:
        name = library(self.SOURCE + "\n        import probed\n        probed.attachment.detach()\n")
        import probed

        probed.attachment = attach(self.probe(name, ":work"))  # type: ignore[attr-defined]
        module = importlib.import_module(name)
        del probed.attachment  # type: ignore[attr-defined]
        assert not hasattr(module.work, "__wrapped__")

    def test_import_that_raises_raises_as_before(
        self, library: Callable[..., str], attach: Callable[..., Attachment]
    ) -> None:
        name = library(self.SOURCE + "\n        raise OSError('no disk')\n")
        attachment = attach(self.probe(name, ":work"))
        with pytest.raises(OSError, match="no disk") as caught:
            importlib.import_module(name)
        assert name not in sys.modules
        assert set(sites(attachment).values()) == {"waiting"}
        assert caught.value.__cause__ is None

    def test_spec_found_in_a_session_and_executed_after_it(
        self, library: Callable[..., str], attach: Callable[..., Attachment]
    ) -> None:
        name = library(self.SOURCE)
        attachment = attach(self.probe(name, ":work"))
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        attachment.detach()
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert not hasattr(module.work, "__wrapped__")
        assert "exec_module" not in vars(spec.loader)

    def test_import_that_raises_and_works_the_second_time(
        self, library: Callable[..., str], attach: Callable[..., Attachment]
    ) -> None:
        name = library("import probed\nif probed.broken: raise OSError('broken')\ndef work(data): return data\n")
        import probed

        attachment = attach(self.probe(name, ":work"))
        probed.broken = True  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="broken"):
            importlib.import_module(name)
        probed.broken = False  # type: ignore[attr-defined]
        importlib.import_module(name)
        del probed.broken  # type: ignore[attr-defined]
        assert set(sites(attachment).values()) == {"attached"}

    def test_error_while_attaching_does_not_break_the_import(
        self, library: Callable[..., str], attach: Callable[..., Attachment], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("COPYTRACE_STRICT")
        name = library(self.SOURCE)

        def broken(_kind: type, _site: Site) -> Site:
            raise RuntimeError("of the probe")

        family = Family(base=f"{name}:Store", methods=(Site(target="get", kind="request"),), adapt=broken)
        attachment = attach(
            Probe(name=name, library=name, families=(family,), sites=(Site(target=f"{name}:work", kind="copy"),))
        )
        module = importlib.import_module(name)
        assert module.work(b"1") == b"1"
        found = {site["name"]: site for site in status(attachment).sites}
        assert found[f"{name}:Store"]["reason"] == "RuntimeError: of the probe"
        assert found[f"{name}.work"]["status"] == "attached"

    def test_loader_is_as_it_was(self, library: Callable[..., str], attach: Callable[..., Attachment]) -> None:
        name = library(self.SOURCE)
        attach(self.probe(name, ":work"))
        module = importlib.import_module(name)
        assert "exec_module" not in vars(module.__spec__.loader)
        assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
        importlib.reload(module)

    def test_module_that_is_nowhere(self, attach: Callable[..., Attachment]) -> None:
        attach(Probe(name="n", library="n", sites=(Site(target="no_such_module_at_all:work", kind="copy"),)))
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_module_at_all")

    def test_two_threads_import_at_once(self, tmp_path: Path, library: Callable[..., str]) -> None:
        name = library("import time; time.sleep(0.05)", inner=self.SOURCE)
        results: list[types.ModuleType] = []
        with recording(tmp_path / "s", self.probe(name, ".inner:work")) as recorded:
            started = [
                threading.Thread(target=lambda: results.append(importlib.import_module(f"{name}.inner")))
                for _ in range(3)
            ]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
            results[0].work(b"1")
        assert len(set(results)) == 1
        assert len(recorded.spans) == 1


class TestFamilies:
    def test_every_subclass_and_those_defined_later(self, tmp_path: Path) -> None:
        module = types.ModuleType("family_members")
        sys.modules["family_members"] = module

        class Store(abc.ABC):
            @abc.abstractmethod
            def get(self, key: str) -> bytes: ...

        class Local(Store):
            def get(self, key: str) -> bytes:
                return key.encode()

        class Cached(Local):
            """Inherits ``get``."""

        class Logged(Local):
            def get(self, key: str) -> bytes:
                return super().get(key)

        module.Store = Store  # type: ignore[attr-defined]
        family = Family(base="family_members:Store", methods=(Site(target="get", kind="request", output=True),))
        had = "__init_subclass__" in vars(Store)
        with recording(tmp_path, Probe(name="f", library="family_members", families=(family,))) as recorded:

            class Late(Store):
                def get(self, key: str) -> bytes:
                    return b"late" * 5 if key else b""

            class Later(Late):
                def get(self, key: str) -> bytes:
                    return super().get(key) + b"r"

            for kind in (Local, Cached, Logged, Late, Later):
                kind().get("key")
        del sys.modules["family_members"]
        short = [span.name.rsplit(".", 2)[1] for span in recorded.spans]
        assert short == ["Local", "Local", "Logged", "Local", "Late", "Later", "Late"]
        assert [span.outputs for span in recorded.spans] == [[3], [3], [3], [3], [20], [21], [20]]
        assert ("__init_subclass__" in vars(Store)) is had is False
        assert not any(hasattr(vars(kind)["get"], "__wrapped__") for kind in (Store, Local, Logged, Late, Later))

    def test_own_init_subclass_is_called(self, tmp_path: Path) -> None:
        module = types.ModuleType("family_members")
        sys.modules["family_members"] = module
        made: list[tuple[type, str]] = []

        class Codec:
            def __init_subclass__(cls, *, codec_name: str = "none", **options: Any) -> None:
                super().__init_subclass__(**options)
                made.append((cls, codec_name))

            def encode(self, data: bytes) -> bytes:
                return data

        module.Codec = Codec  # type: ignore[attr-defined]
        original = vars(Codec)["__init_subclass__"]
        family = Family(base="family_members:Codec", methods=(Site(target="encode", kind="encode", inputs=(1,)),))
        with recording(tmp_path, Probe(name="f", library="family_members", families=(family,))) as recorded:

            class Mine(Codec, codec_name="mine"):
                def encode(self, data: bytes) -> bytes:
                    return data

            with pytest.raises(TypeError, match="takes no keyword arguments"):

                class Wrong(Codec, nonsense=1):
                    pass

            Mine().encode(b"12345")
        del sys.modules["family_members"]
        assert made == [(Mine, "mine")]
        assert vars(Codec)["__init_subclass__"] is original
        assert [(span.inputs, span.library) for span in recorded.spans] == [([5], "test_probes_attach")]

    def test_base_that_is_gone_is_missing(self, attach: Callable[..., Attachment]) -> None:
        family = Family(base="probed.calls:Gone", methods=(Site(target="get", kind="request"),))
        attachment = attach(Probe(name="f", library="probed", families=(family,)))
        assert sites(attachment) == {"probed.calls.Gone": "missing"}


class TestReturns:
    def test_class_of_what_is_returned_is_learnt(self, tmp_path: Path) -> None:
        module = types.ModuleType("returning")
        sys.modules["returning"] = module

        class Result:
            def bytes(self) -> bytes:
                return b"x" * 17

        module.get = lambda key: Result() if key else None  # type: ignore[attr-defined]
        original = vars(Result)["bytes"]
        inner = Site(target="bytes", name="returning.Result.bytes", kind="request", output=True)
        gone = Site(target="gone", name="returning.Result.gone", kind="request")
        site = Site(target="returning:get", kind="request", returns=(inner, gone))
        with recording(tmp_path, Probe(name="r", library="returning", sites=(site,))) as recorded:
            attachment = recorded.attachment
            assert attachment is not None
            assert module.get("") is None
            assert sites(attachment)["returning.Result.bytes"] == "waiting"
            for _ in range(2):
                module.get("a").bytes()
            assert sites(attachment)["returning.Result.bytes"] == "attached"
            assert sites(attachment)["returning.Result.gone"] == "waiting"
        del sys.modules["returning"]
        assert recorded.names == [
            "returning.get",
            "returning.get",
            "returning.Result.bytes",
            "returning.get",
            "returning.Result.bytes",
        ]
        assert vars(Result)["bytes"] is original


def test_attaching_is_quick() -> None:
    import time

    import numcodecs
    import zarr

    assert zarr.__version__ > numcodecs.__version__
    attach_all().detach()
    took = []
    for _ in range(5):
        started = time.thread_time()
        attach_all().detach()
        took.append(time.thread_time() - started)
    assert min(took) < 0.1, took


def test_importing_the_probes_imports_no_library() -> None:
    import subprocess

    program = (
        "import sys, copytrace.probes; copytrace.probes.attach_all().detach(); "
        "print(sorted({'zarr', 'numcodecs', 'obstore', 'memray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
