"""What handlers work with: stores, storage, the view of the cluster, and threads for calls that
block."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final, ParamSpec, Protocol, TypeVar

import anyio
import anyio.to_thread
from fastapi import Depends, Request

from everstep.wire import ClusterInfo
from service.api.event_feed import EventFeed
from service.api.followers import Followers
from service.api.goodput_summary import TimeBook
from service.api.kept_answers import KeptAnswers
from service.api.known_tokens import KnownTokens
from service.api.log_views import LogViews
from service.api.rate_limit import RateLimit
from service.api.readiness import ReadinessCheck
from service.api.token_use import TokenUse
from service.api.write_queue import WriteQueue
from service.cluster.deployment_checks import DeploymentChecks
from service.cluster.ray_jobs import RayJobs
from service.control_files.kept_checkpoints import KeptSteps
from service.control_files.node_marks import MarksFile
from service.db.audit import AuditStore
from service.db.code_archives import CodeArchives
from service.db.engine import Database
from service.db.events import EventStore
from service.db.node_marks import NodeMarkStore
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.db.series import SeriesStore
from service.db.sessions import SessionStore
from service.db.tokens import TokenStore
from service.figures import RunFigures
from service.settings import DEFAULT_MAX_CODE_BYTES, DEFAULT_MAX_UPLOAD_BYTES, DEFAULT_RATE_PER_S
from service.storage_identity.gate import StorageGate
from service.submission_rules.packages import NO_PACKAGES, PipRule
from service.submission_rules.storage_roots import ANYWHERE, StorageRoots
from service.submission_rules.webhooks import NOBODY, NotifyRule
from storage.filesystem import Storage

P = ParamSpec("P")
T = TypeVar("T")

_DATABASE_THREADS: Final = 8
_STORAGE_THREADS: Final = 8


class ClusterView(Protocol):
    """What the API may know of the Ray cluster."""

    @property
    def dashboard_url(self) -> str | None:
        """Base URL of the Ray dashboard without a trailing slash; None while it is not known. Never
        blocks."""

    async def cluster(self) -> ClusterInfo:
        """The cluster and its nodes as Ray tells now; ``available`` False where it does not answer.
        Never raises for that."""


class ApiContext:
    """One for each app. Storage has its own threads, so that a store that hangs does not stop the
    database's."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        cluster_view: ClusterView,
        reconciler_lag_s: Callable[[], float | None],
        clock: Callable[[], float] = time.time,
        *,
        drills_enabled: bool = False,
        pip_rule: PipRule = NO_PACKAGES,
        figures: RunFigures | None = None,
        public_url: str | None = None,
        rate_per_s: float = DEFAULT_RATE_PER_S,
        max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES,
        max_code_bytes: int = DEFAULT_MAX_CODE_BYTES,
        storage_roots: StorageRoots = ANYWHERE,
        ray: RayJobs | None = None,
        notify: NotifyRule = NOBODY,
        embedded: bool = False,
    ) -> None:
        self.database = database
        self.storage = storage
        self.cluster_view = cluster_view
        self.reconciler_lag_s = reconciler_lag_s
        self.clock = clock
        self.drills_enabled = drills_enabled
        self.pip_rule = pip_rule
        self.figures = figures or RunFigures(clock)
        self.public_url = public_url
        """Base URL of this service as browsers reach it, without a trailing slash; None where it is
        not known."""
        self.max_upload_bytes = max_upload_bytes
        self.max_code_bytes = max_code_bytes
        self.storage_roots = storage_roots
        self.notify = notify
        self.embedded = embedded
        """Whether code of runs has this service's own user."""
        self.runs = RunStore(database, clock)
        self.events = EventStore(database, clock)
        self.series = SeriesStore(database)
        self.storage_gate = StorageGate(storage, self.runs.storage)
        self.kept_steps = KeptSteps(storage, self.runs.checkpoints)
        self.time_book = TimeBook(self.runs)
        self.tokens = TokenStore(database, clock)
        self.sessions = SessionStore(database, clock)
        self.projects = ProjectStore(database, clock)
        self.code_archives = CodeArchives(database, clock)
        self.audit = AuditStore(database, clock)
        database.companion = self.audit.join
        self.rate_limit = RateLimit(rate_per_s)
        self.node_marks = NodeMarkStore(database, clock)
        self.marks_file = MarksFile(storage, self.node_marks)
        self.deployment_checks = DeploymentChecks(storage, ray, clock)
        self._database_threads = anyio.CapacityLimiter(_DATABASE_THREADS)
        self._storage_threads = anyio.CapacityLimiter(_STORAGE_THREADS)
        self._writes = WriteQueue(database)
        self.feed = EventFeed(self)
        self.followers = Followers(self)
        self.logs = LogViews(self)
        self.readiness = ReadinessCheck(self)
        self.token_use = TokenUse(self)
        self.kept_answers = KeptAnswers()
        self.known_tokens = KnownTokens()

    async def database_call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store's method in a thread."""
        return await anyio.to_thread.run_sync(
            partial(call, *args, **kwargs), limiter=self._database_threads
        )

    async def database_look(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store's method that only looks for few rows, by an index, in the event loop."""
        return await self.database.do_in_loop(partial(call, *args, **kwargs))

    async def database_write(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a store's method that looks and writes, where many requests do so at once: on SQLite
        in one thread, for one commit."""
        if self.database.is_sqlite:
            return await self._writes.do(partial(call, *args, **kwargs))
        return await self.database.do_in_loop(partial(call, *args, **kwargs), writes=True)

    async def storage_call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that reads or writes storage in a thread."""
        return await anyio.to_thread.run_sync(
            partial(call, *args, **kwargs), limiter=self._storage_threads
        )


async def _context(request: Request) -> ApiContext:
    # Not async, it would be called in a thread, once a request.
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]
