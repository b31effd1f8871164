"""The driver of one submission: a Ray Job's entrypoint, ``python -m train_fn.driver --storage URI
--run-id ID --submission N``.

Exit codes: 0 when the journal's ``finished`` event is written, whatever the outcome; 3 when a newer
submission has taken over; anything else means that the run is to be submitted again. 4 says that
the storage cannot be used, or is not the one that is known.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.claims import claim_submission, newest_attempt, succeed_submission, successor
from storage.cluster.identity import EXIT_STORAGE, KNOWN_VARIABLE, STORAGE_WORDS, Known, check_known
from storage.errors import StorageError, StorageMismatch
from storage.filesystem import open_storage
from storage.run_control import DRIVER_PROBE, Stop
from storage.run_dir import RunDir
from train_fn.checkpoints.save_events import committed_data
from train_fn.drills.orders import Drills, Faults
from train_fn.errors import Replaced
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.follower import JournalFollower
from train_fn.journal.profile_orders import ProfileOrders
from train_fn.journal.rank_logging import RankLog
from train_fn.journal.tensorboard_files import TensorBoardFiles
from train_fn.ray_train.journal_actor import NAMESPACE, deliver_to, start_journal
from train_fn.recovery.decision import decide, failure_of
from train_fn.recovery.driver_process import DriverProcess
from train_fn.recovery.environment import rank_env, ray_train_env
from train_fn.recovery.evidence import Evidence
from train_fn.recovery.history import History, past_failure, read_history
from train_fn.recovery.launch import Engine, Outcome, RankJob, RecoveryNote
from train_fn.recovery.outcome import Stopping, ending
from train_fn.recovery.resources import use_gpu, worker_resources
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.verdict import judge

if TYPE_CHECKING:
    from train_fn.ray_train.left_states import LeftStates
    from train_fn.snapshots.last_save import LastSave

EXIT_REPLACED = 3
EXIT_TERMINATED = 143

STOP_POLL_S = 0.5
ORDER_POLL_S = 0.5
FENCE_POLL_S = 5.0
OLDER_MARGIN_S = 15.0
"""So much longer than its ranks may take to save is an older submission's controller waited for."""
BEAT_S = 5.0
"""How often a driver without news calls the journal, of which it wants to know nothing."""
SETTLE_S = 5.0
"""How long a network filesystem may take to show what the service knows to be there."""
FINAL_FLUSH_S = 120.0
"""Longest wait for the last events to become durable; past it the driver fails, and its run is
submitted again."""

SWEEP_S = 5.0
"""Longest wait for nodes to remove what the run left in their memory, once its end is told."""
LAST_POINTS_S = 15.0
"""Longest wait for the last points in the run's TensorBoard files, and in MLflow. The run's end is
told by then, and the service lets a driver end by itself for 20 s."""

MLFLOW_URI = "EVERSTEP_MLFLOW_TRACKING_URI"
"""Variable of a node's environment that names a tracking server to keep up to date."""

TRAIN = "train_fn.loop.attempt:train"
OWN_FUNCTION = "train_fn.ray_train.user_train_fn:train"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Loss:
    """What follows from the loss of a driver or controller."""

    history: History
    recovery: RecoveryNote | None = None
    given_up: Outcome | None = None


