"""What the controller tells of a run's attempts: their begins, failures and ends, and what the next
one needs to know of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from everstep.text import failure as failure_words
from everstep.wire import Verdict
from everstep.wire.events import EventKind
from train_fn.journal.client import ActorJournalClient
from train_fn.ray_train.journal_actor import deliver_to
from train_fn.ray_train.ray_internals import Worker
from train_fn.recovery.decision import Decision, PastFailure, failure_of
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.history import past_failure
from train_fn.recovery.launch import Engine, RecoveryNote
from train_fn.recovery.verdict import Judgement

logger = logging.getLogger(__name__)

_ASK_S = 1.0
"""Longest wait for the journal's newest word on steps done."""


class Chronicle:
    """The attempts of one submission, told to its journal as they come and go. Used by one thread;
    evidence may come by another."""

    def __init__(self, engine: Engine) -> None:
        self.attempt = engine.history.last_attempt
        self._own_function = engine.job.spec.runs_own_function
        self.world_size = 0
        self.is_open = False
        """Whether the attempt's begin was told, and its end was not."""
        self._last_step_before = engine.history.last_step
        self.failures: list[PastFailure] = list(engine.history.failures)
        self.recovery: RecoveryNote | None = engine.recovery
        """What the next attempt is to tell of its recovery; None where it follows no failure."""
        self.journal = ActorJournalClient(
            deliver_to(engine.job.journal),
            "controller",
            self.attempt,
            interval_s=max(0.1, engine.job.run_dir.storage.batch_s),
        )

    def next_attempt(self) -> int:
        """The number of the attempt that is about to be made."""
        self.attempt += 1
        self.journal.attempt = self.attempt
        return self.attempt

    def started(self, workers: Sequence[Worker]) -> None:
        """The attempt's ranks are there."""
        self.is_open = True
        self.world_size = len(workers)
        places = [
            {
                "rank": worker.distributed_context.world_rank,
                "node_id": worker.metadata.node_id,
                "node_ip": worker.metadata.node_ip,
                "pid": worker.metadata.pid,
            }
            for worker in workers
        ]
        self.journal.emit(
            EventKind.ATTEMPT_STARTED, {"world_size": len(workers), "workers": places}
        )
        self.journal.flush(_ASK_S)  # what its ranks tell is to come after it

    def ended(self, cause: str, last_step: int | None = None) -> None:
        """The attempt is over; ``last_step`` None stands for what the journal knows."""
        self.is_open = False
        if last_step is None:
            self.journal.ask(_ASK_S)
            last_step = self.journal.last_step
        self.journal.emit(EventKind.ATTEMPT_ENDED, {"cause": cause, "last_step": last_step})

    def failed(self, evidence: Evidence, judgement: Judgement, decision: Decision) -> None:
        """The attempt failed, and so has ended where it had begun."""
        detect_s = self._detect_s(evidence, judgement)
        failure = failure_of(
            evidence, judgement, decision, detect_s=detect_s, world_size=self.world_size
        )
        self.failures.append(past_failure(failure))
        self.journal.emit(EventKind.FAILURE, failure.event_data())
        if self.is_open:
            self.ended(judgement.verdict.value, evidence.last_step)
        self.recovery = RecoveryNote(
            evidence.noticed_at, detect_s, evidence.last_step, self.world_size, time.time()
        )
        logger.warning(
            "attempt %d failed: %s; %s", self.attempt, failure_words.line(failure), failure.action
        )

    def _detect_s(self, evidence: Evidence, judgement: Judgement) -> float | None:
        """Seconds without progress until the failure was noticed; None where ranks left as they
        were asked to.

        They count from the last committed step: a rank that is stopped raises nothing, and its
        peers do only once it is killed. Between two reports of a user's function nothing is known;
        there they count from the first error.
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
        """What was found out about a failure after it had been told."""
        self.journal.emit(EventKind.EVIDENCE, {**place, **found}, attempt=attempt)

    def last_step(self, reports: Sequence[RankReport]) -> int:
        """The newest step that anybody knows of: the ranks, the journal, the failure before, or
        older journals; 0 of a new run."""
        self.journal.ask(_ASK_S)
        known = [report.error.step for report in reports if report.error is not None]
        known += [self.journal.last_step, self.recovery.last_step if self.recovery else None]
        return max(
            (step for step in known if step is not None), default=self._last_step_before or 0
        )
