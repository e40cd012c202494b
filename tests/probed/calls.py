"""Callables of every form; ``log`` tells what really ran."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator
from typing import Any

log: list[str] = []


def function(data: Any, /, extra: int = 3, *, scale: int = 1) -> Any:
    """Doubles."""
    log.append(f"function {extra} {scale}")
    return data * 2


def fails(data: Any) -> None:
    raise KeyError(data)


def lets_go(data: Any, watch: Any) -> bool:
    """Whether the argument is gone once this function has let go of it."""
    del data
    return watch() is None


def python_lets_go() -> bool:
    """Whether Python passes arguments on by ``f(*args)`` without keeping them. 3.13 keeps them while any tool watches
    calls: a profiler, or a user of ``sys.monitoring``.
    """

    def pass_on(*args: Any) -> bool:
        passed = [args]
        del args
        return given(*passed.pop())

    def given(data: Any, watch: Any) -> bool:
        del data
        return watch() is None

    made = [type("Large", (), {})()]
    watch = weakref.ref(made[0])
    return pass_on(made.pop(), watch)


async def lets_go_async(data: Any, watch: Any) -> bool:
    del data
    await asyncio.sleep(0)
    return watch() is None


def twice(work: Any) -> Any:
    @functools.wraps(work)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)

    return wrapper


@twice
def decorated(data: Any, extra: int = 1) -> Any:
    return data if extra else None


class Base:
    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._data = None

    def method(self, data: Any, extra: Any = None) -> Any:
        log.append(f"method {extra}")
        return data

    def inherited(self, data: Any) -> Any:
        return data

    @classmethod
    def made(cls, data: Any) -> Any:
        return cls, data

    @staticmethod
    def still(data: Any) -> Any:
        return data

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    constant = 3

    def __getitem__(self, key: Any) -> Any:
        return key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Base) and other.size == self.size

    __hash__ = None  # type: ignore[assignment]


class Derived(Base):
    def method(self, data: Any, extra: Any = None) -> Any:
        return super().method(data, extra)


async def plain(data: Any) -> Any:
    """Never waits."""
    return data


async def waits(data: Any, gate: asyncio.Event | None = None) -> Any:
    log.append("waits")
    if gate is None:
        await asyncio.sleep(0)
    else:
        await gate.wait()
    return data


async def outer(data: Any, gate: asyncio.Event | None = None) -> Any:
    first = await waits(data, gate)
    return await plain(first)


async def fails_later(data: Any) -> None:
    await asyncio.sleep(0)
    raise KeyError(data)


async def tidies_up(data: Any) -> Any:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        log.append("cancelled")
        await asyncio.sleep(0)
        log.append("tidied up")
        raise
    return data


async def resists(data: Any) -> Any:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        return data


def numbers(count: int) -> Generator[bytes, str | None, str]:
    """Yields, takes what is sent, returns."""
    try:
        for number in range(count):
            got = yield bytes([number]) * 100
            if got:
                log.append(got)
    except ValueError as error:
        log.append(f"thrown {error}")
        yield b"caught" * 100
    finally:
        log.append("numbers closed")
    return "done"


async def stream(count: int) -> AsyncIterator[bytes]:
    try:
        for number in range(count):
            await asyncio.sleep(0)
            yield bytes([number]) * 100
    finally:
        log.append("stream closed")


def delegates(data: Any) -> Awaitable[Any]:
    """A plain function that returns a coroutine."""
    return waits(data)


def future(data: Any) -> asyncio.Future[Any]:
    """A plain function that returns a future, as one in Rust does."""
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: made.done() or made.set_result(data))
    return made


def failing_future(data: Any) -> asyncio.Future[Any]:
    made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(made.set_exception, KeyError(data))
    return made


class Later:
    """An awaitable that is neither coroutine nor future."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        return self.data


def later(data: Any) -> Later:
    return Later(data)


# What stands for functions of a compiled library: no function of Python, nothing known of what they return.
delegates_natively = functools.partial(delegates)
future_natively = functools.partial(future)
failing_future_natively = functools.partial(failing_future)
later_natively = functools.partial(later)
natively = functools.partial(function)
fails_natively = functools.partial(fails)
