"""Replacing one attribute and putting the identical object back."""

from __future__ import annotations

import sys
from functools import partial, update_wrapper
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_ABSENT: Any = object()
_COMPILED = (
    "cython_function_or_method",
    "builtin_function_or_method",
    "method_descriptor",
    "wrapper_descriptor",
    "fused_cython_function",
)
_PLAIN = ("function", *_COMPILED)


def is_compiled(function: Any) -> bool:
    """Whether it is a function of C, Rust or Cython that is bound to no object: such are made once."""
    bound = getattr(function, "__self__", None)
    return type(function).__name__ in _COMPILED and (bound is None or isinstance(bound, ModuleType))


class PatchError(Exception):
    """An attribute cannot be replaced."""


def find(module: ModuleType, path: str) -> tuple[Any, str] | None:
    """The owner (module or class) and name of the attribute at the dotted ``path``, or None when there is no such
    thing.
    """
    owner: Any = module
    *parents, attribute = path.split(".")
    for name in parents:
        owner = vars(owner).get(name)
        if not isinstance(owner, type | ModuleType):
            return None
    return (owner, attribute) if _lookup(owner, attribute) is not _ABSENT else None


def _lookup(owner: Any, attribute: str) -> Any:
    for place in owner.__mro__ if isinstance(owner, type) else (owner,):
        if attribute in vars(place):
            return vars(place)[attribute]
    return _ABSENT


class Patch:
    """One replaced attribute of a module or class."""

    __slots__ = ("_installed", "_make", "_original", "attribute", "owner")

    def __init__(self, owner: Any, attribute: str, make: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.attribute = attribute
        self._make = make
        self._original: Any = _ABSENT
        self._installed: Any = _ABSENT

    def serves(self, owner: Any, attribute: str) -> bool:
        """Whether looking up ``attribute`` on ``owner`` finds what this patch installed."""
        return _lookup(owner, attribute) is self._installed

    @classmethod
    def of_callable(cls, owner: Any, attribute: str, make: Callable[[Any], FunctionType]) -> Patch:
        """Replace a function, method, classmethod or staticmethod by ``make(function)``."""

        def wrap(raw: Any) -> Any:
            if type(raw) in (staticmethod, classmethod):
                return type(raw)(make(raw.__func__))
            if not callable(raw) or isinstance(raw, type):
                raise PatchError(f"{attribute} of {owner.__name__} is a {type(raw).__name__}, not a function")
            if isinstance(owner, type) and type(raw).__name__ not in _PLAIN:
                return _Binding(raw, make)
            return make(raw)

        return cls(owner, attribute, wrap)

    @classmethod
    def of_subclassing(cls, base: Any, tell: Callable[[type], None]) -> Patch:
        """Call ``tell(subclass)`` for each class that is derived from ``base`` from now on."""

        def wrap(raw: Any) -> Any:
            own = vars(base).get("__init_subclass__")

            def init_subclass(kind: Any, /, **options: Any) -> None:
                if own is None:
                    super(base, kind).__init_subclass__(**options)
                else:
                    own.__get__(None, kind)(**options)
                tell(kind)

            update_wrapper(init_subclass, getattr(raw, "__func__", raw))
            return classmethod(init_subclass)

        return cls(base, "__init_subclass__", wrap)

    def install(self) -> None:
        """Put the replacement in its place. Raises PatchError when that is not possible."""
        raw = _lookup(self.owner, self.attribute)
        self._original = vars(self.owner).get(self.attribute, _ABSENT)
        installed = self._make(raw)
        try:
            setattr(self.owner, self.attribute, installed)
        except (TypeError, AttributeError) as error:
            raise PatchError(f"{self.attribute} of {self.owner.__name__} cannot be set: {error}") from error
        self._installed = vars(self.owner)[self.attribute]

    def remove(self) -> None:
        """Put the original back, also beneath another tool's wrapt proxy. What hides ours in a closure stays, and ours
        lets calls through.
        """
        current = vars(self.owner).get(self.attribute, _ABSENT)
        if current is self._installed:
            if self._original is _ABSENT:
                delattr(self.owner, self.attribute)
            else:
                setattr(self.owner, self.attribute, self._original)
            return
        original = _lookup_above(self.owner, self.attribute) if self._original is _ABSENT else self._original
        while type(current) is not FunctionType and (inner := getattr(current, "__wrapped__", None)) is not None:
            if inner is self._installed:
                current.__wrapped__ = original
                return
            current = inner


def take_back(patches: Iterable[Patch], modules: Iterable[str]) -> None:
    """Put the originals of functions back under the names that those of ``modules`` have for them that are of their
    package: what is imported while a patch is in place takes the replacement.
    """
    functions = {id(patch._installed): patch for patch in patches if isinstance(patch.owner, ModuleType)}
    packages = {patch.owner.__name__.partition(".")[0] for patch in functions.values()}
    for name in modules:
        module = sys.modules.get(name)
        if name.partition(".")[0] in packages and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                patch = functions.get(id(value))
                if patch is not None and value is patch._installed and patch._original is not _ABSENT:
                    setattr(module, attribute, patch._original)


def _lookup_above(owner: Any, attribute: str) -> Any:
    for place in owner.__mro__[1:]:
        if attribute in vars(place):
            return vars(place)[attribute]
    return _ABSENT


class _Binding:
    """Stands for a descriptor that binds in a way of its own, such as another tool's wrapper."""

    def __init__(self, raw: Any, make: Callable[[Any], FunctionType]) -> None:
        def of_instance(receiver: Any, /, *args: Any, **kwargs: Any) -> Any:
            return raw.__get__(receiver, type(receiver))(*args, **kwargs)

        def of_class(receiver: type, /, *args: Any, **kwargs: Any) -> Any:
            return raw.__get__(None, receiver)(*args, **kwargs)

        self.__wrapped__ = raw
        self._of_instance = make(update_wrapper(of_instance, raw))
        self._of_class = make(update_wrapper(of_class, raw))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return update_wrapper(partial(self._of_class, owner), self.__wrapped__)
        return update_wrapper(partial(self._of_instance, instance), self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)
