"""Poll Ray for the state of jobs, the live nodes, and stray jobs."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from everstep.wire import RunStatus
from service.cluster.ray_jobs import RAY_PYTHON, Job, JobNotFound, RayError, RayJobs
from service.db.node_marks import NodeMarks
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.model.states import SUBMITTED
from service.reconciler.facts import JobFact, NodeState, StrayJob, submission_id

POLL_INTERVAL_S: Final = 2.0
"""Seconds between two requests while runs are live and unchanged. Each wakes up four
processes."""
IDLE_POLL_INTERVAL_S: Final = 10.0
SWEEP_INTERVAL_S: Final = 10.0
MANY_JOBS: Final = 64
"""Number of jobs above which the list of all jobs is requested, not each job."""
PATIENCE_S: Final = 0.2
"""Longest wait of a tick for Ray's answer. A later tick takes a late answer."""


JobKey = tuple[str, int, bool]
"""Run id, submission, and whether Ray was known to have the job at the time of the request. "No
such job" from before the submission says nothing about the time after it."""


@dataclass(frozen=True)
class RayAnswer:
    """Ray's answer to one poll."""

    jobs: Mapping[JobKey, JobFact]
    nodes: tuple[NodeState, ...] | None
    """Live nodes, if a run waits for them or may grow again."""
    problem: str | None
    """Why a part of the answer is missing, or None."""
    strays: tuple[str, ...] | None = None
    """Ids of stray jobs; None if they were not searched."""


