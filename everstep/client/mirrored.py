"""Make the methods of an asynchronous class from those of the class that blocks, with the same
arguments, documentation and errors."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

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

    def _alike(self, blocking: Any) -> Self:
        return type(self)(blocking, self._calls)


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
    return cast("Method[P, Coroutine[Any, Any, R]]", _calling(method, lambda _self, found: found))


def returning_itself(method: Callable[Concatenate[Any, P], Any]) -> OwnMethod[P]:
    """Return an awaited method that returns its own object."""
    return cast("OwnMethod[P]", _calling(method, lambda self, _found: self))


def returning(
    kind: type[M], method: Callable[Concatenate[Any, P], Any]
) -> Method[P, Coroutine[Any, Any, M]]:
    """Return an awaited method whose result is mirrored as ``kind``."""
    found = _calling(method, lambda self, found: kind(found, self._calls))
    return cast("Method[P, Coroutine[Any, Any, M]]", found)


def returning_another(method: Callable[Concatenate[Any, P], Any]) -> OwnMethod[P]:
    """Return an awaited method whose result is mirrored as its own kind."""
    return cast("OwnMethod[P]", _calling(method, lambda self, found: self._alike(found)))


def returning_others(
    method: Callable[Concatenate[Any, P], list[Any]],
) -> Method[P, Coroutine[Any, Any, list[Any]]]:
    """Return an awaited method whose results are mirrored as its own kind."""
    found = _calling(method, lambda self, found: [self._alike(each) for each in found])
    return cast("Method[P, Coroutine[Any, Any, list[Any]]]", found)


def returning_list(
    kind: type[M], method: Callable[Concatenate[Any, P], list[Any]]
) -> Method[P, Coroutine[Any, Any, list[M]]]:
    """Return an awaited method whose results are mirrored as ``kind``."""
    found = _calling(method, lambda self, found: [kind(each, self._calls) for each in found])
    return cast("Method[P, Coroutine[Any, Any, list[M]]]", found)


def _calling(
    method: Callable[..., Any], shown: Callable[[Mirror, Any], Any]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def call(self: Mirror, *args: Any, **kwargs: Any) -> Any:
        return shown(self, await self._calls.run(lambda: method(self._blocking, *args, **kwargs)))

    return call


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
