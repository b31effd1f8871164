"""Ray's ``fit``, called again until the run has an outcome: Ray does not retry when its controller
is lost or fails."""

from __future__ import annotations

from train_fn.driver.control_loss import weigh_loss
from train_fn.driver.submission_journal import history_so_far
from train_fn.driver.watch import replaced, require_newest
from train_fn.journal.client import ActorJournalClient
from train_fn.recovery.driver_process import DriverProcess
from train_fn.recovery.environment import rank_env, ray_train_env
from train_fn.recovery.history import History
from train_fn.recovery.launch import Engine, Outcome, RankJob, RecoveryNote
from train_fn.recovery.settings import RecoverySettings


def fit_until_decided(
    job: RankJob, settings: RecoverySettings, history: History, client: ActorJournalClient
) -> Outcome:
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
) -> tuple[Outcome | None, str]:
    """Run one Train controller to its end. Return its outcome, and what happened if it has none."""
    from train_fn.ray_train.checkpoint_list import repair_snapshot_file
    from train_fn.ray_train.stale_placement_groups import remove_placement_groups
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
