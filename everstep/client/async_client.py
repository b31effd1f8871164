"""The client for asyncio: every method of ``Client`` and of what it returns, awaited."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

import httpx

from everstep.client import admin
from everstep.client.address import find_address
from everstep.client.admin import Alerts, Nodes
from everstep.client.client import Client, Runs
from everstep.client.download import Code
from everstep.client.handles import (
    DrillFields,
    DrillHandle,
    ProfileFields,
    ProfileHandle,
    RunFields,
)
from everstep.client.in_loop import Calls, HttpInLoop, sleep
from everstep.client.runs import RunHandle
from everstep.client.streams import Patience
from everstep.client.transport import Timing, Transport
from everstep.wire import Run

# ---------------------------------------------------------------- mirrored

# Make the methods of an asynchronous class from those of the class that blocks, with the same
# arguments, documentation and errors.

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


# ---------------------------------------------------------------- async client


class _AsyncOrder(Mirror):
    """A request to a run's ranks. Its attributes are those of the blocking handle."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._blocking, name)

    refresh = returning_itself(DrillHandle.refresh)
    wait = returning_itself(DrillHandle.wait)


class AsyncDrill(DrillFields, _AsyncOrder):
    """One drill, as ``DrillHandle``."""


class AsyncProfile(ProfileFields, _AsyncOrder):
    """One profile, as ``ProfileHandle``."""

    download = awaited(ProfileHandle.download)


class AsyncRun(RunFields, Mirror):
    """One run, as ``RunHandle``: its fields are those of the last response.

    >>> run = await client.runs.create(spec)          # doctest: +SKIP
    >>> async for event in run.events(follow=True):   # doctest: +SKIP
    ...     print(event.kind)
    """

    __repr__ = Mirror.__repr__

    @property
    def run(self) -> Run:
        """Return the last response of the service."""
        found: Run = self._blocking.run
        return found

    refresh = returning_itself(RunHandle.refresh)
    spec = awaited(RunHandle.spec)
    wait = returning_itself(RunHandle.wait)
    failed = awaited(RunHandle.failed)
    events = iterated(RunHandle.events)
    logs = iterated(RunHandle.logs)
    metrics = awaited(RunHandle.metrics)
    failures = awaited(RunHandle.failures)
    stragglers = awaited(RunHandle.stragglers)
    attempts = awaited(RunHandle.attempts)
    samples = awaited(RunHandle.samples)
    goodput = awaited(RunHandle.goodput)
    to_pandas = awaited(RunHandle.to_pandas)
    checkpoints = awaited(RunHandle.checkpoints)
    checkpoint = awaited(RunHandle.checkpoint)
    verify_checkpoint = awaited(RunHandle.verify_checkpoint)
    download_checkpoint = awaited(RunHandle.download_checkpoint)
    download_event_files = awaited(RunHandle.download_event_files)
    cancel = returning_itself(RunHandle.cancel)
    pause = returning_itself(RunHandle.pause)
    set_notes = returning_itself(RunHandle.set_notes)
    resume = returning_itself(RunHandle.resume)
    drill = returning(AsyncDrill, RunHandle.drill)
    drills = returning_list(AsyncDrill, RunHandle.drills)
    replay = returning_another(RunHandle.replay)
    replays = returning_others(RunHandle.replays)
    profile = returning(AsyncProfile, RunHandle.profile)
    profiles = returning_list(AsyncProfile, RunHandle.profiles)
    stacks = awaited(RunHandle.stacks)
    stack_reports = awaited(RunHandle.stack_reports)
    rehearsal = awaited(RunHandle.rehearsal)
    delete = awaited(RunHandle.delete)


class AsyncRuns(Mirror):
    """The runs of the service, as ``client.runs``."""

    create = returning(AsyncRun, Runs.create)
    validate = awaited(Runs.validate)
    get = returning(AsyncRun, Runs.get)
    list = iterated_as(AsyncRun, Runs.list)


