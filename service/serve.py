"""``python -m service.serve``: one service process, from its arguments to its last line.

Exit code 0 after a graceful stop (SIGTERM, SIGINT), which also ends the embedded cluster with every process of it; 2 where the
arguments or the machine do not allow a start, with a message that says the way out. A SIGKILL leaves the embedded cluster and its
runs alone, and the next start adopts them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import FrameType

import structlog
import uvicorn
import uvloop
from fastapi import FastAPI

from service.api.context import ApiContext
from service.app import create_app
from service.auth import LOCAL_TOKEN_ID, ensure_local_token, ensure_metrics_token
from service.cluster_view import ClusterView
from service.db.engine import Database, DatabaseError
from service.db.events import EventStore
from service.db.lease import LeaseStore
from service.db.node_marks import NodeMarkStore
from service.db.notifications import NotificationStore
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.embedded.cluster import ClusterError, EmbeddedCluster
from service.embedded.supervisor import ClusterSupervisor
from service.figures import RunFigures
from service.home import HomeError, HomeLock, published_url
from service.logs import configure_logging
from service.notify import Notifier
from service.ray_jobs import RayEndpoint, RayError, RayJobs, RayRefused
from service.reconciler.leadership import Leadership
from service.reconciler.loop import Reconciler
from service.reconciler.scrub import ScrubRule
from service.reconciler.unhealthy import CordonRule
from service.settings import (
    DEFAULT_CPUS_PER_NODE,
    DEFAULT_HOST,
    DEFAULT_NODES,
    DEFAULT_PORT,
    Settings,
    SettingsError,
    cordon_settings,
    database_url,
    existing_ray_token,
    home_directory,
    metrics_token,
    notify_rule,
    pip_rule,
    request_limits,
    scrub_settings,
    storage_roots,
    tls_settings,
)
from service.storage_roots import StorageRoots
from storage.errors import StorageError
from storage.filesystem import Storage, open_storage

# Followers of events reconnect by themselves: a stop waits for other requests only, and no longer than this.
DRAIN_TIMEOUT_S = 5
EXIT_CANNOT_START = 2
_GC_THRESHOLDS = (10_000, 20, 50)
"""Objects made and not yet gone again, before the youngest are looked through; then how many such looks before an older one."""

log = structlog.get_logger("everstep")


class CannotStart(Exception):
    """This machine or its operator does not allow a start; the message says the way out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code."""
    configure_logging()
    cannot_start = (CannotStart, SettingsError, HomeError, ClusterError, StorageError, DatabaseError)
    try:
        settings = settings_of(argv)
        with interruptible(), HomeLock(settings), listening(settings) as listener:
            check_tls(settings)
            storage, database = opened(settings)
            with running_cluster(settings) as supervisor:
                # uvicorn takes this loop by itself only where it makes the loop.
                uvloop.run(serve(settings, listener, storage, database, supervisor))
    except cannot_start as exc:
        print(f"everstep serve: {exc}", file=sys.stderr)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:
        log.info("stopped before the service was up")
    return 0


def settings_of(argv: Sequence[str] | None) -> Settings:
    """Settings from arguments and environment. Raises SettingsError; argparse exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="everstep serve",
        description="Run the Everstep service, by default with a Ray cluster of its own on this machine. "
        "EVERSTEP_HOME (default ~/.everstep) is where it keeps its database, storage and tokens.",
    )
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on, 0 for a free one (default %(default)s)")
    parser.add_argument("--nodes", type=int, default=DEFAULT_NODES, help="worker nodes of the own cluster (default %(default)s)")
    parser.add_argument(
        "--cpus-per-node", type=int, default=DEFAULT_CPUS_PER_NODE, help="CPUs that each node offers (default %(default)s)"
    )
    parser.add_argument("--drills", action="store_true", help="allow failure drills through the API (or EVERSTEP_DRILLS=1)")
    parser.add_argument(
        "--ray-address",
        metavar="URL",
        help="use an existing Ray cluster: the URL of its dashboard, for example http://head:8265. Its token is taken from "
        "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        default="",
        help="postgresql+psycopg://… or sqlite:///… (or EVERSTEP_DATABASE, which no list of processes shows, or a file with it, "
        "EVERSTEP_DATABASE_FILE; default: SQLite in EVERSTEP_HOME)",
    )
    parser.add_argument(
        "--storage", metavar="URI", default="", help="directory or s3://… for runs; all nodes reach it (default: in EVERSTEP_HOME)"
    )
    parser.add_argument(
        "--storage-root",
        metavar="URI",
        action="append",
        help="directory or s3://bucket/prefix below which storage and the data of runs have to lie; repeat it for several "
        "(or EVERSTEP_STORAGE_ROOTS, separated by commas; default: anywhere)",
    )
    args = parser.parse_args(argv)
    cordon_runs, cordon_failures, cordon_window_s = cordon_settings()
    scrub_mb_per_s, scrub_interval_s = scrub_settings()
    rate_per_s, max_upload_bytes = request_limits()
    tls_cert, tls_key = tls_settings()
    return Settings(
        home=home_directory(),
        host=args.host,
        port=args.port,
        database_url=args.database or database_url(),
        storage_uri=args.storage,
        storage_roots=tuple(args.storage_root or storage_roots()),
        ray_address=args.ray_address,
        ray_token=existing_ray_token() if args.ray_address else None,
        nodes=args.nodes,
        cpus_per_node=args.cpus_per_node,
        public_url=os.environ.get("EVERSTEP_PUBLIC_URL", "").strip(),
        drills=args.drills or os.environ.get("EVERSTEP_DRILLS", "") not in ("", "0"),
        pip_rule=pip_rule(),
        cordon_runs=cordon_runs,
        cordon_failures=cordon_failures,
        cordon_window_s=cordon_window_s,
        scrub_mb_per_s=scrub_mb_per_s,
        scrub_interval_s=scrub_interval_s,
        rate_per_s=rate_per_s,
        max_upload_bytes=max_upload_bytes,
        metrics_token=metrics_token(),
        tls_cert=tls_cert,
        tls_key=tls_key,
        notify=notify_rule(),
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does: before the event loop is up, either unwinds."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[socket.socket]:
    """The API's socket, bound before anything is started. Raises CannotStart."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is; left on, every answer waits 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, settings.port))
        except (OSError, OverflowError) as exc:
            raise CannotStart(
                f"cannot listen on {settings.host}:{settings.port} ({exc}); stop what uses it, or choose another --port (0 takes a "
                "free one) or --host"
            ) from exc
        yield listener


def check_tls(settings: Settings) -> None:
    """See that certificate and key can be used, before anything is started. Raises CannotStart."""
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as exc:
        raise CannotStart(
            f"TLS cannot be served with {settings.tls_cert} and {settings.tls_key} ({exc}); see that both are PEM, belong "
            "together, and can be read by this user"
        ) from exc


def opened(settings: Settings) -> tuple[Storage, Database]:
    """Storage and database, tried out. Raises StorageError, DatabaseError, CannotStart."""
    storage = open_storage(settings.storage_uri)
    if problem := StorageRoots(settings.storage_roots).problem_of_storage(storage):
        raise CannotStart(f"--storage {problem}; choose another, or add a --storage-root")
    try:
        storage.probe()
    except StorageError as exc:
        raise CannotStart(f"{exc}; see that this user may write there, or choose another --storage") from exc
    try:
        database = Database(settings.database_url)
        database.migrate()
    except DatabaseError as exc:
        raise CannotStart(f"the database cannot be used: {exc}; check --database") from exc
    return storage, database


@contextlib.contextmanager
def running_cluster(settings: Settings) -> Iterator[ClusterSupervisor | None]:
    """The embedded cluster, ended on a graceful way out; None where another's is used."""
    if not settings.embedded:
        yield None
        return
    cluster = EmbeddedCluster(settings)
    supervisor = ClusterSupervisor(cluster)
    try:
        supervisor.start()
        yield supervisor
    finally:
        # A second signal must not leave half of the cluster behind.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        cluster.stop()


async def serve(
    settings: Settings, listener: socket.socket, storage: Storage, database: Database, supervisor: ClusterSupervisor | None
) -> None:
    """API and reconciler until SIGTERM or SIGINT. Raises CannotStart where an existing cluster cannot be reached."""
    existing = RayEndpoint(settings.ray_address, settings.ray_token) if settings.ray_address else None
    async with RayJobs(supervisor.endpoint if supervisor else lambda: existing) as ray:
        if supervisor is None:
            await reach(ray, settings)
        figures = RunFigures()
        url = base_url(settings, listener)
        reconciler = made_reconciler(settings, database, storage, ray, figures, settings.public_url or url)
        view = ClusterView(ray, supervisor.note if supervisor else None)
        context = ApiContext(
            database,
            storage,
            view,
            reconciler.lag_s,
            drills_enabled=settings.drills,
            pip_rule=settings.pip_rule,
            figures=figures,
            public_url=settings.public_url or url,
            rate_per_s=settings.rate_per_s,
            max_upload_bytes=settings.max_upload_bytes,
            storage_roots=StorageRoots(settings.storage_roots),
            ray=ray,
            notify=settings.notify,
        )
        await asyncio.to_thread(ensure_local_token, context.tokens, settings.token_path, local_token_id(settings, database))
        if settings.metrics_token:
            await asyncio.to_thread(ensure_metrics_token, context.tokens, settings.metrics_token)
        server = ApiServer(create_app(context), lambda: announce(settings, url, view), settings)
        with stopped_by_signals(server, context), published_url(settings.url_path, url):
            async with running(reconciler, supervisor):
                await server.serve([listener])
    database.close()


def made_reconciler(
    settings: Settings, database: Database, storage: Storage, ray: RayJobs, figures: RunFigures, public_url: str
) -> Reconciler:
    """The reconciler of this process. Replicas share a PostgreSQL and lead by turns; a SQLite file is held by the home's lock."""
    leadership = None if database.is_sqlite else Leadership(LeaseStore(database))
    mine = database if leadership is None else database.guarded(leadership.check)
    return Reconciler(
        RunStore(mine),
        EventStore(mine),
        NodeMarkStore(mine),
        ProjectStore(mine),
        storage,
        ray,
        cordon_rule=CordonRule(settings.cordon_runs, settings.cordon_failures, settings.cordon_window_s),
        scrub_rule=ScrubRule(settings.scrub_mb_per_s * 1e6, settings.scrub_interval_s),
        figures=figures,
        leadership=leadership,
        notifier=Notifier(NotificationStore(mine), settings.notify),
        public_url=public_url,
    )


def local_token_id(settings: Settings, database: Database) -> str:
    """Id of the token of this home: replicas that share a database have one each, and must not replace each other's."""
    if database.is_sqlite:
        return LOCAL_TOKEN_ID
    place = f"{socket.gethostname()}:{settings.home}"
    return f"{LOCAL_TOKEN_ID}_{hashlib.sha256(place.encode()).hexdigest()[:12]}"


@contextlib.asynccontextmanager
async def running(reconciler: Reconciler, supervisor: ClusterSupervisor | None) -> AsyncIterator[None]:
    """The reconciler, and the watch over the embedded cluster, for as long as the API serves."""
    stopping = asyncio.Event()
    tasks = [asyncio.create_task(reconciler.run(stopping), name="reconciler")]
    if supervisor is not None:
        tasks.append(asyncio.create_task(supervisor.run(stopping), name="cluster"))
    try:
        yield
    finally:
        stopping.set()
        await asyncio.gather(*tasks)


class ApiServer(uvicorn.Server):
    """uvicorn without signal handlers of its own, and with a call once it answers."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None], settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
                lifespan="on",
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settle_garbage_collection()
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def settle_garbage_collection() -> None:
    """What is there by now stays: the collector, for which every request waits, need not look through it, nor come so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def reach(ray: RayJobs, settings: Settings) -> None:
    """See that the existing cluster answers; one that has answered this home before may be away. Raises CannotStart."""
    try:
        version = await ray.version()
    except RayError as exc:
        if not isinstance(exc, RayRefused) and settings.reached_before:
            log.warning("the Ray cluster is away; runs wait until it answers", problem=str(exc))
            return
        raise CannotStart(
            f"{exc}; --ray-address takes the URL of a running cluster's dashboard, for example http://head:8265 "
            "(`ray start --head --dashboard-host=0.0.0.0`)"
        ) from exc
    log.info("using an existing Ray cluster", dashboard=settings.ray_address, ray=version)
    settings.reached_path.write_text(f"{settings.ray_address}\n")


@contextlib.contextmanager
def stopped_by_signals(server: uvicorn.Server, context: ApiContext) -> Iterator[None]:
    """SIGTERM and SIGINT end the server gracefully. Streams are closed first, since they would never end by themselves."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        log.info("stopping")
        context.feed.close()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def announce(settings: Settings, url: str, view: ClusterView) -> None:
    """Tell the operator that the API answers, and where."""
    print(f"Everstep is ready: {url}  (API reference: {url}/docs)")
    print(f"Ray dashboard:     {view.dashboard_url}")
    print(f"Admin token:       {settings.token_path}", flush=True)


def base_url(settings: Settings, listener: socket.socket) -> str:
    """The URL for clients on this machine; an address that means all interfaces is reached by loopback. With TLS it is the name
    that is in the certificate."""
    if settings.tls_cert is not None:
        return settings.public_url
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(main())
