"""Run the client's functions for asyncio: each in a thread, while its requests and pauses run in
the event loop, where a cancelled task ends them at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import httpx

R = TypeVar("R")
MOST_CALLS: Final = 256
"""Calls of one client that are in progress at the same time; further ones wait."""
_END: Final = object()


class _Cancelled(BaseException):
    """The task that waits for this call was cancelled. No handler of errors may take it for one."""


class _Call:
    """One function in a thread, and the loop that its requests run in."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: concurrent.futures.Future[Any] | None = None
        self._is_cancelled = False

    def run(self, function: Callable[[], R]) -> R:
        _calls.current = self
        try:
            return function()
        finally:
            del _calls.current

    def wait_for(self, coroutine: Coroutine[Any, Any, R], *, always: bool = False) -> R:
        """Return the result of a coroutine in the loop. Raise _Cancelled if the call is cancelled;
        ``always`` runs it then, too."""
        with self._lock:
            if self._is_cancelled and not always:
                coroutine.close()
                raise _Cancelled
            pending = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._pending = pending
        try:
            found: R = pending.result()
        except concurrent.futures.CancelledError:
            raise _Cancelled from None
        return found

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._pending is not None:
                self._pending.cancel()


_calls = threading.local()


def in_loop(coroutine: Coroutine[Any, Any, R], *, always: bool = False) -> R:
    """Return the result of a coroutine, from a function that ``Calls`` runs."""
    call: _Call = _calls.current
    return call.wait_for(coroutine, always=always)


def sleep(seconds: float) -> None:
    """Pause a function that ``Calls`` runs."""
    in_loop(asyncio.sleep(seconds))


class Calls:
    """Runs functions that block."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="everstep")

    async def run(self, function: Callable[[], R]) -> R:
        """Return the function's result. A cancelled task returns once the function has let go."""
        loop = asyncio.get_running_loop()
        call, context = _Call(loop), contextvars.copy_context()
        work = loop.run_in_executor(self._threads, context.run, call.run, function)
        try:
            found: R = await asyncio.shield(work)
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()
            raise
        return found

    async def next(self, items: Iterator[R]) -> R:
        """Return the next item. Raise StopAsyncIteration at the end."""
        found: Any = await self.run(lambda: next(items, _END))
        if found is _END:
            raise StopAsyncIteration
        item: R = found
        return item

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class HttpInLoop:
    """``httpx.AsyncClient`` with the methods of ``httpx.Client``, for functions that ``Calls``
    runs."""

    def __init__(self, **options: Any) -> None:
        self.http = httpx.AsyncClient(**options)

    def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        return in_loop(self.http.request(method, url, **options))

    @contextmanager
    def stream(self, method: str, url: str, **options: Any) -> Iterator[httpx.Response]:
        stream = self.http.stream(method, url, **options)
        response: Any = _Response(in_loop(stream.__aenter__()))
        try:
            yield response
        finally:
            in_loop(stream.__aexit__(None, None, None), always=True)

    def close(self) -> None:
        """Do nothing: ``AsyncClient.aclose`` closes the connections, in their loop."""


class _Response:
    """A streamed response with the methods of one that blocks."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    def read(self) -> bytes:
        return in_loop(self._response.aread())

    def iter_bytes(self) -> Iterator[bytes]:
        return _each(self._response.aiter_bytes())

    def iter_raw(self) -> Iterator[bytes]:
        return _each(self._response.aiter_raw())


def _each(chunks: Any) -> Iterator[bytes]:
    while True:
        try:
            yield in_loop(chunks.__anext__())
        except StopAsyncIteration:
            return
