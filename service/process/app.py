"""API and dashboard as one ASGI application: routers, errors, documentation, background tasks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import structlog
from fastapi import FastAPI

from everstep.supported import RAY, problem_here
from service.annex import Annex, Annexes, hooks_of
from service.annexes.registry import ANNEXES
from service.api import cluster, health, openapi, problems
from service.api.answers import ServiceLinks
from service.api.bodies import HeadMiddleware
from service.api.callers import Door, LogInCodes, RateLimit, TokenUse
from service.api.guard import AddressMiddleware, AuditMiddleware, BodyLimitMiddleware
from service.api.log_views import LogViews
from service.api.readiness import ReadinessCheck
from service.api.streams import EventFeed, Followers
from service.cluster.cluster_view import ClusterView
from service.cluster.ray_jobs import RayError, RayJobs, RayRefused
from service.db.audit import AuditStore
from service.db.checkpoints import CodeArchives
from service.db.engine import Database, DatabaseError, checked_url
from service.db.events import EventStore, SeriesStore
from service.db.node_marks import NodeMarks, StorageRecords
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.db.tokens import SessionStore, TokenStore
from service.embedded.cluster import EmbeddedCluster
from service.embedded.supervisor import ClusterSupervisor
from service.figures import RunFigures
from service.parts import ServiceParts
from service.runs import checkpoints, history, routes, submission
from service.runs.views import KeptAnswers
from service.settings import CannotStart, ServiceLock, Settings
from service.storage_identity import StorageGate, begin_with
from service.submission_rules.allowed import StorageRoots
from service.web import dashboard
from storage.errors import StorageError, StorageOwned
from storage.filesystem import Storage, open_storage

_DESCRIPTION = """Training that never loses a step.
Every route but the health checks needs `Authorization: Bearer TOKEN`.
Times are RFC 3339 in UTC, durations seconds (`_s`), sizes bytes (`_bytes`);
errors are `application/problem+json` with a `code`."""


def composed(
    settings: Settings,
    database: Database,
    storage: Storage,
    cluster: ClusterView,
    ray: RayJobs,
    *,
    lag_s: Callable[[], float | None],
    figures: RunFigures | None = None,
    public_url: str | None = None,
    annexes: Sequence[Annex] = ANNEXES,
    clock: Callable[[], float] = time.time,
) -> ServiceParts:
    """Return what the routes of a service depend on.

    Args:
        settings: the operator's choices.
        database: opened, with its tables.
        storage: of all runs.
        cluster: the Ray cluster as clients see it.
        ray: the same for requests.
        lag_s: returns the seconds since the reconciler's last finished tick.
        figures: what happens to runs; None counts nothing.
        public_url: base URL of this service for browsers, without a trailing slash; None if
            unknown.
        annexes: features beside the core.
        clock: unix seconds.
    """
    parts = ServiceParts()
    for part in (database, storage, settings, Annexes(annexes), LogInCodes(clock)):
        parts.add(part)
    parts.add(ray, RayJobs)
    parts.add(cluster, ClusterView)
    relays_ray = any(annex.relays_ray for annex in annexes)
    parts.add(ServiceLinks(cluster, public_url, relays_ray))
    runs = parts.add(RunStore(database, clock))
    events = parts.add(EventStore(database, clock))
    tokens = parts.add(TokenStore(database, clock))
    sessions = parts.add(SessionStore(database, clock))
    audit = parts.add(AuditStore(database, clock))
    database.companion = audit.join
    for store in (SeriesStore, ProjectStore, CodeArchives, NodeMarks):
        parts.add(store(database, clock))
    gate = parts.add(StorageGate(storage, runs.storage, service=public_url or ""))
    ready = parts.add(ReadinessCheck(database, storage, gate, cluster, lag_s))
    use = parts.add(TokenUse(tokens, clock))
    parts.add(Door(tokens, sessions, use, RateLimit(settings.rate_per_s)))
    parts.add(EventFeed(events))
    parts.add(Followers(tokens, sessions))
    parts.add(LogViews(storage))
    parts.add(KeptAnswers())
    parts.add(health.Figures(runs, ready, figures or RunFigures(clock)))
    return parts


def create_app(parts: ServiceParts) -> FastAPI:
    """Compose the application. Nothing runs before its lifespan begins, and Ray is not called.

    Call ``close`` of its ``EventFeed`` at a stop, before the server waits for its connections: it
    ends every stream.
    """
    app = FastAPI(
        title="Everstep",
        version=version("everstep"),
        description=_DESCRIPTION,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        generate_unique_id_function=openapi.operation_id,
    )
    app.state.parts = parts
    most_bytes = parts[Settings].max_upload_bytes
    app.add_middleware(HeadMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_upload_bytes=most_bytes)
    app.add_middleware(AuditMiddleware, log=parts[AuditStore])
    app.add_middleware(AddressMiddleware)
    app.add_middleware(health.LatencyMiddleware, figures=parts[health.Figures])
    problems.install(app)
    openapi.install(app)
    for router in (
        routes.router,
        history.router,
        history.totals,
        checkpoints.tensorboard_router,
        checkpoints.router,
        submission.router,
        cluster.router,
        cluster.storage_router,
        health.router,
        routes.checks,
        *(router for annex in parts[Annexes] for router in annex.routers),
    ):
        app.include_router(router)
    dashboard.install(app, parts[Annexes])
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run the event feed, the check of its followers, and the record of token use as tasks."""
    parts: ServiceParts = app.state.parts
    feed, use = parts[EventFeed], parts[TokenUse]
    tasks = [
        asyncio.create_task(feed.run(), name="event-feed"),
        asyncio.create_task(parts[Followers].run(), name="followers"),
        asyncio.create_task(use.run(), name="token-use"),
    ]
    try:
        yield
    finally:
        feed.close()
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await use.flush()


