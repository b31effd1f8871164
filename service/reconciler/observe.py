"""The observation of rows, jobs, journals and nodes, in the order that makes facts safe to act
on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from everstep.wire import Reason, ReasonCode, RunStatus
from service.cluster.ray_jobs import RayJobs
from service.db.node_marks import NodeMarks
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.model.rows import past
from service.model.run_rows import RunRow
from service.model.states import SUBMITTED
from service.reconciler.capacity import amounts
from service.reconciler.facts import (
    NOTHING_DELIVERED,
    Delivered,
    Facts,
    JobFact,
    RunFacts,
    TailFact,
)
from service.reconciler.ray_poller import JobKey, RayPoller, job_key
from service.reconciler.tail import Drains, JournalTail
from service.storage_identity import StorageGate
from storage.run_dir import CheckpointName


class Observer:
    """Gathers Facts. Its state is only a cache.

    The order is rows, then Ray, then journals. A journal that is read to its end after Ray said
    that the job is over has everything that the driver wrote.
    """

    def __init__(
        self,
        runs: RunStore,
        node_marks: NodeMarks,
        projects: ProjectStore,
        tail: JournalTail,
        ray: RayJobs,
        delivered: Callable[[], Delivered],
        gate: StorageGate,
        clock: Callable[[], float],
    ) -> None:
        self._runs = runs
        self._projects = projects
        self._tail = tail
        self._drains = Drains(tail.drain)
        self._poller = RayPoller(ray, runs, node_marks)
        self._delivered = delivered
        self._gate = gate
        self._clock = clock
        self._known: dict[str, RunRow] = {}
        """Live rows of the last tick. Unchanged rows are not read again."""

    async def observe(self) -> Facts:
        """Return the facts now. Raises DatabaseError if the database does not answer."""
        rows = await self._live_rows()
        answer = await self._poller.poll(rows)
        jobs = answer.jobs if answer else {}
        storage_problem = await asyncio.to_thread(self._gate.problem) if rows else None
        observed = await asyncio.to_thread(self._read_journals, rows, jobs, storage_problem is None)
        nodes, problem = (answer.nodes, answer.problem) if answer else (None, None)
        # Quotas are read last, so that an acknowledged change counts from the next start on.
        quotas = {} if nodes is None else await asyncio.to_thread(self._projects.quotas)
        return Facts(
            self._clock(),
            observed,
            nodes,
            problem,
            storage_problem,
            self._poller.strays(),
            quotas,
        )

    async def _live_rows(self) -> list[RunRow]:
        """Return the rows of all live runs, oldest first. Only changed rows are read."""
        versions, known = await asyncio.to_thread(self._runs.live_versions), self._known
        changed = [
            run_id
            for run_id, version in versions.items()
            if run_id not in known or known[run_id].row_version != version
        ]
        if changed:
            known |= await asyncio.to_thread(self._runs.rows, changed)
        # A row may change meanwhile. Each action expects it as it is here, and fails otherwise.
        self._known = {run_id: known[run_id] for run_id in versions if run_id in known}
        return list(self._known.values())

    async def close(self) -> None:
        """Cancel an open request to Ray."""
        await self._poller.close()

    def _read_journals(
        self, rows: Sequence[RunRow], jobs: Mapping[JobKey, JobFact], may_read: bool
    ) -> tuple[RunFacts, ...]:
        """Read the journals, and return the facts of each run that is still live.

        Without ``may_read``, on a storage that is not ours, no journal is read.
        """
        observed, delivered = [], self._delivered()
        self._tail.keep(self._known)
        self._poller.keep(self._known)
        reading = [row for row in rows if row.status in SUBMITTED] if may_read else []
        drained, read_ids = self._drains.read(reading), {row.id for row in reading}
        for known in rows:
            row, tail = drained.get(known.id, (known, TailFact.BEHIND))
            if known.id in read_ids and (
                known.id not in drained or row.submission != known.submission
            ):
                continue
            if row.status.terminal or row.status == RunStatus.PAUSED:
                continue
            if row.status == RunStatus.QUEUED:
                observed.append(facts_of(row, now=self._clock()))
                continue
            job = jobs.get(job_key(known), JobFact.UNKNOWN)
            refusal = self._poller.refusal(row.id, row.submission) if job == JobFact.ENDED else None
            words = self._poller.last_words(row.id, row.submission)
            facts = facts_of(row, delivered, job, tail, self._clock())
            observed.append(replace(facts, storage_problem=refusal, last_words=words))
        return tuple(observed)


# ---------------------------------------------------------------- row facts

# The facts in a run's row.


def facts_of(
    row: RunRow,
    delivered: Delivered = NOTHING_DELIVERED,
    job: JobFact = JobFact.UNKNOWN,
    tail: TailFact = TailFact.BEHIND,
    now: float = math.inf,
) -> RunFacts:
    """Return the facts of a row, with what is known about its job and its journal. Times later
    than ``now`` count as now."""
    spec = row.stored_spec
    scaling, deadline_s = spec.scaling, spec.recovery.deadline_s
    shrunk = row.shrunk or {}
    created_at = past(row.created_at, now)

    def maybe_past(at: float | None) -> float | None:
        return None if at is None else past(at, now)

    return RunFacts(
        id=row.id,
        status=row.status,
        created_at=created_at,
        project=row.project,
        priority=row.priority,
        reason=row.reason,
        stop=None if row.stop_requested == "delete" else row.stop_requested,
        stop_at=maybe_past(row.stop_requested_at),
        stop_delivered=row.stop_requested is not None
        and (row.id, row.submission, row.stop_requested) in delivered.stops,
        submission=row.submission,
        job_recorded=row.ray_job_id is not None,
        submitted_at=maybe_past(row.submitted_at),
        fruitless=row.submission - _last_fruitful(row),
        never_began=row.submission - row.journal_submission,
        job=job,
        tail=tail,
        deadline_at=None if deadline_s is None else created_at + deadline_s,
        steps_done=row.total_steps is not None and row.step >= row.total_steps,
        min_workers=scaling.min_workers,
        max_workers=spec.most_workers,
        workers_limit=row.workers_limit,
        shrunk_to=shrunk.get("to"),
        shrunk_by=shrunk.get("by"),
        shrunk_at=maybe_past(shrunk.get("at")),
        shrink_delivered=row.shrunk is not None
        and (row.id, row.submission, row.shrunk["to"]) in delivered.limits,
        world_size=row.world_size,
        node_ids=tuple(worker["node_id"] for worker in row.workers),
        worker=scaling.resources_per_worker,
        use_gpu=scaling.use_gpu,
        placement_strategy=scaling.placement_strategy,
        accelerator_type=scaling.accelerator_type,
    )


def _last_fruitful(row: RunRow) -> int:
    """Return the newest submission that committed a checkpoint, or 0."""
    name = CheckpointName.parse(row.latest_checkpoint["name"]) if row.latest_checkpoint else None
    return name.submission if name else 0


# ---------------------------------------------------------------- reasons

# The reasons that a queued run shows while it waits.


def infeasible(run: RunFacts, needs: Mapping[str, float], all_room: int) -> Reason:
    missing = run.min_workers - all_room
    more = amounts({name: amount * missing for name, amount in needs.items()})
    message = (
        f"min_workers {run.min_workers} of {amounts(needs)} each ({run.placement_strategy}) can "
        "never fit: the whole cluster has "
        f"room for {all_room}; {more} more are missing. Add nodes, or lower scaling.min_workers "
        "or scaling.resources_per_worker."
    )
    return Reason(code=ReasonCode.INFEASIBLE, message=message)


def waiting(run: RunFacts, needs: Mapping[str, float], why: str) -> Reason:
    message = f"waits for room for {run.min_workers} workers of {amounts(needs)} each; {why}"
    return Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message=message)


def quota_reason(why: str) -> Reason:
    return Reason(code=ReasonCode.WAITING_FOR_CAPACITY, message=why)