class RayPoller:
    """Polls Ray in the background. Its state is only a cache."""

    def __init__(self, ray: RayJobs, runs: RunStore, node_marks: NodeMarks) -> None:
        self._ray = ray
        self._runs = runs
        self._node_marks = node_marks
        self._polled_about: object = None
        self._polled_at = float("-inf")
        self._swept_at = float("-inf")
        self._request: asyncio.Task[RayAnswer] | None = None
        self._strays: dict[str, float] = {}
        self._refusals: dict[tuple[str, int], str] = {}
        """Run and submission -> why its driver ended without touching the storage."""
        self._last_words: dict[tuple[str, int], str] = {}
        """Run and submission -> last lines of a driver that ended before it began."""
        self._lost_nodes: set[str] = set()
        """Dead nodes of jobs that Ray calls running. A head that came back with its state does not
        notice that their drivers are gone."""

    def strays(self) -> tuple[StrayJob, ...]:
        """Return the known stray jobs."""
        now = time.monotonic()
        return tuple(StrayJob(job_id, now - since) for job_id, since in self._strays.items())

    def refusal(self, run_id: str, submission: int) -> str | None:
        """Return why a submission's driver ended without touching the storage, or None."""
        return self._refusals.get((run_id, submission))

    def last_words(self, run_id: str, submission: int) -> str | None:
        """Return the last lines of a driver that ended before it began, or None."""
        return self._last_words.get((run_id, submission))

    def keep(self, run_ids: Collection[str]) -> None:
        """Forget all runs but these."""
        for texts in (self._refusals, self._last_words):
            for key in [key for key in texts if key[0] not in run_ids]:
                del texts[key]

    async def close(self) -> None:
        """Cancel an open request."""
        if self._request is not None:
            self._request.cancel()
            await asyncio.gather(self._request, return_exceptions=True)

    async def poll(self, rows: Sequence[RunRow]) -> RayAnswer | None:
        """Return an answer that came since the last tick, or None. A slow Ray delays only what
        needs it."""
        if self._request is None:
            if not self._is_due(rows):
                return None
            self._request = asyncio.create_task(self._poll(rows), name="poll-ray")
        await asyncio.wait({self._request}, timeout=PATIENCE_S)
        if not self._request.done():
            return None
        request, self._request = self._request, None
        answer = request.result()
        if answer.strays is not None:
            now = time.monotonic()
            self._strays = {job_id: self._strays.get(job_id, now) for job_id in answer.strays}
        return answer

    def _is_due(self, rows: Sequence[RunRow]) -> bool:
        """Return whether to poll Ray now: if the runs changed, or after an interval."""
        about = [(row.id, row.status, row.submission, row.ray_job_id) for row in rows]
        interval = POLL_INTERVAL_S if rows else IDLE_POLL_INTERVAL_S
        now = time.monotonic()
        if about == self._polled_about and now - self._polled_at < interval:
            return False
        self._polled_about, self._polled_at = about, now
        return True

    async def _poll(self, rows: Sequence[RunRow]) -> RayAnswer:
        """Request the jobs of all submitted runs, nodes if a run waits for them, and at times
        strays."""
        submitted = [row for row in rows if row.status in SUBMITTED]
        if len(submitted) > MANY_JOBS:
            found = await self._listed(submitted)
        else:
            found = await asyncio.gather(*(self._job(row) for row in submitted))
        jobs = {job_key(row): fact for row, (fact, _) in zip(submitted, found, strict=True)}
        problem = next((problem for _, problem in found if problem), None)
        nodes, strays = None, None
        try:
            if any(row.status == RunStatus.QUEUED or row.shrunk is not None for row in rows):
                nodes = await self._nodes()
            elif not submitted:
                await self._ray.version()
            if self._is_sweep_due(bool(rows)):
                strays = await self._sweep()
        except RayError as exc:
            problem = str(exc)
        return RayAnswer(jobs, nodes, problem, strays)

    async def _nodes(self) -> tuple[NodeState, ...]:
        """Return the live nodes with their marks.

        Marks are read last, so that an acknowledged mark counts from the next start on.
        """
        nodes = await self._ray.live_nodes()
        rows = await asyncio.to_thread(self._node_marks.all)
        marks = {node_id: row.mark for node_id, row in rows.items()}
        return tuple(
            NodeState(
                node.node_id,
                node.resources,
                mark.state if (mark := marks.get(node.node_id)) else None,
            )
            for node in nodes
        )

    async def _job(self, row: RunRow) -> tuple[JobFact, str | None]:
        """Return the fact about a run's job, and the problem if it is unknown."""
        try:
            job = await self._ray.job(submission_id(row.id, row.submission))
        except JobNotFound:
            return JobFact.MISSING, None
        except RayError as exc:
            return JobFact.UNKNOWN, str(exc)
        self._note_end(row, job)
        return JobFact.ENDED if self._has_ended(job) else JobFact.ALIVE, None

    async def _listed(self, rows: Sequence[RunRow]) -> list[tuple[JobFact, str | None]]:
        """Return the same for many runs, by one request."""
        try:
            listed = {job.submission_id: job for job in await self._ray.jobs()}
        except RayError as exc:
            return [(JobFact.UNKNOWN, str(exc))] * len(rows)
        ended = {job_id: self._has_ended(job) for job_id, job in listed.items()}
        for row in rows:
            if job := listed.get(submission_id(row.id, row.submission)):
                self._note_end(row, job)
        facts = {None: JobFact.MISSING, True: JobFact.ENDED, False: JobFact.ALIVE}
        return [(facts[ended.get(submission_id(row.id, row.submission))], None) for row in rows]

    def _note_end(self, row: RunRow, job: Job) -> None:
        if job.storage_problem is not None:
            self._refusals[row.id, row.submission] = job.storage_problem
        if job.last_words is not None:
            self._last_words[row.id, row.submission] = job.last_words

    def _is_sweep_due(self, busy: bool) -> bool:
        first = self._swept_at == float("-inf")
        return (
            busy or first or bool(self._strays)
        ) and time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S

    async def _sweep(self) -> tuple[str, ...]:
        """Return the stray jobs: live jobs of our runs that ended or have a newer submission.

        Also find the drivers' dead nodes.
        """
        jobs = [job for job in await self._ray.jobs() if not job.status.ended]
        nodes = {job.driver_node_id for job in jobs if job.driver_node_id is not None}
        self._lost_nodes = {node_id for node_id in nodes if await self._ray.is_dead(node_id)}
        self._swept_at = time.monotonic()
        return tuple(
            await asyncio.to_thread(
                self._strays_among, [job for job in jobs if not self._has_ended(job)]
            )
        )

    def _has_ended(self, job: Job) -> bool:
        return job.status.ended or job.driver_node_id in self._lost_nodes

    def _strays_among(self, jobs: Sequence[Job]) -> list[str]:
        strays = []
        for job in jobs:
            run_id, submission = job.metadata.get("run_id"), job.metadata.get("submission", "")
            row = self._runs.get(run_id) if run_id and submission.isdecimal() else None
            # A run that is not in our database may belong to another service on the same cluster.
            if row is not None and _is_stray(int(submission), row):
                strays.append(job.submission_id)
        return strays


def _is_stray(submission: int, row: RunRow) -> bool:
    """Return whether a live job of a run has no business any more. One that the database does not
    know was submitted with a newer database than this one, which an operator may have put back."""
    if submission > row.submission:
        return False
    return row.status not in SUBMITTED or submission < row.submission


def job_key(row: RunRow) -> JobKey:
    return row.id, row.submission, row.ray_job_id is not None


# ---------------------------------------------------------------- entrypoint

# The command of a submission's Ray job, and the points at which tests kill this process.

CRASH_POINT_VARIABLE = "EVERSTEP_CRASH_POINT"

Entrypoint = Callable[[str, int], str]
"""(run id, submission) -> the shell command of its Ray job."""


DRIVER: Final = f'"{RAY_PYTHON}" -P -m train_fn.driver'
"""The driver, with the Python of the cluster's Ray."""


def driver_entrypoint(storage_uri: str, program: str = DRIVER) -> Entrypoint:
    """Return the shell command that starts a submission's driver. The embedded cluster has a
    ``program`` of its own for that."""

    def command(run_id: str, submission: int) -> str:
        words = ["--storage", storage_uri, "--run-id", run_id, "--submission", str(submission)]
        return f"{program} {shlex.join(words)}"

    return command


def crash_point(name: str) -> None:
    """Kill this process if EVERSTEP_CRASH_POINT is ``name``. Tests try each line of a start so."""
    if os.environ.get(CRASH_POINT_VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
