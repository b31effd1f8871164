"""The objects that request handlers share: stores, storage, the view of the cluster, rules."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Protocol, TypeVar

from fastapi import Depends, Request

from service.annex import Annex
from service.api.blocking import BlockingCalls
from service.api.callers import LogInCodes, RateLimit, TokenUse
from service.api.log_views import LogViews
from service.api.readiness import ClusterProbe, ReadinessCheck
from service.api.streams import EventFeed, Followers
from service.cluster.ray_jobs import RayJobs
from service.db.audit import AuditStore
from service.db.checkpoints import CodeArchives
from service.db.engine import Database
from service.db.events import EventStore, SeriesStore
from service.db.node_marks import NodeMarks
from service.db.projects import ProjectStore
from service.db.run_queries import TimeBook
from service.db.runs import RunStore
from service.db.tokens import SessionStore, TokenStore
from service.figures import RunFigures
from service.model.run_rows import RunHead
from service.settings import Settings
from service.storage_identity import StorageGate
from storage.filesystem import Storage

T = TypeVar("T")


class ClusterSource(ClusterProbe, Protocol):
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
        cluster_view: ClusterSource,
        reconciler_lag_s: Callable[[], float | None],
        clock: Callable[[], float] = time.time,
        *,
        settings: Settings,
        figures: RunFigures | None = None,
        public_url: str | None = None,
        ray: RayJobs | None = None,
        annexes: Sequence[Annex] = (),
    ) -> None:
        self.database = database
        self.storage = storage
        self.cluster_view = cluster_view
        self.reconciler_lag_s = reconciler_lag_s
        self.clock = clock
        self.settings = settings
        self.figures = figures or RunFigures(clock)
        self.public_url = public_url
        """Base URL of this service for browsers, without a trailing slash; None if unknown."""
        self.ray = ray
        self.annexes = tuple(annexes)
        self._parts: dict[type[Any], Any] = {}
        self.runs = RunStore(database, clock)
        self.events = EventStore(database, clock)
        self.series = SeriesStore(database)
        self.storage_gate = StorageGate(storage, self.runs.storage, service=public_url or "")
        self.time_book = TimeBook(self.runs)
        self.tokens = TokenStore(database, clock)
        self.sessions = SessionStore(database, clock)
        self.log_in_codes = LogInCodes(clock)
        self.projects = ProjectStore(database, clock)
        self.code_archives = CodeArchives(database, clock)
        self.audit = AuditStore(database, clock)
        database.companion = self.audit.join
        self.rate_limit = RateLimit(settings.rate_per_s)
        self.node_marks = NodeMarks(database, clock)
        self.calls = calls = BlockingCalls()
        self.database_call = calls.database_call
        self.database_write = calls.database_write
        self.storage_call = calls.storage_call
        self.long_storage_call = calls.long_storage_call
        self.folded = calls.folded
        self.feed = EventFeed(self.events, calls)
        self.followers = Followers(self.tokens, self.sessions, calls)
        self.logs = LogViews(storage, calls)
        self.readiness = ReadinessCheck(
            database, storage, self.storage_gate, cluster_view, reconciler_lag_s
        )
        self.token_use = TokenUse(self.tokens, clock, calls)
        self.kept_answers = KeptAnswers()

    def add_part(self, part: object) -> None:
        """Add what an annex opened for its routes."""
        self._parts[type(part)] = part

    def part(self, kind: type[T]) -> T | None:
        """Return the part of this type; None if there is none."""
        return self._parts.get(kind)

    @property
    def ray_url(self) -> str | None:
        """Return where a person opens Ray's dashboard: through this service, if it passes it on.
        None until the cluster's address is known."""
        url = self.cluster_view.dashboard_url
        relays = any(annex.relays_ray for annex in self.annexes)
        return f"{self.public_url}/ray" if url and self.public_url and relays else url


async def _context(request: Request) -> ApiContext:
    # FastAPI would call a dependency that is not async in a thread, for each request.
    context: ApiContext = request.app.state.context
    return context


Context = Annotated[ApiContext, Depends(_context)]


# ---------------------------------------------------------------- kept answers

# A cache of the JSON of runs that have ended, which many lists contain.

MOST_BYTES: Final = 96 << 20
"""Enough for some 60,000 runs."""
_OVERHEAD_BYTES: Final = 300
"""Memory per entry in addition to its text."""


class KeptAnswers:
    """JSON of runs by id, for one version of their row. Least recently used ones are evicted.
    Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[int, object, bytes]] = OrderedDict()

    def get(self, run: RunHead, about: object) -> bytes | None:
        """Return the cached JSON if neither the row version nor ``about`` has changed."""
        with self._lock:
            found = self._answers.get(run.id)
            if found is None or found[0] != run.row_version or found[1] != about:
                return None
            self._answers.move_to_end(run.id)
        return found[2]

    def keep(self, run: RunHead, about: object, answer: bytes) -> None:
        with self._lock:
            self._forget(run.id)
            self._answers[run.id] = (run.row_version, about, answer)
            self._num_bytes += len(answer) + _OVERHEAD_BYTES
            while self._num_bytes > self._most_bytes:
                self._forget(next(iter(self._answers)))

    def _forget(self, run_id: str) -> None:
        gone = self._answers.pop(run_id, None)
        if gone is not None:
            self._num_bytes -= len(gone[2]) + _OVERHEAD_BYTES
