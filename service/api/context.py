"""The objects that request handlers share: stores, storage, the view of the cluster, rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Protocol

from fastapi import Depends, Request

from everstep.options.serve import (
    DEFAULT_MAX_CODE_BYTES,
    DEFAULT_MAX_UPLOAD_BYTES,
    DEFAULT_RATE_PER_S,
)
from service.api.blocking_calls import BlockingCalls
from service.api.event_feed import EventFeed
from service.api.followers import Followers
from service.api.goodput_summary import TimeBook
from service.api.kept_answers import KeptAnswers
from service.api.known_tokens import KnownTokens
from service.api.log_in_codes import LogInCodes
from service.api.log_views import LogViews
from service.api.rate_limit import RateLimit
from service.api.readiness import ClusterProbe, ReadinessCheck
from service.api.token_use import TokenUse
from service.cluster.deployment_checks import DeploymentChecks
from service.cluster.ray_dashboard import RayDashboard
from service.cluster.ray_jobs import RayJobs
from service.control_files.kept_checkpoints import KeptSteps
from service.control_files.node_marks import MarksFile
from service.db.alerts import AlertStore
from service.db.audit import AuditStore
from service.db.code_archives import CodeArchives
from service.db.engine import Database
from service.db.events import EventStore
from service.db.node_marks import NodeMarkStore
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.db.series import SeriesStore
from service.db.sessions import SessionStore
from service.db.sweeps import SweepStore
from service.db.tokens import TokenStore
from service.db.users import UserStore
from service.figures import RunFigures
from service.identity.provider import Provider
from service.model.prices import NO_PRICES, Prices
from service.storage_identity.gate import StorageGate
from service.submission_rules.packages import NO_PACKAGES, PipRule
from service.submission_rules.storage_roots import ANYWHERE, StorageRoots
from service.submission_rules.webhooks import NOBODY, NotifyRule
from storage.filesystem import Storage


class ClusterView(ClusterProbe, Protocol):
    """What the API knows of the Ray cluster."""

    @property
    def dashboard_url(self) -> str | None:
        """Return the Ray dashboard's base URL without a trailing slash; None until it is known.
        Never blocks."""


class ApiContext:
    """Everything that the handlers of one app share."""

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
        ray_dashboard: RayDashboard | None = None,
        notify: NotifyRule = NOBODY,
        has_mail: bool = False,
        embedded: bool = False,
        prices: Prices = NO_PRICES,
        provider: Provider | None = None,
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
        """Base URL of this service for browsers, without a trailing slash; None if unknown."""
        self.max_upload_bytes = max_upload_bytes
        self.max_code_bytes = max_code_bytes
        self.storage_roots = storage_roots
        self.ray = ray
        self.ray_dashboard = ray_dashboard
        """Passes requests on to Ray's dashboard; None passes on none."""
        self.notify = notify
        self.has_mail = has_mail
        """Whether alerts can be sent by e-mail."""
        self.prices = prices
        self.provider = provider
        """Identity provider at which people log in; None lets only tokens log in."""
        self.embedded = embedded
        """Whether user code runs as this service's own user."""
        self.runs = RunStore(database, clock)
        self.events = EventStore(database, clock)
        self.series = SeriesStore(database)
        self.storage_gate = StorageGate(storage, self.runs.storage, service=public_url or "")
        self.kept_steps = KeptSteps(storage, self.runs.checkpoints)
        self.time_book = TimeBook(self.runs)
        self.sweeps = SweepStore(database, clock)
        self.tokens = TokenStore(database, clock)
        self.sessions = SessionStore(database, clock)
        self.users = UserStore(database, clock)
        self.log_in_codes = LogInCodes(clock)
        self.projects = ProjectStore(database, clock)
        self.alerts = AlertStore(database, clock)
        self.code_archives = CodeArchives(database, clock)
        self.audit = AuditStore(database, clock)
        database.companion = self.audit.join
        self.rate_limit = RateLimit(rate_per_s)
        self.node_marks = NodeMarkStore(database, clock)
        self.marks_file = MarksFile(storage, self.node_marks, self.storage_gate.require)
        self.deployment_checks = DeploymentChecks(storage, ray, clock)
        self.calls = calls = BlockingCalls(database)
        self.database_call = calls.database_call
        self.database_lookup = calls.database_lookup
        self.database_write = calls.database_write
        self.storage_call = calls.storage_call
        self.long_storage_call = calls.long_storage_call
        self.feed = EventFeed(self.events, calls)
        self.followers = Followers(self.tokens, self.sessions, calls)
        self.logs = LogViews(storage, calls)
        self.readiness = ReadinessCheck(
            database, storage, self.storage_gate, cluster_view, reconciler_lag_s
        )
        self.token_use = TokenUse(self.tokens, clock, calls)
        self.kept_answers = KeptAnswers()
        self.known_tokens = KnownTokens()


async def _context(request: Request) -> ApiContext:
    # FastAPI would call a dependency that is not async in a thread, for each request.
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]
