"""Make the methods of an asynchronous class from those of the class that blocks, with the same
arguments, documentation and errors."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from everstep.client.in_loop import Calls

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
M = TypeVar("M", bound="Mirror")


class Mirror:
    """An object whose methods run those of another one."""

    def __init__(self, blocking: Any, calls: Calls) -> None:
        self._blocking = blocking
        self._calls = calls

    def __repr__(self) -> str:
        return f"<async {repr(self._blocking).strip('<>')}>"

    def _mirrored(self) -> None:
        """Take over what a call has changed in the other object."""


class Method(Protocol, Generic[P, R_co]):
    """A method, for type checkers: bound by the access to it."""

    def __get__(self, instance: Any, owner: Any) -> Callable[P, R_co]: ...


class OwnMethod(Protocol, Generic[P]):
    """A method that returns the object itself."""

    def __get__(self, instance: T, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...


def awaited(
    method: Callable[Concatenate[Any, P], R],
) -> Method[P, Coroutine[Any, Any, R]]:
    """Return a method whose result is awaited."""

    @functools.wraps(method)
    async def call(self: Mirror, *args: P.args, **kwargs: P.kwargs) -> R:
        found = await self._calls.run(lambda: method(self._blocking, *args, **kwargs))
        self._mirrored()
        return found

    return cast("Method[P, Coroutine[Any, Any, R]]", call)


def returning_itself(method: Callable[Concatenate[Any, P], Any]) -> OwnMethod[P]:
    """Return an awaited method that returns its own object."""

    @functools.wraps(method)
    async def call(self: Mirror, *args: P.args, **kwargs: P.kwargs) -> Mirror:
        try:
            await self._calls.run(lambda: method(self._blocking, *args, **kwargs))
        finally:
            self._mirrored()
        return self

    return cast("OwnMethod[P]", call)


def returning(
    kind: type[M], method: Callable[Concatenate[Any, P], Any]
) -> Method[P, Coroutine[Any, Any, M]]:
    """Return an awaited method whose result is mirrored as ``kind``."""

    @functools.wraps(method)
    async def call(self: Mirror, *args: P.args, **kwargs: P.kwargs) -> M:
        found = await self._calls.run(lambda: method(self._blocking, *args, **kwargs))
        self._mirrored()
        return kind(found, self._calls)

    return cast("Method[P, Coroutine[Any, Any, M]]", call)


def returning_another(method: Callable[Concatenate[Any, P], Any]) -> OwnMethod[P]:
    """Return an awaited method whose result is mirrored as its own kind."""

    @functools.wraps(method)
    async def call(self: Mirror, *args: P.args, **kwargs: P.kwargs) -> Mirror:
        found = await self._calls.run(lambda: method(self._blocking, *args, **kwargs))
        return type(self)(found, self._calls)

    return cast("OwnMethod[P]", call)


def returning_others(
    method: Callable[Concatenate[Any, P], list[Any]],
) -> Method[P, Coroutine[Any, Any, list[Any]]]:
    """Return an awaited method whose results are mirrored as its own kind."""

    @functools.wraps(method)
    async def call(self: Mirror, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        found = await self._calls.run(lambda: method(self._blocking, *args, **kwargs))
        return [type(self)(each, self._calls) for each in found]

    return cast("Method[P, Coroutine[Any, Any, list[Any]]]", call)


def returning_list(
    kind: type[M], method: Callable[Concatenate[Any, P], list[Any]]
) -> Method[P, Coroutine[Any, Any, list[M]]]:
    """Return an awaited method whose results are mirrored as ``kind``."""

    @functools.wraps(method)
    async def call(self: Mirror, *args: P.args, **kwargs: P.kwargs) -> list[M]:
        found = await self._calls.run(lambda: method(self._blocking, *args, **kwargs))
        return [kind(each, self._calls) for each in found]

    return cast("Method[P, Coroutine[Any, Any, list[M]]]", call)


def iterated(
    method: Callable[Concatenate[Any, P], Iterator[T]],
) -> Method[P, AsyncIterator[T]]:
    """Return a method for ``async for``."""
    found = _iterating(method, lambda item, _calls: item)
    return cast("Method[P, AsyncIterator[T]]", found)


def iterated_as(
    kind: type[M], method: Callable[Concatenate[Any, P], Iterator[Any]]
) -> Method[P, AsyncIterator[M]]:
    """Return a method for ``async for`` whose items are mirrored as ``kind``."""
    return cast("Method[P, AsyncIterator[M]]", _iterating(method, kind))


def _iterating(
    method: Callable[..., Iterator[Any]], shown: Callable[[Any, Calls], Any]
) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(method)
    async def iterate(self: Mirror, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        items = iter(await self._calls.run(lambda: method(self._blocking, *args, **kwargs)))
        try:
            while True:
                try:
                    item = await self._calls.next(items)
                except StopAsyncIteration:
                    return
                yield shown(item, self._calls)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                await self._calls.run(close)

    return iterate
