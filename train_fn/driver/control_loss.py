"""The loss of a run's driver or of its Train controller, weighed by the rules for ranks."""

from __future__ import annotations

import dataclasses
import logging
import time

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from train_fn.journal.client import ActorJournalClient
from train_fn.recovery.decision import decide
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.failure_event import failure_of
from train_fn.recovery.history import History, past_failure
from train_fn.recovery.launch import Outcome, RecoveryNote
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.verdict import judge

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What follows from the loss: how the next controller begins, or why there is none."""

    history: History
    recovery: RecoveryNote | None = None
    given_up: Outcome | None = None


def weigh_loss(
    client: ActorJournalClient,
    settings: RecoverySettings,
    spec: RunSpec,
    history: History,
    what: str,
) -> Loss:
    """Treat the loss of a driver or controller like that of a rank: verdict, event, budget,
    backoff.

    Sleeps for the backoff if the run is to go on.
    """
    logger.error("the control of the run was lost: %s", what)
    noticed_at = time.time()
    evidence = Evidence(
        history.last_attempt, noticed_at, last_step=history.last_step, control_error=what
    )
    judgement = judge(evidence)
    decision = decide(
        judgement,
        history.failures,
        spec.recovery,
        no_progress_limit=settings.no_progress_limit,
        backoff_max_s=settings.backoff_max_s,
        checkpoint=spec.checkpoint,
    )
    detect_s = _detect_s(spec, history, noticed_at)
    failure = failure_of(
        evidence, judgement, decision, detect_s=detect_s, world_size=history.world_size
    )
    client.emit(EventKind.FAILURE, failure.event_data(), attempt=history.last_attempt)
    if history.attempt_open:
        ended = {"cause": judgement.verdict.value, "last_step": history.last_step}
        client.emit(EventKind.ATTEMPT_ENDED, ended, attempt=history.last_attempt)
    history = dataclasses.replace(
        history, failures=(*history.failures, past_failure(failure)), attempt_open=False
    )
    if not decision.restart:
        given_up = Outcome(
            False, failed=decision.reason, message=decision.message, last_step=history.last_step
        )
        return Loss(history, given_up=dataclasses.replace(given_up, attempts=history.last_attempt))
    time.sleep(decision.backoff_s)
    moved_at = history.moved_at
    note = RecoveryNote(
        noticed_at,
        detect_s,
        history.last_step,
        history.world_size,
        noticed_at,
        None if moved_at is None else round(max(0.0, noticed_at - moved_at), 3),
    )
    return Loss(history, note)


def _detect_s(spec: RunSpec, history: History, noticed_at: float) -> float | None:
    """Return the seconds without progress until the loss was noticed; None if unknown."""
    since = (
        history.last_at if spec.runs_own_function or history.moved_at is None else history.moved_at
    )
    return round(max(0.0, noticed_at - since), 3) if since is not None else None
