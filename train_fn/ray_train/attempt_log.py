"""Report a run's attempts from the controller: their starts, failures and ends, and the facts that
the next attempt needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.text import failure as failure_words
from everstep.wire import Verdict
from everstep.wire.events import EventKind
from train_fn.journal.client import ActorJournalClient
from train_fn.ray_train.journal_actor import deliver_to
from train_fn.ray_train.ray_internals import Worker
from train_fn.recovery.decision import Decision, PastFailure
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.hang import Phase
from train_fn.recovery.history import past_failure
from train_fn.recovery.launch import Engine, RecoveryNote
from train_fn.recovery.outcome import failure_of, unfinished
from train_fn.recovery.verdict import Judgement

logger = logging.getLogger(__name__)

ASSUMED_MTBF_S = 24 * 3600.0
"""Mean seconds between failures that are assumed before the first one."""
_NO_RISK = frozenset({Verdict.USER_ERROR, Verdict.PREEMPTION})
_ASK_S = 1.0
"""Timeout in seconds for reading the newest step from the journal."""


class AttemptLog:
    """Report the attempts of one submission to its journal. One thread uses this, but ``evidence``
    may be called from another."""

    def __init__(self, engine: Engine) -> None:
        self.attempt = engine.history.last_attempt
        self._own_function = engine.job.spec.runs_own_function
        self._is_script = engine.job.spec.runs_script
        self.world_size = 0
        self.nodes = set(engine.history.nodes)
        """Ids of all nodes that ever ran ranks of the run: their snapshots may be there."""
        self.is_open = False
        """Whether the attempt's start was reported, but not its end."""
        self._last_step_before = engine.history.last_step
        self._done_before = engine.history.last_step or 0, engine.history.total_steps
        """Steps done and in all, according to earlier submissions."""
        self.failures: list[PastFailure] = list(engine.history.failures)
        self._began_at, self._failures_before = time.monotonic(), len(self.failures)
        self.recovery: RecoveryNote | None = engine.recovery
        """What the next attempt reports about its recovery; None if it follows no failure."""
        self.journal = ActorJournalClient(
            deliver_to(engine.job.journal),
            "controller",
            self.attempt,
            interval_s=max(0.1, engine.job.run_dir.storage.batch_s),
        )

    def next_attempt(self) -> int:
        """Start to count the next attempt, and return its number."""
        self.attempt += 1
        self.journal.attempt = self.attempt
        return self.attempt

    def started(self, workers: Sequence[Worker], built_apart: Mapping[str, str]) -> None:
        """Report that the attempt's ranks have started, and why some build for themselves, by node
        id."""
        self.is_open = True
        self.world_size = len(workers)
        self.nodes |= {worker.metadata.node_id for worker in workers}
        places = [
            {
                "rank": worker.distributed_context.world_rank,
                "node_id": worker.metadata.node_id,
                "node_ip": worker.metadata.node_ip,
                "pid": worker.metadata.pid,
            }
            for worker in workers
        ]
        facts = {"world_size": len(workers), "workers": places, "built_apart": dict(built_apart)}
        self.journal.emit(EventKind.ATTEMPT_STARTED, facts)
        self.journal.flush(_ASK_S)  # before any event of its ranks

    def ended(self, cause: str, last_step: int | None = None) -> None:
        """Report the end of the attempt. If ``last_step`` is None, use the journal's last step."""
        self.is_open = False
        if last_step is None:
            self.journal.ask(_ASK_S)
            last_step = self.journal.last_step
        self.journal.emit(EventKind.ATTEMPT_ENDED, {"cause": cause, "last_step": last_step})

    @property
    def has_stepped(self) -> bool:
        """Return whether a rank of the attempt has made a step, as of the journal's last reply."""
        return self.journal.phase(self.attempt) not in (Phase.START, Phase.FIRST_STEP)

    def failed(self, evidence: Evidence, judgement: Judgement, decision: Decision) -> None:
        """Report the attempt's failure, and its end if its start was reported."""
        detect_s = self._detect_s(evidence, judgement)
        failure = failure_of(
            evidence, judgement, decision, detect_s=detect_s, world_size=self.world_size
        )
        self.failures.append(past_failure(failure))
        self.journal.emit(EventKind.FAILURE, failure.event_data())
        if self.is_open:
            self.ended(judgement.verdict.value, evidence.last_step)
        moved_at = self.journal.moved_at(evidence.attempt)
        self.recovery = RecoveryNote(
            evidence.noticed_at,
            detect_s,
            evidence.last_step,
            self.world_size,
            time.time(),
            None if moved_at is None else round(max(0.0, evidence.noticed_at - moved_at), 3),
        )
        logger.warning(
            "attempt %d failed: %s; %s", self.attempt, failure_words.line(failure), failure.action
        )

    def mtbf_s(self) -> float:
        """Return the estimated mean seconds between the run's failures since the controller
        began: those observed, together with one in ASSUMED_MTBF_S."""
        failures = self.failures[self._failures_before :]
        count = sum(failure.verdict not in _NO_RISK for failure in failures)
        return (time.monotonic() - self._began_at + ASSUMED_MTBF_S) / (count + 1)

    def worked_s(self, evidence_at: float) -> float | None:
        """Return how long the attempt's script had been running, in seconds, if it reports no
        steps. It has not moved since its start, as far as anybody knows."""
        if not self._is_script or self.last_step(()) is not None:
            return None
        began_at = self.journal.moved_at(self.attempt)
        return None if began_at is None else max(0.0, evidence_at - began_at)

    def unfinished(self) -> str | None:
        """Return why the run has not succeeded though its ranks have returned, as of the journal's
        last reply; None if it has."""
        progress = self.journal.progress
        if progress is None:
            return None
        if progress.total_steps is not None:
            return unfinished(progress.step, progress.total_steps)
        step, total_steps = self._done_before
        return unfinished(max(step, progress.step), total_steps)

    def _detect_s(self, evidence: Evidence, judgement: Judgement) -> float | None:
        """Return the seconds without progress until the failure was noticed; None if ranks exited
        on request.

        They count from the last committed step, since a stopped rank raises no error, and its peers
        do so only after it is killed. For a user's function they count from the first error, since
        nothing is known between two of its reports.
        """
        errors = [report.error.at for report in evidence.ranks if report.error is not None]
        if (
            judgement.verdict is Verdict.PREEMPTION
            and not errors
            and not any(report.died for report in evidence.ranks)
        ):
            return None
        moved_at = None if self._own_function else self.journal.moved_at(evidence.attempt)
        since = moved_at if moved_at is not None else min(errors, default=None)
        return None if since is None else round(max(0.0, evidence.noticed_at - since), 3)

    def evidence(self, attempt: int, place: dict[str, Any], found: dict[str, Any]) -> None:
        """Report evidence about a failure that was found after the failure was reported."""
        self.journal.emit(EventKind.EVIDENCE, {**place, **found}, attempt=attempt)

    def last_step(self, reports: Sequence[RankReport]) -> int | None:
        """Return the newest step known from the ranks, the journal, the previous failure or older
        journals; 0 for a new run. None for a script that reports no steps."""
        self.journal.ask(_ASK_S)
        known = [report.error.step for report in reports if report.error is not None]
        known += [self.journal.last_step, self.recovery.last_step if self.recovery else None]
        newest = max(
            (step for step in known if step is not None), default=self._last_step_before or 0
        )
        return None if self._is_script and newest == 0 else newest
