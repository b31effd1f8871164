"""One look at rows, jobs, journals and nodes, in the order that makes the facts safe to act on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from everstep.wire import RunStatus
from service.cluster.ray_answers import Job
from service.cluster.ray_errors import JobNotFound, RayError
from service.cluster.ray_jobs import RayJobs
from service.db.node_marks import NodeMarkStore
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.model.run_rows import RunRow
from service.model.states import SUBMITTED
from service.reconciler.decide import submission_id
from service.reconciler.drains import Drains
from service.reconciler.facts import (
    NOTHING_DELIVERED,
    Delivered,
    Facts,
    JobFact,
    NodeFacts,
    RunFacts,
    StrayJob,
    TailFact,
)
from service.reconciler.pace import in_pieces
from service.reconciler.tail import JournalTail
from service.storage_identity.gate import StorageGate
from storage.run_names import CheckpointName

ASK_INTERVAL_S: Final = 2.0
"""Between two questions to Ray while runs are live and nothing about them has changed: each wakes
four processes up."""
IDLE_ASK_INTERVAL_S: Final = 10.0
SWEEP_INTERVAL_S: Final = 10.0
MANY_JOBS: Final = 64
"""From so many jobs on Ray is asked for the list of all, and not for one after the other."""
PATIENCE_S: Final = 0.2
"""How long a look waits for Ray's answer; one that comes later is taken by a later look."""


JobKey = tuple[str, int, bool]
"""Run id, submission, and whether its job was known to be taken when it was asked about: an answer
"no such job" that was asked for before the job was submitted says nothing about it afterwards."""


@dataclass(frozen=True)
class RayAnswer:
    """What Ray said when it was asked."""

    jobs: Mapping[JobKey, JobFact]
    nodes: tuple[NodeFacts, ...] | None
    """Live nodes, where a run waits for them, or may grow again."""
    problem: str | None
    """Why an answer is missing; None where none is."""
    strays: tuple[str, ...] | None = None
    """Ids of jobs that should not live; None where they were not looked for."""