class Driver:
    """One submission, from its first event to its last."""

    def __init__(
        self, run_dir: RunDir, submission: int, settings: RecoverySettings, *, train: str = TRAIN
    ) -> None:
        self._run_dir = run_dir
        self._submission = submission
        self._settings = settings
        self._train = train
        self._done = threading.Event()
        self._journal: ActorJournalClient | None = None
        self._stopping = Stopping(None)
        self._followers: list[JournalFollower] = []

    def run(self) -> None:
        """Train to the end, the user's stop, or a failure that stops the run; ``finished`` is
        durable on return.

        Raises Replaced when a newer submission has taken over.
        """
        self._check_newest()
        claim_submission(self._run_dir, self._submission)
        spec = self._run_dir.read_spec()
        if spec.recovery.hang_timeout_s is not None:
            health_timeout_s = min(self._settings.health_timeout_s, spec.recovery.hang_timeout_s)
            self._settings = dataclasses.replace(self._settings, health_timeout_s=health_timeout_s)
        if spec.runs_own_function:
            self._train, self._settings = OWN_FUNCTION, self._settings.for_own_function()
        self._run_dir.write_probe(self._submission, DRIVER_PROBE)
        os.environ.update(ray_train_env(self._settings))
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        self._end_older_submissions(spec)
        succeed_submission(self._run_dir, self._submission)
        history = read_history(self._run_dir)
        self._stopping = Stopping(None if history.steps_done else self._run_dir.deadline())
        actor = start_journal(
            self._run_dir,
            self._submission,
            DriverProcess.own(),
            ray.get_runtime_context().get_node_id(),
        )
        interval_s = max(0.1, self._run_dir.storage.batch_s)
        self._journal = ActorJournalClient(
            deliver_to(actor), "driver", history.last_attempt, interval_s=interval_s, beat_s=BEAT_S
        )
        self._journal.emit(EventKind.SUBMISSION_STARTED, _facts())
        for damage in history.damage:
            logger.error("a journal is damaged, and an event of it is lost: %s", damage)
            self._journal.emit(EventKind.JOURNAL_DAMAGED, damage)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()
        threading.Thread(target=self._watch_orders, name="orders", daemon=True).start()
        self._followers = _followers(self._run_dir, self._submission)
        for follower in self._followers:
            follower.start()
        job = RankJob(
            spec=spec,
            run_dir=self._run_dir,
            submission=self._submission,
            journal=actor,
            use_gpu=use_gpu(spec.scaling, ray.cluster_resources()),
            train=self._train,
            workers_limit=self._run_dir.workers_limit(),
        )
        logger.info(
            "submission %d of run %s, after %d attempts; %s",
            self._submission,
            self._run_dir.run_id,
            history.last_attempt,
            "ranks on GPUs" if job.use_gpu else "ranks on CPUs",
        )
        if self._settings.warm_pool:
            threading.Thread(
                target=self._warm_first_group, args=(job,), name="warm-up", daemon=True
            ).start()
        outcome = self._fit_until_decided(job, history)
        saved, left = self._save_newest(spec, outcome)
        self._finish(outcome, saved)
        if left is not None:
            left.remove(SWEEP_S)
        with suppress(RayError):  # it ends by itself, too
            ray.kill(actor)

    def _end_older_submissions(self, spec: RunSpec) -> None:
        """Have what their drivers left behind end before this submission's journal begins."""
        from train_fn.ray_train.older_submissions import end_older_submissions

        if self._submission > 1:
            leave_s = 0.0 if spec.runs_own_function else self._settings.yield_timeout_s
            end_older_submissions(self._run_dir.run_id, self._submission, leave_s + OLDER_MARGIN_S)

    def _warm_first_group(self, job: RankJob) -> None:
        from train_fn.ray_train.nodes import node_look
        from train_fn.ray_train.warm_pool import warm_first_group

        look = node_look(self._settings.probe_timeout_s, self._run_dir.storage)
        try:
            warm_first_group(look, worker_resources(job.spec.scaling, job.use_gpu), job.max_workers)
        except Exception as exc:  # the ranks then start cold
            logger.warning("the first ranks' processes were not started ahead: %s", exc)

    def _fit_until_decided(self, job: RankJob, history: History) -> Outcome:
        """Ray's ``fit``, again when the controller itself was lost or broke down: Ray retries
        neither."""
        from train_fn.ray_train.checkpoint_list import repair_snapshot_file
        from train_fn.ray_train.stale_placement_groups import remove_placement_groups
        from train_fn.ray_train.trainer import EverstepTrainer

        recovery: RecoveryNote | None = None
        if not history.finished:
            loss = self._weigh_loss(
                job.spec, history, "the driver of the submission before this one was lost"
            )
            if loss.given_up is not None:
                return loss.given_up
            history, recovery = loss.history, loss.recovery
        while True:
            # a driver that slept must not clear away what its successor has set up
            self._check_newest()
            repair_snapshot_file(self._run_dir)
            remove_placement_groups(job.run_dir.run_id)
            engine = Engine(
                job=job,
                settings=self._settings,
                history=history,
                driver=DriverProcess.own(),
                recovery=recovery,
                rank_env=rank_env(job.spec, self._settings),
                controller_env=ray_train_env(self._settings),
            )
            trainer = EverstepTrainer(engine)
            what = "the Train controller ended without an outcome"
            try:
                trainer.fit()
            except Exception as exc:
                what = f"{type(exc).__name__}: {exc}"
            outcome = trainer.outcome
            if outcome is not None and outcome.replaced:
                raise Replaced(
                    f"a newer submission of run {self._run_dir.run_id} has taken over from "
                    f"submission {self._submission}"
                )
            if outcome is not None and outcome.decided:
                return outcome
            loss = self._weigh_loss(job.spec, self._history_so_far(), what)
            if loss.given_up is not None:
                return loss.given_up
            history, recovery = loss.history, loss.recovery

    def _weigh_loss(self, spec: RunSpec, history: History, what: str) -> _Loss:
        """A driver or controller was lost: by the same rules as a rank, with verdict, event, budget
        and back-off."""
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
            no_progress_limit=self._settings.no_progress_limit,
            backoff_max_s=self._settings.backoff_max_s,
            checkpoint=spec.checkpoint,
        )
        since = (
            history.last_at
            if spec.runs_own_function or history.moved_at is None
            else history.moved_at
        )
        detect_s = round(max(0.0, noticed_at - since), 3) if since is not None else None
        failure = failure_of(
            evidence, judgement, decision, detect_s=detect_s, world_size=history.world_size
        )
        self._client.emit(EventKind.FAILURE, failure.event_data(), attempt=history.last_attempt)
        if history.attempt_open:
            ended = {"cause": judgement.verdict.value, "last_step": history.last_step}
            self._client.emit(EventKind.ATTEMPT_ENDED, ended, attempt=history.last_attempt)
        history = dataclasses.replace(
            history, failures=(*history.failures, past_failure(failure)), attempt_open=False
        )
        if not decision.restart:
            given_up = Outcome(
                False, failed=decision.reason, message=decision.message, last_step=history.last_step
            )
            return _Loss(
                history, given_up=dataclasses.replace(given_up, attempts=history.last_attempt)
            )
        time.sleep(decision.backoff_s)
        return _Loss(
            history,
            RecoveryNote(noticed_at, detect_s, history.last_step, history.world_size, noticed_at),
        )

    def _history_so_far(self) -> History:
        self._client.flush(FINAL_FLUSH_S)
        history = read_history(self._run_dir)
        last_attempt = newest_attempt(self._run_dir, self._submission, history.last_attempt)
        return dataclasses.replace(history, last_attempt=last_attempt)

    def _save_newest(
        self, spec: RunSpec, outcome: Outcome
    ) -> tuple[LastSave | None, LeftStates | None]:
        """Commit the newest state where only nodes hold it. Changes nothing about the outcome, and
        raises nothing.

        Returns how that went, None where there was nothing to save, and what is to be removed from
        the nodes at the run's end, None where that must stay: the run is paused, or its newest
        state is nowhere else.
        """
        from train_fn.ray_train.left_states import LeftStates
        from train_fn.snapshots.last_save import newest_durable

        succeeded = outcome.finished and outcome.stopped is None
        if spec.runs_own_function or outcome.attempts <= int(succeeded):
            return None, None
        saved = None
        try:
            history = self._history_so_far()
            left = LeftStates(self._run_dir, self._submission, history.nodes)
            steps = [
                history.last_step,
                outcome.last_step,
                *(failure.step for failure in history.failures),
            ]
            furthest = max((step for step in steps if step is not None), default=0)
            if outcome.failed is not None or (
                not succeeded and newest_durable(self._run_dir) < furthest
            ):
                saved = left.save_newest(spec, history.world_size)
            if saved is not None:
                logger.info("the last save: %s", saved.summary)
            if saved is not None and saved.manifest is not None:
                self._client.emit(
                    EventKind.CHECKPOINT_COMMITTED,
                    committed_data(saved.manifest),
                    attempt=history.last_attempt,
                )
        except Exception:
            logger.exception(
                "what the run left on its nodes could not be looked through, and stays there"
            )
            return None, None
        is_over = succeeded or outcome.failed is not None or outcome.stopped == "cancel"
        return saved, left if is_over and (saved is None or saved.manifest is not None) else None

    def _finish(self, outcome: Outcome, saved: LastSave | None) -> None:
        """Write ``finished``, the journal's last event. Raises RuntimeError when it did not become
        durable."""
        self._done.set()
        kept = saved.summary if saved is not None else None
        name, reason = ending(
            outcome,
            overdue=self._stopping.overdue,
            by_itself=self._stopping.asked is None,
            kept=kept,
        )
        self._client.emit(
            EventKind.FINISHED, {"outcome": name, "reason": reason, "step": outcome.last_step}
        )
        logger.info(
            "the run ended: %s%s",
            name,
            f", {reason['code']}: {reason['message']}" if reason else "",
        )
        if not self._client.close(FINAL_FLUSH_S):
            raise RuntimeError(
                f"the journal did not take the last events within {FINAL_FLUSH_S:g} s; is the "
                "storage writable?"
            )
        deadline = time.monotonic() + LAST_POINTS_S
        for follower in self._followers:
            follower.close(max(0.1, deadline - time.monotonic()))

    @property
    def _client(self) -> ActorJournalClient:
        assert self._journal is not None
        return self._journal

    def _check_newest(self) -> None:
        newest = max(self._run_dir.submissions(), default=0)
        if newest > self._submission:
            raise Replaced(
                f"submission {newest} of run {self._run_dir.run_id} has taken over from "
                f"submission {self._submission}"
            )
        why = successor(self._run_dir, (self._submission, 0))
        if why is not None:
            raise Replaced(why)

    def _watch(self) -> None:
        """Hand the user's stop, or the deadline's, to the journal, whose replies tell every rank;
        end this driver once it is replaced."""
        next_fence = time.monotonic() + FENCE_POLL_S
        while not self._done.wait(STOP_POLL_S):
            asked: Stop | None = None
            try:
                asked = self._run_dir.stop_requested(self._submission)
                if time.monotonic() >= next_fence:
                    next_fence = time.monotonic() + FENCE_POLL_S
                    self._check_newest()
            except Replaced as exc:
                logger.error("%s; this driver ends now", exc)
                os._exit(EXIT_REPLACED)
            except StorageError as exc:
                logger.warning("the run directory could not be read, trying again: %s", exc)
            stop = self._stopping.decide(asked, time.time())
            if stop is not None:
                self._client.announce_stop(stop)

    def _watch_orders(self) -> None:
        """Carry out drills and pass on profiles, beside the watch for stops: drills take
        seconds."""
        profiles = ProfileOrders(self._run_dir, self._submission, self._client)
        drills = Drills(self._run_dir, self._submission, self._client, _ray_faults)
        while not self._done.wait(ORDER_POLL_S):
            for tick in (profiles.tick, drills.tick):
                try:
                    tick()
                except Exception as exc:
                    # an order that cannot be read must not take the driver along
                    logger.warning("orders could not be looked for, trying again: %s", exc)


