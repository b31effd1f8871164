"""A rank: everything around the loop, and its journal. Imports no Ray: what a rank asks of Ray it
asks its host (``Outside``).
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from everstep.wire import ErrorKind
from everstep.wire.events import OWN_FILES, EventKind, Rung
from storage.errors import StorageUnavailable
from storage.run_control import DrillOrder, ProfileOrder, Stop
from storage.run_dir import CheckpointName
from train_fn import clock as head_clock
from train_fn.context import WorkerContext
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.follower import Deliver
from train_fn.journal.rank_log import RankLog
from train_fn.node import children
from train_fn.node.device import with_device_evidence
from train_fn.node.memory import wait_for_free_memory
from train_fn.node.network import unheard_hosts
from train_fn.node.secrets import Redactor, process_redactor, secrets_set
from train_fn.node.usage import GpuWatch, HostWatch, set_threads
from train_fn.ranks import process
from train_fn.recovery.evidence import StepFailed, describe_error
from train_fn.recovery.launch import YIELDED, Left, Position, RankJob, RankLaunch
from train_fn.step.peers import Peers
from train_fn.storage_proof import prove_storage

BEAT_S, OTHERS_BEAT_S = 0.5, 2.0
"""Interval in seconds at which a rank without events polls the journal. All ranks learn of rank 0's
stop request with the next step. The others poll for what only they need: a profile, or the news
that a newer attempt has begun."""

ASK_S = 5.0
"""Timeout in seconds for a response of the journal."""

FLUSH_S = 10.0
"""Timeout in seconds for the last events of a rank that exits after a failure to become durable.
The controller waits longer."""

LAST_FLUSH_S = 600.0
"""The same for a rank that has finished or was asked to stop. Its events are the run's result, and
the head may be away for minutes."""

REPORT_S = 30.0
"""Timeout in seconds for a rank's last checkpoints to be reported to Ray Train."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outside:
    """What a rank asks of the cluster."""

    deliver: Deliver
    """Brings events to the run's journal."""
    report: Callable[[str, dict[str, float]], object]
    """Reports a committed checkpoint to Ray Train, in the background."""
    close: Callable[[], bool]
    """Waits until all reports are taken. Returns False if that takes too long."""
    device: Callable[[], torch.device]
    remembered: Mapping[str, Any] = field(default_factory=dict)
    """Both as of ``WorkerContext``."""


def run_rank(job: RankJob, place: Position, outside: Outside) -> str | None:
    """Train. Return None when all steps are done, the stop request that ended the loop, or
    ``YIELDED``.

    Raise StepFailed for every error: it survives pickling, which an exception of another class may
    not.
    """
    children.connected()
    launch, rank = process.current_launch(), place.rank
    log = RankLog(job.run_dir, job.submission, launch.attempt, rank)
    redactor = log.redact = process_redactor()
    log.start()
    client = ActorJournalClient(
        outside.deliver,
        f"rank-{rank}.a{launch.attempt:03d}",
        launch.attempt,
        interval_s=max(0.5, job.run_dir.storage.batch_s),
        beat_s=BEAT_S if rank == 0 else OTHERS_BEAT_S,
        on_superseded=_leave_at_once,
    )
    process.note_flush(lambda: (log.flush(), client.flush(ASK_S)))
    try:
        with secrets_set(job.spec, redactor):
            journal = RankJournal(
                client, launch, rank, place.world_size, runs_script=job.spec.runs_script
            )
            stop = _train(job, place, launch, journal, outside)
            return _outcome(stop, client)
    except BaseException as exc:
        raise _failure(exc, rank, outside.device, redactor) from None
    finally:
        client.close(FLUSH_S)
        log.end_attempt()


def _outcome(stop: Left | None, client: ActorJournalClient) -> str | None:
    """Return what ``run_rank`` returns once the rank's events are durable."""
    if not client.flush(LAST_FLUSH_S):
        raise StorageUnavailable(
            f"the journal did not accept this rank's last events within {LAST_FLUSH_S:g} s"
        )
    if stop is None or stop == YIELDED or not process.yield_asked():
        return stop
    client.ask(ASK_S)  # rank 0 may know of the user's stop request before this rank does
    return stop if client.stop_requested is not None else YIELDED