# ---------------------------------------------------------------- backends

# What a service stands on: its storage, its database and its Ray cluster, opened at the start.

LOOPBACK = "127.0.0.1"
LOOPBACK_S = 5.0

log = structlog.get_logger("everstep")


def database_lock(settings: Settings) -> contextlib.AbstractContextManager[object]:
    """Return the lock of a SQLite file for one service: a second one would revoke the first one's
    token, and reconcile beside it. Replicas share a PostgreSQL. Entering raises HomeError."""
    try:
        url = checked_url(settings.database_url)
    except DatabaseError:
        return contextlib.nullcontext()  # opening it says what is wrong
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return contextlib.nullcontext()
    path = Path(url.database).resolve()
    way_out = "name another one with --database; several services can share a PostgreSQL"
    return ServiceLock(Path(f"{path}.lock"), f"the database {path}", way_out)


def opened(settings: Settings) -> tuple[Storage, Database]:
    """Open and probe storage and database. Raises StorageError, DatabaseError, CannotStart."""
    storage = open_storage(settings.storage_uri)
    if problem := StorageRoots(settings.storage_roots).problem_of_storage(storage):
        raise CannotStart(f"--storage {problem}; choose another, or add a --storage-root")
    if not storage.creates_exclusively:
        log.warning(
            "the storage cannot create a file only where there is none, so that two processes may "
            "both succeed in writing one name; see docs/checkpoints.md, What each storage "
            "guarantees",
            storage=storage.uri,
        )
    try:
        storage.probe()
    except StorageError as exc:
        raise CannotStart(f"{exc}; let this user write there, or choose another --storage") from exc
    try:
        database = Database(settings.database_url, hooks_of(ANNEXES))
        database.migrate()
    except DatabaseError as exc:
        raise CannotStart(f"the database cannot be used: {exc}; check --database") from exc
    gate = StorageGate(storage, StorageRecords(database), service=str(settings.home))
    try:
        begin_with(gate, storage, NodeMarks(database), settings.adopt_storage)
    except StorageOwned as exc:
        raise CannotStart(str(exc)) from exc
    except StorageError as exc:
        # The service starts all the same: the storage may come back, or an operator may adopt the
        # one that is there.
        print(f"everstep serve: storage_unavailable: {exc}", file=sys.stderr)
    return storage, database


@contextlib.contextmanager
def running_cluster(settings: Settings) -> Iterator[ClusterSupervisor | None]:
    """Run the embedded cluster until a graceful end. Yield its supervisor before it is ready, or
    None for an existing cluster."""
    if not settings.embedded:
        yield None
        return
    if problem := problem_here(f"this environment ({sys.prefix})", "ray", "torch"):
        raise CannotStart(problem)
    _check_loopback()
    cluster = EmbeddedCluster(settings)
    supervisor = ClusterSupervisor(cluster)
    try:
        cluster.begin()
        yield supervisor
    finally:
        # A second signal must not interrupt the end of the cluster.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        cluster.stop()


def _check_loopback() -> None:
    """Check that processes of this machine can connect to each other. Raises CannotStart."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=LOOPBACK_S).close()
    except OSError as exc:
        raise CannotStart(
            f"this machine cannot connect to itself at {LOOPBACK} ({exc}), as the embedded cluster "
            "must; bring the interface up (ip link set lo up), or use --ray-address"
        ) from exc


async def reach(ray: RayJobs, settings: Settings) -> None:
    """Check that the existing cluster answers with a Ray that Everstep runs on, or has answered
    this home before.

    Raises CannotStart.
    """
    try:
        version = await ray.version()
    except RayError as exc:
        if not isinstance(exc, RayRefused) and settings.reached_before:
            log.warning(
                "the Ray cluster does not answer; runs wait until it does", problem=str(exc)
            )
            return
        raise CannotStart(
            f"{exc}; set --ray-address to the URL of a running cluster's dashboard, for example "
            "http://head:8265 (`ray start --head --dashboard-host=0.0.0.0`)"
        ) from exc
    if problem := RAY.problem(version, f"the cluster at {settings.ray_address}"):
        raise CannotStart(problem)
    log.info("using an existing Ray cluster", dashboard=settings.ray_address, ray=version)
    settings.reached_path.write_text(f"{settings.ray_address}\n")
