"""Ray's ``fit``, called again until the run has an outcome: Ray does not retry when its controller
is lost or fails.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.claims import successor
from storage.errors import StorageError
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn.drills import Drills, Faults
from train_fn.driver.submission_journal import history_so_far
from train_fn.errors import Replaced
from train_fn.journal.client import ActorJournalClient, PassedOrders
from train_fn.recovery.decision import decide
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.history import History, past_failure
from train_fn.recovery.launch import ControllerOutcome, Engine, RankJob, RecoveryNote
from train_fn.recovery.marks import DriverProcess
from train_fn.recovery.outcome import Stopping, failure_of
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


# ---------------------------------------------------------------- watch

# What a driver does beside the training: it watches for stops, orders and its own successor.

EXIT_REPLACED = 3
STOP_POLL_S = 0.5
ORDER_POLL_S = 0.5
FENCE_POLL_S = 5.0


def require_newest(run_dir: RunDir, submission: int) -> None:
    """Raise Replaced if a newer submission of the run has begun."""
    newest = max(run_dir.submissions(), default=0)
    if newest > submission:
        raise replaced(run_dir, newest, submission)
    why = successor(run_dir, (submission, 0))
    if why is not None:
        raise Replaced(why)


def replaced(run_dir: RunDir, newest: int | None, submission: int) -> Replaced:
    """Return the error of a submission that ``newest`` has taken over from; None if its number is
    not known."""
    by = "a newer submission" if newest is None else f"submission {newest}"
    return Replaced(f"{by} of run {run_dir.run_id} has taken over from submission {submission}")


class ControlWatch:
    """Two threads that read the run directory until ``close``."""

    def __init__(
        self, run_dir: RunDir, submission: int, client: ActorJournalClient, stopping: Stopping
    ) -> None:
        self._run_dir, self._submission = run_dir, submission
        self._client, self._stopping = client, stopping
        self._done = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.watch_stops, name="stop-watch", daemon=True).start()
        threading.Thread(target=self.watch_orders, name="orders", daemon=True).start()

    def close(self) -> None:
        """End both threads, each after what it is doing."""
        self._done.set()

    def watch_stops(self) -> None:
        """Send the user's stop, or the deadline's, to the journal, whose replies tell every rank.
        End this process once a newer submission has taken over."""
        next_fence = time.monotonic() + FENCE_POLL_S
        while not self._done.wait(STOP_POLL_S):
            asked: Stop | None = None
            try:
                asked = self._run_dir.stop_requested(self._submission)
                if time.monotonic() >= next_fence:
                    next_fence = time.monotonic() + FENCE_POLL_S
                    require_newest(self._run_dir, self._submission)
            except Replaced as exc:
                logger.error("%s; this driver ends now", exc)
                os._exit(EXIT_REPLACED)
            except StorageError as exc:
                logger.warning("the run directory could not be read, trying again: %s", exc)
            stop = self._stopping.decide(asked, time.time())
            if stop is not None:
                self._client.announce_stop(stop)

    def watch_orders(self) -> None:
        """Carry out drills, and pass on orders for profiles and stacks. On a thread of its own,
        since drills take seconds."""
        passed_on = PassedOrders(self._run_dir, self._submission, self._client)
        drills = Drills(self._run_dir, self._submission, self._client, _ray_faults)
        while not self._done.wait(ORDER_POLL_S):
            for tick in (passed_on.tick, drills.tick):
                try:
                    tick()
                except Exception as exc:
                    # an order that cannot be read must not take the driver along
                    logger.warning("orders could not be looked for, trying again: %s", exc)


def _ray_faults() -> Faults:
    from train_fn.ray_train.journal_actor import RayFaults

    return RayFaults()
