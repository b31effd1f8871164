"""API and reconciler of one service process, from its arguments to a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import structlog
import uvloop

from everstep.text.words import count
from service.annexes.registry import ANNEXES
from service.api.answers import ServiceLinks
from service.api.auth import (
    EMBEDDED_TRUST,
    LOCAL_TOKEN_ID,
    ensure_local_token,
    ensure_metrics_token,
)
from service.api.callers import LogInCodes
from service.api.streams import EventFeed
from service.cluster.cluster_view import ClusterView
from service.cluster.ray_jobs import RayEndpoint, RayJobs
from service.db.engine import Database
from service.db.events import EventStore
from service.db.lease import LeaseStore
from service.db.node_marks import NodeMarks
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.db.tokens import TokenStore
from service.embedded import worker_start
from service.embedded.supervisor import ClusterSupervisor
from service.figures import RunFigures
from service.parts import ServiceParts
from service.process.app import composed, create_app, reach
from service.process.http import ApiServer, base_url
from service.reconciler.loop import Leadership, Reconciler
from service.reconciler.ray_poller import DRIVER, driver_entrypoint
from service.reconciler.scrub import ScrubRule
from service.settings import Settings, published_url
from storage.filesystem import Storage

log = structlog.get_logger("everstep")


def run(
    settings: Settings,
    listener: socket.socket,
    storage: Storage,
    database: Database,
    supervisor: ClusterSupervisor | None,
) -> None:
    """Run API and reconciler until SIGTERM or SIGINT.

    Raises CannotStart if an existing cluster cannot be reached, ClusterError if the embedded one
    does not start.
    """
    # uvicorn takes this loop by itself only where it makes the loop.
    uvloop.run(serve(settings, listener, storage, database, supervisor))


async def serve(
    settings: Settings,
    listener: socket.socket,
    storage: Storage,
    database: Database,
    supervisor: ClusterSupervisor | None,
) -> None:
    """Like ``run``, in an event loop."""
    existing = (
        RayEndpoint(settings.ray_address, settings.ray_token) if settings.ray_address else None
    )
    endpoint = supervisor.endpoint if supervisor else lambda: existing
    async with RayJobs(endpoint) as ray, contextlib.AsyncExitStack() as stack:
        if supervisor is None:
            await reach(ray, settings)
        figures = RunFigures()
        url = base_url(settings, listener)
        view = ClusterView(ray, supervisor.note if supervisor else None)
        parts = composed(
            settings,
            database,
            storage,
            view,
            ray,
            lag_s=lambda: reconciler.lag_s(),
            figures=figures,
            public_url=settings.public_url or url,
        )
        reconciler = made_reconciler(parts, figures)
        for annex in ANNEXES:
            manager = None if annex.opened is None else annex.opened(parts)
            if manager is not None:
                parts.add(await stack.enter_async_context(manager))
        token_id = await asyncio.to_thread(
            ensure_local_token,
            parts[TokenStore],
            settings.token_path,
            local_token_id(settings, database),
        )
        if settings.metrics_token:
            await asyncio.to_thread(ensure_metrics_token, parts[TokenStore], settings.metrics_token)
        # It logs in who started the service, once, and only where a person reads: a log file would
        # keep a way in for its other readers.
        code = parts[LogInCodes].make(token_id) if sys.stdout.isatty() else None
        link = code and f"{url}/login?code={code}"
        server = ApiServer(create_app(parts), lambda: announce(settings, url, link), settings)

        def stop() -> None:
            parts[EventFeed].close()  # Streams never end by themselves.
            server.should_exit = True

        with stopped_by_signals(stop), published_url(settings.url_path, url):
            async with running(reconciler, supervisor, stop):
                await server.serve([listener])
    database.close()


def made_reconciler(parts: ServiceParts, figures: RunFigures) -> Reconciler:
    """Return the reconciler of this process.

    Replicas share a PostgreSQL, and a lease lets one of them reconcile. A SQLite file needs no
    lease, since the home's lock keeps other services out.
    """
    settings, storage, database = parts[Settings], parts[Storage], parts[Database]
    leadership = None if database.is_sqlite else Leadership(LeaseStore(database))
    mine = database if leadership is None else database.guarded(leadership.check)
    led = parts.but(mine, Database)
    return Reconciler(
        RunStore(mine),
        EventStore(mine),
        NodeMarks(mine),
        ProjectStore(mine),
        storage,
        parts[RayJobs],
        scrub_rule=ScrubRule(settings.scrub_mb_per_s * 1e6, settings.scrub_interval_s),
        figures=figures,
        leadership=leadership,
        beside=[work for annex in ANNEXES if annex.beside for work in annex.beside(led)],
        public_url=parts[ServiceLinks].public_url,
        entrypoint=driver_entrypoint(
            storage.uri, shlex.join(worker_start.DRIVER) if settings.embedded else DRIVER
        ),
    )


def local_token_id(settings: Settings, database: Database) -> str:
    """Return the id of this home's token. Replicas that share a database have a token each."""
    if database.is_sqlite:
        return LOCAL_TOKEN_ID
    place = f"{socket.gethostname()}:{settings.home}"
    return f"{LOCAL_TOKEN_ID}_{hashlib.sha256(place.encode()).hexdigest()[:12]}"


@contextlib.asynccontextmanager
async def running(
    reconciler: Reconciler, supervisor: ClusterSupervisor | None, stop: Callable[[], None]
) -> AsyncIterator[None]:
    """Run the reconciler and the embedded cluster's supervisor while the API serves.

    Calls ``stop`` and raises ClusterError if the cluster does not start.
    """
    stopping = asyncio.Event()
    tasks = [asyncio.create_task(reconciler.run(stopping), name="reconciler")]
    if supervisor is not None:
        cluster = asyncio.create_task(supervisor.run(stopping, announce_cluster), name="cluster")
        cluster.add_done_callback(lambda ended: stop() if ended.exception() else None)
        tasks.append(cluster)
    try:
        yield
    finally:
        stopping.set()
        await asyncio.gather(*tasks)


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the server gracefully."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        log.info("stopping")
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def announce(settings: Settings, url: str, link: str | None = None) -> None:
    """Print that the API answers, and its URLs."""
    print(f"Everstep is ready: {url}  (API reference: {url}/docs)")
    if link is not None:
        print(f"Log in (once):     {link}")
    if any(annex.relays_ray for annex in ANNEXES):
        print(f"Ray dashboard:     {url}/ray/")
    print(f"Admin token:       {settings.token_path}", flush=True)
    if settings.embedded:
        print(f"Trust:             {EMBEDDED_TRUST}")
        print("Ray cluster:       starting; runs wait for it", flush=True)


def announce_cluster(num_nodes: int) -> None:
    """Print that the embedded cluster takes runs."""
    print(f"Ray cluster:       {count(num_nodes, 'node')} ready", flush=True)