class AsyncNodes(Mirror):
    """The nodes of the cluster, as ``client.nodes``."""

    cordon = awaited(Nodes.cordon)
    uncordon = awaited(Nodes.uncordon)
    drain = awaited(Nodes.drain)
    get = awaited(Nodes.get)
    find = awaited(Nodes.find)
    wait_drained = awaited(Nodes.wait_drained)


class AsyncCode(Mirror):
    """Uploads of code, as ``client.code``."""

    upload = awaited(Code.upload)
    upload_packed = awaited(Code.upload_packed)


class AsyncProjects(Mirror):
    """Projects, as ``client.projects``."""

    create = awaited(admin.Projects.create)
    list = iterated(admin.Projects.list)
    get = awaited(admin.Projects.get)
    delete = awaited(admin.Projects.delete)


class AsyncTokens(Mirror):
    """Tokens, as ``client.tokens``."""

    create = awaited(admin.Tokens.create)
    list = iterated(admin.Tokens.list)
    revoke = awaited(admin.Tokens.revoke)


class AsyncSessions(Mirror):
    """Log-ins of browsers, as ``client.sessions``."""

    list = iterated(admin.Sessions.list)
    revoke = awaited(admin.Sessions.revoke)


class AsyncAlerts(Mirror):
    """Alerts of projects, as ``client.alerts``."""

    create = awaited(Alerts.create)
    list = iterated(Alerts.list)
    delete = awaited(Alerts.delete)
    test = awaited(Alerts.test)
    deliveries = iterated(Alerts.deliveries)
    retry = awaited(Alerts.retry)


class AsyncAudit(Mirror):
    """The audit log, as ``client.audit``."""

    list = iterated(admin.Audit.list)


class AsyncStorage(Mirror):
    """The storage of the service, as ``client.storage``."""

    status = awaited(admin.ServiceStorage.status)
    adopt = awaited(admin.ServiceStorage.adopt)


class AsyncClient(Mirror):
    """A connection to one Everstep service, for asyncio. Use it in one event loop.

    Its methods are those of ``Client`` with ``await``, or with ``async for`` where those return an
    iterator. A cancelled task ends its request at once.

    >>> async with AsyncClient() as client:                          # doctest: +SKIP
    ...     runs = [await client.runs.create(spec) for spec in specs]
    ...     await asyncio.gather(*(run.wait() for run in runs))

    Args: as for ``Client``; ``transport`` is an asynchronous one of httpx, for tests.

    Raises UsageError for an invalid URL or token.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        max_tries: int = 6,
        patience: Patience | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        made: list[HttpInLoop] = []

        def make_http(**options: Any) -> HttpInLoop:
            made.append(HttpInLoop(**options))
            return made[-1]

        sender = Transport(
            find_address(url, token),
            timeout_s=timeout_s,
            max_tries=max_tries,
            timing=Timing(sleep=sleep),
            base=transport,
            make_http=make_http,
        )
        client = Client.over(sender, patience or Patience())
        calls = Calls()
        super().__init__(client, calls)
        [self._http] = made
        self.runs = AsyncRuns(client.runs, calls)
        self.nodes = AsyncNodes(client.nodes, calls)
        self.code = AsyncCode(client.code, calls)
        self.projects = AsyncProjects(client.projects, calls)
        self.tokens = AsyncTokens(client.tokens, calls)
        self.sessions = AsyncSessions(client.sessions, calls)
        self.alerts = AsyncAlerts(client.alerts, calls)
        self.audit = AsyncAudit(client.audit, calls)
        self.storage = AsyncStorage(client.storage, calls)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def url(self) -> str:
        """Return the base URL of the service."""
        return str(self._blocking.url)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.http.aclose()
        self._calls.close()

    cluster = awaited(Client.cluster)
    catalog = awaited(Client.catalog)
    schema = awaited(Client.schema)
    goodput = awaited(Client.goodput)
    start_deployment_check = awaited(Client.start_deployment_check)
    wait_deployment_check = awaited(Client.wait_deployment_check)
    rehearse = awaited(Client.rehearse)
    health = awaited(Client.health)
    ready = awaited(Client.ready)