class Observer:
    """Gathers Facts. What it remembers it could ask for again: losing it costs a question.

    The order matters: rows, then Ray, then journals. A journal that was read to its end after Ray
    said that the job is over holds everything that the driver wrote.
    """

    def __init__(
        self,
        runs: RunStore,
        node_marks: NodeMarkStore,
        projects: ProjectStore,
        tail: JournalTail,
        ray: RayJobs,
        delivered: Callable[[], Delivered],
        gate: StorageGate,
        clock: Callable[[], float],
    ) -> None:
        self._runs = runs
        self._node_marks = node_marks
        self._projects = projects
        self._tail = tail
        self._drains = Drains(tail.drain)
        self._ray = ray
        self._delivered = delivered
        self._gate = gate
        self._clock = clock
        self._asked_about: object = None
        self._asked_at = float("-inf")
        self._swept_at = float("-inf")
        self._known: dict[str, RunRow] = {}
        """Live rows of the last look: those that have not changed need not be read again."""
        self._waiting: dict[str, tuple[RunRow, RunFacts]] = {}
        """Of those that wait, what the rows say."""
        self._question: asyncio.Task[RayAnswer] | None = None
        self._strays: dict[str, float] = {}
        self._refusals: dict[tuple[str, int], str] = {}
        """By run and submission, why a driver left the storage alone."""
        self._lost_nodes: set[str] = set()
        """Dead nodes whose jobs Ray calls running: nobody looks after these once a head has come
        back with its state."""
        self.ray_problem: str | None = "not asked yet"
        """Why Ray did not answer the last question; None where it did."""

    async def look(self) -> Facts:
        """One look. Raises DatabaseError where the database is away."""
        rows = await self._live_rows()
        answer = await self._ray_answer(rows)
        jobs = answer.jobs if answer else {}
        storage_problem = await asyncio.to_thread(self._gate.problem) if rows else None
        observed = await asyncio.to_thread(self._read_journals, rows, jobs, storage_problem is None)
        now = time.monotonic()
        strays = tuple(StrayJob(job_id, now - since) for job_id, since in self._strays.items())
        nodes, problem = (answer.nodes, answer.problem) if answer else (None, None)
        # Quotas are read last: a word that is acknowledged counts from the next start on.
        quotas = {} if nodes is None else await asyncio.to_thread(self._projects.quotas)
        return Facts(self._clock(), observed, nodes, problem, storage_problem, strays, quotas)

    async def _live_rows(self) -> list[RunRow]:
        """Rows of all live runs, oldest first, of which only those are read that have changed since
        the last look."""
        versions, known = await asyncio.to_thread(self._runs.live_versions), self._known
        changed = [
            run_id
            for run_id, version in versions.items()
            if run_id not in known or known[run_id].row_version != version
        ]
        for found in await in_pieces(self._runs.rows, changed):
            known |= found
        # A row may have changed, ended or gone since: whoever acts on it expects it as it is here.
        self._known = {run_id: known[run_id] for run_id in versions if run_id in known}
        return list(self._known.values())

    async def close(self) -> None:
        """Forget a question that is still open."""
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)

    async def _ray_answer(self, rows: Sequence[RunRow]) -> RayAnswer | None:
        """An answer that came since the last look. A Ray that is slow holds up nothing but what
        needs it."""
        if self._question is None:
            if not self._is_due(rows):
                return None
            self._question = asyncio.create_task(self._ask(rows), name="ask-ray")
        await asyncio.wait({self._question}, timeout=PATIENCE_S)
        if not self._question.done():
            return None
        question, self._question = self._question, None
        answer = question.result()
        self.ray_problem = answer.problem
        if answer.strays is not None:
            now = time.monotonic()
            self._strays = {job_id: self._strays.get(job_id, now) for job_id in answer.strays}
        return answer

    def _is_due(self, rows: Sequence[RunRow]) -> bool:
        """Whether to ask Ray now: at once when something about the runs changed, else now and
        then."""
        about = [(row.id, row.status, row.submission, row.ray_job_id) for row in rows]
        interval = ASK_INTERVAL_S if rows else IDLE_ASK_INTERVAL_S
        now = time.monotonic()
        if about == self._asked_about and now - self._asked_at < interval:
            return False
        self._asked_about, self._asked_at = about, now
        return True

    async def _ask(self, rows: Sequence[RunRow]) -> RayAnswer:
        """Ask about the jobs of all submitted runs, about nodes where a run waits for them, and now
        and then about strays."""
        submitted = [row for row in rows if row.status in SUBMITTED]
        if len(submitted) > MANY_JOBS:
            found = await self._listed(submitted)
        else:
            found = await asyncio.gather(*(self._job(row) for row in submitted))
        jobs = {_key(row): fact for row, (fact, _) in zip(submitted, found, strict=True)}
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

    async def _nodes(self) -> tuple[NodeFacts, ...]:
        """Live nodes with their marks. The marks are read last: a word that is acknowledged counts
        from the next start on."""
        nodes = await self._ray.live_nodes()
        words = await asyncio.to_thread(self._node_marks.all)
        marks = {node_id: word.mark for node_id, word in words.items()}
        return tuple(
            NodeFacts(
                node.node_id,
                node.resources,
                mark.state if (mark := marks.get(node.node_id)) else None,
            )
            for node in nodes
        )

    async def _job(self, row: RunRow) -> tuple[JobFact, str | None]:
        """The fact, and why it is not known: a job that cannot be asked about hides no other."""
        try:
            job = await self._ray.job(submission_id(row.id, row.submission))
        except JobNotFound:
            return JobFact.MISSING, None
        except RayError as exc:
            return JobFact.UNKNOWN, str(exc)
        self._note_refusal(row, job)
        return JobFact.ENDED if self._has_ended(job) else JobFact.ALIVE, None

    async def _listed(self, rows: Sequence[RunRow]) -> list[tuple[JobFact, str | None]]:
        """The same for many jobs, by one question."""
        try:
            listed = {job.submission_id: job for job in await self._ray.jobs()}
        except RayError as exc:
            return [(JobFact.UNKNOWN, str(exc))] * len(rows)
        ended = {job_id: self._has_ended(job) for job_id, job in listed.items()}
        for row in rows:
            if job := listed.get(submission_id(row.id, row.submission)):
                self._note_refusal(row, job)
        facts = {None: JobFact.MISSING, True: JobFact.ENDED, False: JobFact.ALIVE}
        return [(facts[ended.get(submission_id(row.id, row.submission))], None) for row in rows]

    def _note_refusal(self, row: RunRow, job: Job) -> None:
        if job.storage_problem is not None:
            self._refusals[row.id, row.submission] = job.storage_problem

    def _read_journals(
        self, rows: Sequence[RunRow], jobs: Mapping[JobKey, JobFact], may_read: bool
    ) -> tuple[RunFacts, ...]:
        """Facts of every run that is still live after its journal was read. In another storage than
        ours there is none."""
        observed, delivered = [], self._delivered()
        self._tail.keep(self._known)
        self._refusals = {
            key: problem for key, problem in self._refusals.items() if key[0] in self._known
        }
        reading = [row for row in rows if row.status in SUBMITTED] if may_read else []
        drained, read_ids = self._drains.look(reading), {row.id for row in reading}
        for known in rows:
            row, tail = drained.get(known.id, (known, TailFact.BEHIND))
            if known.id in read_ids and (
                known.id not in drained or row.submission != known.submission
            ):
                continue
            if row.status.terminal or row.status == RunStatus.PAUSED:
                continue
            if row.status == RunStatus.QUEUED:
                observed.append(self._facts_of_waiting(row))
                continue
            job = jobs.get(_key(known), JobFact.UNKNOWN)
            refusal = self._refusals.get((row.id, row.submission)) if job == JobFact.ENDED else None
            observed.append(replace(facts_of(row, delivered, job, tail), storage_problem=refusal))
        self._waiting = {
            facts.id: (self._known[facts.id], facts)
            for facts in observed
            if facts.status == RunStatus.QUEUED
        }
        return tuple(observed)

    def _facts_of_waiting(self, row: RunRow) -> RunFacts:
        """What its row says alone; of thousands that wait most are as they were at the last
        look."""
        seen = self._waiting.get(row.id)
        return seen[1] if seen is not None and seen[0] is row else facts_of(row)

    def _is_sweep_due(self, busy: bool) -> bool:
        first = self._swept_at == float("-inf")
        return (
            busy or first or bool(self._strays)
        ) and time.monotonic() - self._swept_at >= SWEEP_INTERVAL_S

    async def _sweep(self) -> tuple[str, ...]:
        """Jobs of our runs that live although the run ended or went on with a newer submission.
        Looks after drivers' nodes, too."""
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
            # A run that is not in our database may be another service's on the same cluster: not
            # ours to end.
            if row is not None and (
                row.status not in SUBMITTED or int(submission) < row.submission
            ):
                strays.append(job.submission_id)
        return strays