def _failure(
    exc: BaseException, rank: int, device: Callable[[], torch.device], redactor: Redactor
) -> StepFailed:
    """Describe and log an error. Secrets are removed from its texts."""
    error = describe_error(exc, rank)
    if error.kind is ErrorKind.DEVICE:
        error = with_device_evidence(error, device())
    error = dataclasses.replace(redactor.error(error), unheard=unheard_hosts())
    logger.error(
        "rank %d stopped at step %s (%s): %s\n%s",
        rank,
        error.step,
        error.kind,
        error.summary,
        error.traceback,
    )
    return StepFailed(error)


def _train(
    job: RankJob, place: Position, launch: RankLaunch, journal: RankJournal, outside: Outside
) -> Left | None:
    """Run the loop, or the user's function, to its end."""
    set_threads(job.spec)
    context = _context(job, place, launch, journal, outside)
    logger.info(
        "rank %d of %d, attempt %d, on node %s, device %s",
        context.world_rank,
        context.world_size,
        context.attempt,
        context.node_id,
        context.device,
    )
    wait_for_free_memory(context.device)
    prove_storage(context, Peers(context.world_rank, context.world_size, context.device))
    module, function = loop_of(job)
    train: Callable[[WorkerContext], Left | None] = getattr(module, function)
    rank, node_id = context.world_rank, context.node_id
    with (
        GpuWatch(journal.emit, rank, node_id, context.device),
        HostWatch(journal.emit, rank, context.world_size, node_id),
    ):
        stop = train(context)
    # The controller takes one report per poll, so from here on the rank waits for polls.
    process.note_trained()
    if not outside.close():
        logger.warning("Ray Train did not take all reports of checkpoints within %g s", REPORT_S)
    return stop


def loop_of(job: RankJob) -> tuple[ModuleType, str]:
    """Import the module of the training loop. Return it, and the name of its function."""
    name, _, function = job.train.partition(":")
    return importlib.import_module(name), function


def _context(
    job: RankJob, place: Position, launch: RankLaunch, journal: RankJournal, outside: Outside
) -> WorkerContext:
    """Return the rank's place in its attempt."""
    spec = job.spec
    if launch.micro_batch_size is not None:
        size = {"micro_batch_size": launch.micro_batch_size}
        spec = spec.model_copy(update={"train": spec.train.model_copy(update=size)})
    return WorkerContext(
        spec=spec,
        run_dir=job.run_dir,
        submission=job.submission,
        attempt=launch.attempt,
        world_rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_id=place.node_id,
        num_nodes=launch.num_nodes,
        device=outside.device(),
        journal=journal,
        report_checkpoint=outside.report,
        profile_ordered=journal.profile_ordered,
        flip_ordered=journal.flip_ordered,
        holds_lease=journal.holds_lease,
        journaled_step=journal.journaled_step,
        steps_before=launch.last_step or 0,
        report_state_bytes=process.note_state_bytes,
        report_kept=process.note_kept,
        is_abandoned=process.is_abandoned,
        hands_over=journal.hands_over,
        remembered=outside.remembered,
        remember=process.remember,
        on_replaced=lambda why: _leave_at_once(),
    )


def _leave_at_once() -> None:
    """End this process: a newer attempt runs, so this one must not write anything more into the
    run."""
    logger.error("a newer attempt has started without this rank; exiting")
    os._exit(1)


# ---------------------------------------------------------------- rank journal

# The journal as the loop of a rank sees it under Ray: with the controller's request to exit, and
# with the report of a recovery.


