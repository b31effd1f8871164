"""One submission, from its first event to its last."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayError

from everstep.spec.run_spec import RunSpec
from storage.claims import claim_submission, supersede_submission
from storage.run_control import DRIVER_PROBE
from storage.run_dir import RunDir
from train_fn.driver.fit_loop import ControlWatch, fit_until_decided, require_newest
from train_fn.driver.submission_journal import close_journal, history_so_far, open_journal
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.tensorboard_files import TensorBoardFiles
from train_fn.ray_train.journal_actor import NAMESPACE
from train_fn.recovery.history import History, read_history
from train_fn.recovery.launch import ControllerOutcome, RankJob
from train_fn.recovery.outcome import Stopping, ending
from train_fn.recovery.settings import RecoverySettings, ray_train_env
from train_fn.recovery.sizing import use_gpu

if TYPE_CHECKING:
    from train_fn.ray_train.group.left_states import LeftStates
    from train_fn.snapshots.last_save import LastSave

OLDER_MARGIN_S = 15.0
"""An older submission's controller gets so much longer than its ranks may take to save."""
SWEEP_S = 5.0
"""Longest wait for nodes to remove what the run left in their memory, once its end is reported."""
LAST_POINTS_S = 15.0
"""Longest wait for the last points in the run's TensorBoard files and in MLflow. The run's end is
reported by then, and the service lets a driver end by itself for 20 s."""

MLFLOW_URI = "EVERSTEP_MLFLOW_TRACKING_URI"
"""Variable of a node's environment that names a tracking server to keep up to date."""

TRAIN = "train_fn.loop.attempt:train"
IN_RAY = "train_fn.ray_train.user_function:train"
OWN_FUNCTION = "train_fn.user_code.function:train"

logger = logging.getLogger(__name__)


class JournalFollower(Protocol):
    """Writes from the journals, beside training."""

    def start(self) -> None: ...
    def close(self, timeout_s: float) -> None: ...


class Driver:
    """Trains one submission to its end, and reports that end."""

    def __init__(
        self, run_dir: RunDir, submission: int, settings: RecoverySettings, *, train: str = TRAIN
    ) -> None:
        """``train`` is the training function of the ranks, as ``module:function``."""
        self._run_dir, self._submission = run_dir, submission
        self._settings, self._train = settings, train

    def run(self) -> None:
        """Train to the end, the user's stop, or a failure that ends the run. On return ``finished``
        is durable.

        Raises Replaced when a newer submission has taken over.
        """
        require_newest(self._run_dir, self._submission)
        claim_submission(self._run_dir, self._submission)
        spec = self._run_dir.read_spec()
        self._take_settings(spec)
        self._run_dir.write_probe(self._submission, DRIVER_PROBE)
        os.environ.update(ray_train_env(self._settings))
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        self._end_older_submissions(spec)
        supersede_submission(self._run_dir, self._submission)
        history = read_history(self._run_dir)
        stopping = Stopping(None if history.steps_done else self._run_dir.deadline())
        actor, client = open_journal(self._run_dir, self._submission, history)
        watch = ControlWatch(self._run_dir, self._submission, client, stopping)
        watch.start()
        followers = _followers(self._run_dir, self._submission, spec)
        for follower in followers:
            follower.start()
        outcome = self._fit(self._job(spec, history, actor), history, client)
        saved, left = self._save_newest(spec, outcome, client)
        watch.close()
        kept = saved.summary if saved is not None else None
        name, reason = ending(
            outcome, overdue=stopping.overdue, by_itself=stopping.asked is None, kept=kept
        )
        close_journal(client, outcome, name, reason)
        _close_followers(followers)
        if left is not None:
            left.remove(SWEEP_S)
        with suppress(RayError):  # it ends by itself, too
            ray.kill(actor)

    def _fit(self, job: RankJob, history: History, client: ActorJournalClient) -> ControllerOutcome:
        return fit_until_decided(job, self._settings, history, client)

    def _take_settings(self, spec: RunSpec) -> None:
        """Let the run's spec change the settings that it may."""
        if spec.recovery.hang_timeout_s is not None:
            health_timeout_s = min(self._settings.health_timeout_s, spec.recovery.hang_timeout_s)
            self._settings = dataclasses.replace(self._settings, health_timeout_s=health_timeout_s)
        if spec.runs_own_function:
            settings = self._settings
            self._train = OWN_FUNCTION
            self._settings = (
                settings.for_script() if spec.runs_script else settings.for_own_function()
            )

    def _end_older_submissions(self, spec: RunSpec) -> None:
        """End what the drivers of older submissions left running, before this submission's journal
        begins."""
        from train_fn.ray_train.journal_actor import end_older_submissions

        if self._submission > 1:
            leave_s = 0.0 if spec.runs_own_function else self._settings.yield_timeout_s
            end_older_submissions(self._run_dir.run_id, self._submission, leave_s + OLDER_MARGIN_S)

    def _job(self, spec: RunSpec, history: History, actor: Any) -> RankJob:
        """Return what every group of ranks of this submission trains."""
        from train_fn.user_code.function import calls_ray

        in_ray = calls_ray(self._run_dir.storage, spec)
        job = RankJob(
            spec=spec,
            run_dir=self._run_dir,
            submission=self._submission,
            journal=actor,
            use_gpu=use_gpu(spec.scaling, ray.cluster_resources()),
            train=IN_RAY if in_ray else self._train,
            calls_ray=in_ray,
            workers_limit=self._run_dir.workers_limit(),
        )
        logger.info(
            "submission %d of run %s, after %d attempts; %s",
            self._submission,
            self._run_dir.run_id,
            history.last_attempt,
            "ranks on GPUs" if job.use_gpu else "ranks on CPUs",
        )
        return job

    def _save_newest(
        self, spec: RunSpec, outcome: ControllerOutcome, client: ActorJournalClient
    ) -> tuple[LastSave | None, LeftStates | None]:
        from train_fn.driver.last_save import report_replay, save_newest

        found = save_newest(
            self._run_dir,
            self._submission,
            spec,
            outcome,
            client,
            lambda: history_so_far(self._run_dir, self._submission, client),
        )
        report_replay(self._run_dir, spec, client)
        return found


def _close_followers(followers: list[JournalFollower]) -> None:
    deadline = time.monotonic() + LAST_POINTS_S
    for follower in followers:
        follower.close(max(0.1, deadline - time.monotonic()))


def _followers(run_dir: RunDir, submission: int, spec: RunSpec) -> list[JournalFollower]:
    """Return what is written from the journals while the run trains: TensorBoard files, MLflow,
    W&B."""
    made: list[JournalFollower] = [TensorBoardFiles(run_dir, submission)]
    if uri := os.environ.get(MLFLOW_URI, "").strip():
        from train_fn.journal.mlflow import MlflowTracking

        made.append(MlflowTracking(run_dir, submission, uri, os.environ))
    if spec.wandb is not None:
        from train_fn.driver.submission_journal import WandbRecorder

        made.append(WandbRecorder(run_dir, submission, spec, os.environ))
    return made