def facts_of(
    row: RunRow,
    delivered: Delivered = NOTHING_DELIVERED,
    job: JobFact = JobFact.UNKNOWN,
    tail: TailFact = TailFact.BEHIND,
) -> RunFacts:
    """Return the facts of a row, with what is known about its job and its journal."""
    scaling, deadline_s = row.stored_spec.scaling, row.stored_spec.recovery.deadline_s
    shrunk = row.shrunk or {}
    return RunFacts(
        id=row.id,
        status=row.status,
        created_at=row.created_at,
        project=row.project,
        priority=row.priority,
        reason=row.reason,
        stop=row.stop_requested,
        stop_at=row.stop_requested_at,
        stop_delivered=row.stop_requested is not None
        and (row.id, row.submission, row.stop_requested) in delivered.stops,
        submission=row.submission,
        job_recorded=row.ray_job_id is not None,
        submitted_at=row.submitted_at,
        fruitless=row.submission - _last_fruitful(row),
        job=job,
        tail=tail,
        deadline_at=None if deadline_s is None else row.created_at + deadline_s,
        steps_done=row.total_steps is not None and row.step >= row.total_steps,
        min_workers=scaling.min_workers,
        max_workers=scaling.max_workers,
        workers_limit=row.workers_limit,
        shrunk_to=shrunk.get("to"),
        shrunk_by=shrunk.get("by"),
        shrunk_at=shrunk.get("at"),
        shrink_delivered=row.shrunk is not None
        and (row.id, row.submission, row.shrunk["to"]) in delivered.limits,
        world_size=row.world_size,
        node_ids=tuple(worker["node_id"] for worker in row.workers),
        worker=scaling.resources_per_worker,
        use_gpu=scaling.use_gpu,
        placement_strategy=scaling.placement_strategy,
        accelerator_type=scaling.accelerator_type,
    )


def _key(row: RunRow) -> JobKey:
    return row.id, row.submission, row.ray_job_id is not None


def _last_fruitful(row: RunRow) -> int:
    """The newest submission that committed a checkpoint; 0 for none."""
    name = CheckpointName.parse(row.latest_checkpoint["name"]) if row.latest_checkpoint else None
    return name.submission if name else 0
