"""The execution of decisions. The process may die at any line: the next one finds what was done,
and does the rest.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Iterable

import structlog

from everstep.spec.run_spec import RunSpec
from everstep.wire import Reason, ReasonCode, RunStatus
from service.cluster.ray_jobs import JobNotFound, RayError, RayJobs
from service.db.runs import RunStore
from service.figures import RunFigures
from service.model.run_rows import RunRow
from service.model.states import TransitionConflict
from service.reconciler.facts import (
    ChangeStatus,
    Decision,
    Delivered,
    DeliverLimit,
    DeliverStop,
    EndJob,
    Grow,
    KeepLastWords,
    Preempt,
    SetReason,
    Shrink,
    Start,
    SubmitClaimed,
    submission_id,
)
from service.reconciler.ray_poller import Entrypoint, crash_point
from service.storage_identity import StorageGate
from storage.cluster import KNOWN_VARIABLE, Known
from storage.errors import StorageError
from storage.filesystem import Storage
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_control import Stop
from storage.run_dir import DRIVER_ATTEMPT, RunDir

log = structlog.get_logger(__name__)

PATIENCE_S = 1.0
"""Longest wait of a tick for the tasks that it started."""


class Executor:
    """Carries out decisions through the database, the run directory and Ray."""

    def __init__(
        self,
        runs: RunStore,
        storage: Storage,
        ray: RayJobs,
        entrypoint: Entrypoint,
        figures: RunFigures,
        gate: StorageGate,
        public_url: str | None = None,
    ) -> None:
        """``public_url`` is the base URL of our dashboard, which Ray's links to; None if
        unknown."""
        self._runs = runs
        self._storage = storage
        self._ray = ray
        self._entrypoint = entrypoint
        self._figures = figures
        self._gate = gate
        self._public_url = public_url
        self._acting: dict[str, asyncio.Task[None]] = {}
        """Run id -> the task that acts for it. No other task starts for that run meanwhile."""
        self.delivered: set[tuple[str, int, Stop]] = set()
        """Stops that this process delivered to drivers. A repeated delivery is harmless, so this
        need not be stored."""
        self.limits: set[tuple[str, int, int]] = set()
        """The same for limits of shrinking runs: run, submission, most ranks."""

    async def execute(self, decisions: Iterable[Decision]) -> None:
        """Carry out decisions: those of one run in order, those of different runs in parallel.

        A decision that fails is left to a later tick, with the following ones of its run. One that
        takes long continues in the background, so that a hanging Ray does not delay the journals
        of other runs.

        Raises DatabaseError.
        """
        by_run: dict[str, list[Decision]] = {}
        reasons: list[tuple[str, RunStatus, Reason | None]] = []
        for decision in decisions:
            if isinstance(decision, SetReason):
                reasons.append((decision.run_id, decision.expected, decision.reason))
                continue
            by_run.setdefault(_run_id(decision), []).append(decision)
        for run_id, due in by_run.items():
            if run_id not in self._acting:
                self._acting[run_id] = asyncio.create_task(
                    self._execute_for(run_id, due), name=f"execute-{run_id}"
                )
        if reasons:
            await asyncio.to_thread(self._runs.set_reasons, reasons)
        if self._acting:
            await asyncio.wait(self._acting.values(), timeout=PATIENCE_S)
        ended = {run_id: task for run_id, task in self._acting.items() if task.done()}
        for run_id in ended:
            del self._acting[run_id]
        # Read every exception: asyncio logs each one that nobody reads.
        problems = [task.exception() for task in ended.values()]
        for problem in filter(None, problems):
            raise problem

    def deliveries(self) -> Delivered:
        """Return what this process delivered to drivers."""
        return Delivered(self.delivered, self.limits)

    async def close(self) -> None:
        """Cancel the running tasks at any line. The next process finds what was done."""
        tasks = list(self._acting.values())
        self._acting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _execute_for(self, run_id: str, decisions: Iterable[Decision]) -> None:
        try:
            for decision in decisions:
                await self._execute_one(decision)
        except TransitionConflict as exc:
            # Someone else was faster, mostly a user. The next tick sees the change.
            log.debug("a decision came too late", run_id=run_id, found=str(exc))
        except (RayError, StorageError) as exc:
            log.warning(
                "a decision failed; a later tick tries again",
                decision=type(decision).__name__,
                run_id=run_id,
                problem=str(exc),
            )

    async def _execute_one(self, decision: Decision) -> None:
        match decision:
            case Start(run_id, after, limit):
                await self._start(run_id, after, limit)
            case Preempt(run_id, submission, by):
                await asyncio.to_thread(self._runs.preempt, run_id, submission, by)
                log.info("a run is paused for another one", run_id=run_id, by=by)
            case Shrink(run_id, submission, limit, by):
                await asyncio.to_thread(self._runs.shrink, run_id, submission, limit, by)
                log.info("a run shrinks for another one", run_id=run_id, workers=limit, by=by)
                await self._deliver_limit(run_id, submission, limit)
            case DeliverLimit(run_id, submission, limit):
                await self._deliver_limit(run_id, submission, limit)
            case Grow(run_id, submission):
                await self._grow(run_id, submission)
            case SubmitClaimed(run_id, submission):
                await self._submit_claimed(await self._run(run_id, submission))
            case DeliverStop(run_id, submission, stop):
                await asyncio.to_thread(
                    RunDir(self._storage, run_id).request_stop, submission, stop
                )
                self.delivered.add((run_id, submission, stop))
                log.info(
                    "sent a driver the request to stop",
                    run_id=run_id,
                    submission=submission,
                    stop=stop,
                )
            case KeepLastWords(run_id, submission, text):
                await asyncio.to_thread(self._keep_last_words, run_id, submission, text)
            case EndJob(job_id):
                await self._end_job(job_id)
            case ChangeStatus():
                await asyncio.to_thread(
                    self._runs.transition,
                    decision.run_id,
                    decision.expected,
                    decision.to,
                    decision.reason,
                    submission=decision.submission,
                )
                log.info(
                    "run changed",
                    run_id=decision.run_id,
                    status=decision.to.value,
                    reason=decision.reason.message,
                )

    def _keep_last_words(self, run_id: str, submission: int, text: str) -> None:
        run_dir = RunDir(self._storage, run_id)
        if not run_dir.rank_logs_of(submission, DRIVER_ATTEMPT):
            lines = [LogRecord(time.time(), "ERROR", line) for line in text.splitlines()]
            with RankLogWriter(run_dir, submission, DRIVER_ATTEMPT, None) as driver_log:
                driver_log.write(lines)

    async def _start(self, run_id: str, after: int, limit: int | None) -> None:
        """Write the spec, claim the submission, submit the job. A claimed submission so has a
        spec."""
        run = await self._run(run_id, after)
        try:
            known = await asyncio.to_thread(self._gate.check_run, run)
            await asyncio.to_thread(self._write_request, run, limit)
        except StorageError as exc:
            await self._say_unavailable(run, exc)
            raise
        crash_point("before_claim")
        run = await asyncio.to_thread(self._runs.claim_submission, run_id, after, limit)
        if after == 0:
            self._figures.started(run, run.time_ledger["spent_us"].get("queued", 0) / 1e6)
        crash_point("after_claim")
        await self._submit(run, known)

    async def _say_unavailable(self, run: RunRow, problem: StorageError) -> None:
        reason = Reason(code=ReasonCode.STORAGE_UNAVAILABLE, message=str(problem))
        if run.reason != reason:
            await asyncio.to_thread(self._runs.set_reason, run.id, run.status, reason)

    def _write_request(self, run: RunRow, limit: int | None) -> None:
        """Write what the driver needs: the spec, the deadline and the limit of ranks."""
        run_dir, spec = RunDir(self._storage, run.id), RunSpec.model_validate(run.spec)
        if spec.recovery.deadline_s is not None:
            run_dir.write_deadline(run.created_at + spec.recovery.deadline_s)
        if run.status == RunStatus.QUEUED:
            run_dir.write_workers_limit(limit)
        run_dir.write_spec(spec)

    async def _deliver_limit(self, run_id: str, submission: int, limit: int) -> None:
        await asyncio.to_thread(RunDir(self._storage, run_id).write_workers_limit, limit)
        self.limits.add((run_id, submission, limit))

    async def _grow(self, run_id: str, submission: int) -> None:
        """Lift a run's limit. The file comes first: after a crash the row still says shrunk, so
        that it is tried again."""
        run = await self._run(run_id, submission)
        await asyncio.to_thread(
            RunDir(self._storage, run_id).write_workers_limit, run.workers_limit
        )
        self.limits = {limit for limit in self.limits if limit[0] != run_id}
        await asyncio.to_thread(self._runs.unshrink, run_id, submission)
        log.info("a shrunk run may grow again", run_id=run_id)

    async def _submit_claimed(self, run: RunRow) -> None:
        try:
            known = await asyncio.to_thread(self._gate.check_run, run)
        except StorageError as exc:
            await self._say_unavailable(run, exc)
            raise
        await self._submit(run, known)

    async def _submit(self, run: RunRow, known: Known) -> None:
        metadata = {
            "run_id": run.id,
            "run_name": run.name,
            "project": run.project,
            "submission": str(run.submission),
        }
        if self._public_url is not None:
            metadata["everstep"] = f"{self._public_url}/runs/{run.id}"
        # In the environment, not an argument: the driver of an older version ignores a variable.
        entrypoint = (
            f"{KNOWN_VARIABLE}={shlex.quote(known.to_text())} "
            f"{self._entrypoint(run.id, run.submission)}"
        )
        job_id = await self._ray.submit(submission_id(run.id, run.submission), entrypoint, metadata)
        crash_point("after_submit")
        await asyncio.to_thread(self._runs.record_job, run.id, run.submission, job_id)
        crash_point("after_record")
        log.info("submitted", run_id=run.id, submission=run.submission, ray_job=job_id)

    async def _end_job(self, job_id: str) -> None:
        try:
            await self._ray.stop(job_id)
        except JobNotFound:
            return
        log.info("stopped a Ray job", ray_job=job_id)

    async def _run(self, run_id: str, submission: int) -> RunRow:
        """Return the run now. Raises TransitionConflict if it has another submission."""
        run = await asyncio.to_thread(self._runs.get, run_id)
        if run is None or run.submission != submission:
            raise TransitionConflict(
                run_id,
                run.status if run else None,
                f"submission {submission} is no longer its newest",
            )
        return run


def _run_id(decision: Decision) -> str:
    return (
        decision.submission_id.rpartition("-")[0]
        if isinstance(decision, EndJob)
        else decision.run_id
    )
