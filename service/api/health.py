"""Routes of liveness and readiness."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Final, Literal

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.wire import Answer, Readiness, RunStatus
from service.api.auth import Caller
from service.api.blocking import db_read
from service.api.bodies import ApiRouter
from service.api.dependencies import Ready
from service.api.openapi import UNFIT_QUERY, problem_answers
from service.api.problems import RETRY_AFTER_S, ApiProblem
from service.api.readiness import ReadinessCheck
from service.db.runs import RunStore
from service.figures import RunFigures
from service.parts import part

router: Final = ApiRouter("", "health")


class Liveness(Answer):
    """Response of a process that serves requests."""

    status: Literal["alive"]


@router.get("/healthz", summary="Whether the service lives", responses=UNFIT_QUERY)
async def healthz() -> Liveness:
    return Liveness(status="alive")


@router.get(
    "/readyz",
    summary="Whether the service can work",
    responses={
        **UNFIT_QUERY,
        503: {"model": Readiness, "description": "The database or the storage is unavailable."},
    },
)
async def readyz(response: Response, ready: Ready) -> Readiness:
    """503 only if the database or the storage is unavailable; Ray's state and the reconciler's lag
    are in the body. The response may be a second old."""
    answer = await ready.answer()
    if answer.status == "unavailable":
        response.status_code = 503
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer


# ---------------------------------------------------------------- prometheus

# Metrics for Prometheus: the current state, read from the database on demand, the API's latency,
# and counters since the start of the process (service/figures.py). docs/observability.md explains
# each one.

_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


_SPEEDS: Final = {
    "samples_per_s": ("everstep_run_samples_per_second", "Samples per second of a training run."),
    "tokens_per_s": ("everstep_run_tokens_per_second", "Tokens per second of a training run."),
    "mfu": ("everstep_run_mfu_ratio", "Share of its devices' peak FLOP/s that a run uses."),
    "data_wait": (
        "everstep_run_data_wait_ratio",
        "Share of a run's newest step in which a rank waited for its loader.",
    ),
}
"""Metric of a step -> name and help of the gauge. Nothing is shown where it is not known."""


class Figures:
    """The metrics registry of one app."""

    def __init__(self, runs: RunStore, ready: ReadinessCheck, seen: RunFigures) -> None:
        self.registry = CollectorRegistry()
        self.seen = seen
        self.latency = Histogram(
            "everstep_api_request_seconds",
            "Seconds from a request's arrival to the first byte of its response.",
            ("method", "route", "status"),
            buckets=_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_StateCollector(runs, ready))


TheFigures = Annotated[Figures, part(Figures)]


class _StateCollector(Collector):
    """Collects the state when Prometheus scrapes, not before."""

    def __init__(self, runs: RunStore, ready: ReadinessCheck) -> None:
        self._runs = runs
        self._ready = ready

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Return nothing: collect() reads the database, which must not happen at registration."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        runs = GaugeMetricFamily("everstep_runs", "Runs by status.", labels=("status",))
        for status, count in self._runs.count_by_status().items():
            runs.add_metric((status.value,), count)
        yield runs
        checked = GaugeMetricFamily(
            "everstep_checked_checkpoints",
            "Checkpoints by the result of their last verification.",
            labels=("result",),
        )
        for result, count in zip(
            ("sound", "corrupt"), self._runs.checkpoints.count_checks(), strict=True
        ):
            checked.add_metric((result,), count)
        yield checked
        yield from self._waiting_and_training()
        yield from self._time()
        lag = self._ready.lag_s()
        if lag is not None:
            yield GaugeMetricFamily(
                "everstep_reconciler_lag_seconds",
                "Seconds since the reconciler's last finished tick.",
                lag,
            )

    def _waiting_and_training(self) -> Iterator[GaugeMetricFamily]:
        now = self._runs.clock()
        oldest: dict[str, float] = {}
        ranks: dict[str, int] = {}
        speeds = [GaugeMetricFamily(*each, labels=("project", "run")) for each in _SPEEDS.values()]
        for run in self._runs.live():
            oldest.setdefault(run.project, 0.0)
            ranks[run.project] = ranks.get(run.project, 0) + (run.world_size or 0)
            if run.status == RunStatus.QUEUED:
                waited_s = max(0.0, now - run.time_ledger["at_us"] / 1e6)
                oldest[run.project] = max(oldest[run.project], waited_s)
            elif run.status == RunStatus.RUNNING:
                for name, family in zip(_SPEEDS, speeds, strict=True):
                    if (value := run.metrics.get(name)) is not None:
                        family.add_metric((run.project, run.id), value)
        waiting = GaugeMetricFamily(
            "everstep_queue_oldest_seconds",
            "How long the oldest QUEUED run has been waiting; 0 without one.",
            labels=("project",),
        )
        training = GaugeMetricFamily("everstep_ranks", "Running ranks.", labels=("project",))
        for project in oldest:
            waiting.add_metric((project,), oldest[project])
            training.add_metric((project,), ranks[project])
        yield waiting
        yield training
        yield from speeds

    def _time(self) -> Iterator[GaugeMetricFamily]:
        """Yield gauges: time may move between buckets later, and a counter must never decrease."""
        spent = GaugeMetricFamily(
            "everstep_run_time_seconds",
            "Wall time of all runs by bucket.",
            labels=("project", "bucket"),
        )
        share = GaugeMetricFamily(
            "everstep_goodput_ratio",
            "Productive share of all time except queued and paused, over all runs.",
            labels=("project",),
        )
        for project in self._runs.time_by_project(self._runs.clock()):
            for bucket, seconds in project.buckets.model_dump().items():
                spent.add_metric((project.project, bucket), seconds)
            if project.goodput is not None:
                share.add_metric((project.project,), project.goodput)
        yield spent
        yield share


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **problem_answers(),
    },
)
async def get_figures(figures: TheFigures, caller: Caller) -> Response:
    """In Prometheus' text format, for all projects. A token of one project gets 403."""
    if caller.project is not None:
        raise ApiProblem(
            403,
            "forbidden",
            f"metrics cover all projects, but token {caller.name!r} only has access to "
            f"{caller.project}; use another token",
        )
    text = await db_read(generate_latest, figures.registry)
    return Response(text + generate_latest(figures.seen.registry), media_type=CONTENT_TYPE_LATEST)


class LatencyMiddleware:
    """Measures the latency by route, not by path: ids must not become labels."""

    def __init__(self, app: ASGIApp, figures: Figures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def timed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                labels = (scope["method"], route, str(message["status"]))
                self._figures.latency.labels(*labels).observe(time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, timed_send)