class RankJournal:
    """Pass a rank's events to its journal client. On rank 0 of an attempt that follows a failure,
    add the recovery's report after the first step.

    Args:
        client: delivers events.
        launch: has the failure that the attempt recovers from.
        world_rank: this rank.
        world_size: size of the group.
        runs_script: whether the rank runs a user's script, which may report nothing.
    """

    def __init__(
        self,
        client: ActorJournalClient,
        launch: RankLaunch,
        world_rank: int,
        world_size: int,
        *,
        runs_script: bool = False,
    ) -> None:
        self._client = client
        self._launch = launch
        self._world_size = world_size
        self._recovering = launch.recovery is not None and world_rank == 0
        self._entered = self._restored = time.monotonic()
        self._restored_step: int | None = None
        self._rejected_step = 0
        self._source: str | None = None
        """Where the state was restored from."""
        self._unit: str | None = None
        """What a step of the run is, if it is no optimizer step."""
        self._from_own_files = False
        """Whether a script continues from its own files, at a step that nobody knows."""
        # A script that has reported before ends its recovery like others, with its next report.
        self._reports_nothing = (
            runs_script and launch.recovery is not None and not launch.recovery.last_step
        )

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Queue an event. Never blocks."""
        was_recovering = self._recovering
        if was_recovering:
            self._note(kind, data)
        self._client.emit(kind, data)
        if was_recovering and not self._recovering:
            self._client.flush(0.0)  # this rank may be the next one to die
        if kind is EventKind.TRAINING_STARTED and self._recovering and self._reports_nothing:
            self._recovering = False
            self._client.emit(EventKind.RECOVERED, self._recovered(head_clock.now()))

    @property
    def stop_requested(self) -> Stop | None:
        """Return the user's stop request. A request to exit from the controller looks like a pause,
        so that the loop saves and exits. ``run_rank`` tells them apart."""
        return self._client.stop_requested or ("pause" if process.yield_asked() else None)

    def hands_over(self) -> bool:
        """Return whether the controller has asked for the exit, for a group in which processes of
        this one go on, and the user for none."""
        return self._client.stop_requested is None and process.hands_over()

    def profile_ordered(self) -> ProfileOrder | None:
        """Return the newest profile that was requested."""
        return self._client.profile_ordered

    def flip_ordered(self) -> DrillOrder | None:
        """Return the newest drill that flips a bit in a rank."""
        return self._client.flip_ordered

    def flush(self, timeout_s: float) -> bool:
        """Wait until all events are durable. Return False after the timeout."""
        return self._client.flush(timeout_s)

    def holds_lease(self, timeout_s: float) -> bool:
        """Return whether the journal has lately confirmed that this attempt is the newest."""
        return self._client.holds_lease(timeout_s)

    def journaled_step(self) -> float:
        """Return the newest step whose metrics the journal has."""
        return self._client.told_step or 0

    def _note(self, kind: EventKind, data: dict[str, Any]) -> None:
        """Note the restored step, then report the recovery with the first new step."""
        if kind is EventKind.RESTORED:
            self._restored = time.monotonic()
            self._restored_step = data.get("step")
            self._source = data.get("source")
            self._unit = data.get("unit")
            self._from_own_files = data.get("source") == OWN_FILES
            self._rejected_step = _rejected_step(data, self._launch.attempt - 1)
        if kind is EventKind.METRICS and data["points"]:
            self._recovering = False
            self._client.emit(EventKind.RECOVERED, self._recovered(self._first_at(data["points"])))

    def _first_at(self, points: list[dict[str, Any]]) -> float:
        """Return when the attempt's first step ended, in Unix seconds. Steps from before the
        failure may come along with it."""
        done = self._restored_step if isinstance(self._restored_step, int) else 0
        first = next((point for point in points if point["step"] > done), points[0])
        return float(first["at"])

    def _recovered(self, first_step_at: float) -> dict[str, Any]:
        """Return the recovery's duration by phase, and the lost steps, given the time of the first
        step in Unix seconds."""
        note = self._launch.recovery
        assert note is not None
        entered_at, restored_at = (
            head_clock.time_of(self._entered),
            head_clock.time_of(self._restored),
        )
        # If no step was left to do, the reported step is from before the failure.
        first_step_at = max(first_step_at, restored_at)
        lost = None
        if self._restored_step is not None and not self._from_own_files:
            # No known last step means that no step was reported.
            done = max(note.last_step or 0, self._rejected_step)
            lost = max(0, done - self._restored_step)
        of_reports = {"unit": self._unit, "since_report_s": note.since_step_s}
        return {
            **(of_reports if self._unit is not None else {}),
            "detect_s": note.detect_s,
            "recovery_s": round(first_step_at - note.noticed_at, 3),
            "steps_lost": lost,
            "world_size_before": note.world_size_before,
            "world_size_after": self._world_size,
            "rung": self._rung(),
            "phases": {
                "leave": round(note.left_at - note.noticed_at, 3),
                "decide": round(self._launch.started_at - note.left_at, 3),
                "start": round(entered_at - self._launch.started_at, 3),
                "restore": round(restored_at - entered_at, 3),
                "first_step": round(first_step_at - restored_at, 3),
            },
        }

    def _rung(self) -> str | None:
        """Return the rung that served the recovery; None if the run began anew, or if a user's own
        loop restores its state."""
        return self._source if self._source in set(Rung) else None


def _rejected_step(restored: dict[str, Any], attempt: int) -> int:
    """Return the highest step of the checkpoints that ``attempt`` wrote and a restore rejected.

    The ranks may have died before their journal could report those steps. Checkpoints of other
    attempts do not count: their steps were lost before.
    """
    names = [CheckpointName.parse(str(each["name"])) for each in restored.get("rejected") or ()]
    return max((name.step for name in names if name and name.attempt == attempt), default=0)
