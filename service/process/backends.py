"""What a service stands on: its storage, its database and its Ray cluster, opened at the start."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import structlog

from everstep.supported import RAY, problem_here
from service.cluster.ray_errors import RayError, RayRefused
from service.cluster.ray_jobs import RayJobs
from service.db.engine import Database
from service.db.errors import DatabaseError
from service.db.node_marks import NodeMarkStore
from service.db.storage_identity import StorageRecords
from service.embedded.cluster import EmbeddedCluster
from service.embedded.supervisor import ClusterSupervisor
from service.settings import CannotStart, Settings
from service.storage_identity.adoption import begin_with
from service.storage_identity.gate import StorageGate
from service.submission_rules.storage_roots import StorageRoots
from storage.errors import StorageError, StorageOwned
from storage.filesystem import Storage, open_storage

LOOPBACK = "127.0.0.1"
LOOPBACK_S = 5.0

log = structlog.get_logger("everstep")


def opened(settings: Settings) -> tuple[Storage, Database]:
    """Open and probe storage and database. Raises StorageError, DatabaseError, CannotStart."""
    storage = open_storage(settings.storage_uri)
    if problem := StorageRoots(settings.storage_roots).problem_of_storage(storage):
        raise CannotStart(f"--storage {problem}; choose another, or add a --storage-root")
    if not storage.creates_exclusively:
        log.warning(
            "the storage cannot create a file only where there is none, so that two processes may "
            "both succeed in writing one name; see docs/checkpoints.md, Which storage promises "
            "what",
            storage=storage.uri,
        )
    try:
        storage.probe()
    except StorageError as exc:
        raise CannotStart(f"{exc}; let this user write there, or choose another --storage") from exc
    try:
        database = Database(settings.database_url)
        database.migrate()
    except DatabaseError as exc:
        raise CannotStart(f"the database cannot be used: {exc}; check --database") from exc
    gate = StorageGate(storage, StorageRecords(database), service=str(settings.home))
    try:
        begin_with(gate, storage, NodeMarkStore(database), settings.adopt_storage)
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