def _followers(run_dir: RunDir, submission: int) -> list[JournalFollower]:
    """What is made of the journals beside the training."""
    made: list[JournalFollower] = [TensorBoardFiles(run_dir, submission)]
    if uri := os.environ.get(MLFLOW_URI, "").strip():
        from train_fn.journal.mlflow import MlflowTracking

        made.append(MlflowTracking(run_dir, submission, uri, os.environ))
    return made


def _ray_faults() -> Faults:
    from train_fn.ray_train.faults import RayFaults

    return RayFaults()


def _facts() -> dict[str, Any]:
    from train_fn.ray_train.rank_process import versions

    context = ray.get_runtime_context()

    return {
        "ray_job_id": context.get_job_id(),
        "driver_pid": os.getpid(),
        "driver_node_id": context.get_node_id(),
        "versions": versions(),
    }


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Leave at once and without ``finished``: whoever asked is not the user, and the run is to be
    submitted again."""
    raise SystemExit(EXIT_TERMINATED)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m train_fn.driver", description="Drive one submission of a run."
    )
    parser.add_argument(
        "--storage", required=True, metavar="URI", help="storage that holds the run's directory"
    )
    parser.add_argument("--run-id", required=True, metavar="ID", help="run to drive")
    parser.add_argument(
        "--submission",
        required=True,
        type=int,
        metavar="N",
        help="this submission's number, from 1",
    )
    return parser.parse_args(argv)


def check_when_settled(run_dir: RunDir, known: Known) -> None:
    """As ``check_known``; a network filesystem may take seconds to show what others have written.
    Raises StorageError."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            check_known(run_dir, known)
            return
        except StorageMismatch:
            if time.monotonic() >= deadline:
                raise
        time.sleep(STOP_POLL_S)


