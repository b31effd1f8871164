"""Ray's ``fit``, called again until the run has an outcome: Ray does not retry when its controller
is lost or fails.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from train_fn.driver.submission_journal import history_so_far
from train_fn.driver.watch import replaced, require_newest
from train_fn.journal.client import ActorJournalClient
from train_fn.recovery.decision import decide
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.history import History, past_failure
from train_fn.recovery.launch import ControllerOutcome, Engine, RankJob, RecoveryNote
from train_fn.recovery.marks import DriverProcess
from train_fn.recovery.outcome import failure_of
from train_fn.recovery.settings import RecoverySettings, rank_env, ray_train_env
from train_fn.recovery.verdict import judge


def fit_until_decided(
    job: RankJob, settings: RecoverySettings, history: History, client: ActorJournalClient
) -> ControllerOutcome:
    """Run one Train controller after the other until one has decided how the run ends, or their
    losses end it.

    Raises Replaced when a newer submission has taken over.
    """
    run_dir, submission = job.run_dir, job.submission
    recovery: RecoveryNote | None = None
    what = None if history.finished else "the driver of the submission before this one was lost"
    while True:
        if what is not None:
            loss = weigh_loss(client, settings, job.spec, history, what)
            if loss.given_up is not None:
                return loss.given_up
            history, recovery = loss.history, loss.recovery
        outcome, what = _fit(job, settings, history, recovery)
        if outcome is not None and outcome.replaced:
            raise replaced(run_dir, None, submission)
        if outcome is not None and outcome.decided:
            return outcome
        history = history_so_far(run_dir, submission, client)


def _fit(
    job: RankJob, settings: RecoverySettings, history: History, recovery: RecoveryNote | None
) -> tuple[ControllerOutcome | None, str]:
    """Run one Train controller to its end. Return its outcome, and what happened if it has none."""
    from train_fn.ray_train.group.placement import remove_placement_groups
    from train_fn.ray_train.ray_checkpoints import repair_snapshot_file
    from train_fn.ray_train.trainer import EverstepTrainer

    # A driver that slept must not remove what its successor has set up.
    require_newest(job.run_dir, job.submission)
    repair_snapshot_file(job.run_dir)
    remove_placement_groups(job.run_dir.run_id)
    engine = Engine(
        job=job,
        settings=settings,
        history=history,
        driver=DriverProcess.own(),
        recovery=recovery,
        rank_env=rank_env(job.spec, settings),
        controller_env=ray_train_env(settings),
    )
    trainer = EverstepTrainer(engine)
    what = "the Train controller ended without an outcome"
    try:
        trainer.fit()
    except Exception as exc:
        what = f"{type(exc).__name__}: {exc}"
    return trainer.outcome, what


# ---------------------------------------------------------------- control loss

# The loss of a run's driver or of its Train controller, weighed by the rules for ranks.

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What follows from the loss: how the next controller begins, or why there is none."""

    history: History
    recovery: RecoveryNote | None = None
    given_up: ControllerOutcome | None = None


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
        given_up = ControllerOutcome(
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