def _storage_unavailable(problem: StorageError) -> int:
    """Say why in words that the service finds in the job's message."""
    words = " ".join(f"{platform.node()}: {problem}".split())
    print(f"{STORAGE_WORDS}{words}", file=sys.stderr, flush=True)
    return EXIT_STORAGE


def main(argv: Sequence[str] | None = None, *, train: str = TRAIN) -> int:
    """Run the driver; returns its exit code."""
    arguments = _arguments(argv)
    settings = RecoverySettings.from_env(os.environ)
    run_dir = RunDir(open_storage(arguments.storage), arguments.run_id)
    driver = Driver(run_dir, arguments.submission, settings, train=train)
    log = RankLog(run_dir, arguments.submission, 0, None)
    try:
        # Before anything is written: what is there may be another storage, on this node alone or
        # everywhere.
        check_when_settled(run_dir, Known.parse(os.environ.get(KNOWN_VARIABLE)))
        driver._check_newest()
    except Replaced as exc:
        print(exc, file=sys.stderr)
        return EXIT_REPLACED
    except StorageError as exc:
        return _storage_unavailable(exc)
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    # for the Ray job's own log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    log.start()
    try:
        driver.run()
        return 0
    except Replaced as exc:
        logger.error("%s", exc)
        return EXIT_REPLACED
    except SystemExit:
        logger.warning("the driver was told to end; it leaves without finishing its run")
        log.close()
        os._exit(EXIT_TERMINATED)
    except StorageError as exc:
        logger.exception(
            "the driver cannot use the run's storage; its run is to be submitted again"
        )
        return _storage_unavailable(exc)
    except Exception:
        logger.exception("the driver failed; its run is to be submitted again")
        return 1
    finally:
        log.close()


if __name__ == "__main__":
    sys.exit(main())
