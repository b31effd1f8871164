"""The training function of a rank: everything around the loop, from its journal to its errors."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import ray
import ray.train
import torch

from everstep.wire import ErrorKind
from storage.errors import StorageUnavailable
from train_fn.context import WorkerContext
from train_fn.journal.client import ActorJournalClient
from train_fn.journal.rank_logging import RankLog
from train_fn.node import children
from train_fn.node.cpu_threads import set_threads
from train_fn.node.device_evidence import with_device_evidence
from train_fn.node.gpu_memory import wait_for_free_memory
from train_fn.node.gpu_use import GpuWatch
from train_fn.node.host_use import HostWatch
from train_fn.node.secrets import Redactor, process_redactor, secrets_set
from train_fn.node.silent_peers import unheard_hosts
from train_fn.ray_train import rank_process
from train_fn.ray_train.checkpoint_reports import CheckpointReports
from train_fn.ray_train.journal_actor import deliver_to
from train_fn.ray_train.rank_journal import RankJournal
from train_fn.recovery.launch import YIELDED, Left, RankJob, RankLaunch
from train_fn.recovery.rank_error import StepFailed, describe_error
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


def run_rank(config: dict[str, RankJob]) -> str | None:
    """Train. Ray Train calls this on every rank.

    Return None when all steps are done, the stop request that ended the loop, or ``YIELDED``.
    Raise StepFailed for every error: it survives pickling, which an exception of another class may
    not.
    """
    children.connected()
    job, launch = config["job"], rank_process.current_launch()
    place = ray.train.get_context()
    rank = place.get_world_rank()
    log = RankLog(job.run_dir, job.submission, launch.attempt, rank)
    redactor = log.redact = process_redactor()
    log.start()
    client = ActorJournalClient(
        deliver_to(job.journal),
        f"rank-{rank}.a{launch.attempt:03d}",
        launch.attempt,
        interval_s=max(0.5, job.run_dir.storage.batch_s),
        beat_s=BEAT_S if rank == 0 else OTHERS_BEAT_S,
        on_superseded=partial(_leave_at_once, launch),
    )
    try:
        with secrets_set(job.spec, redactor):
            journal = RankJournal(
                client, launch, rank, place.get_world_size(), runs_script=job.spec.runs_script
            )
            stop = _train(job, launch, journal)
            return _outcome(stop, client)
    except BaseException as exc:
        raise _failure(exc, rank, job, redactor) from None
    finally:
        client.close(FLUSH_S)
        log.end_attempt()


def _outcome(stop: Left | None, client: ActorJournalClient) -> str | None:
    """Return what ``run_rank`` returns once the rank's events are durable."""
    if not client.flush(LAST_FLUSH_S):
        raise StorageUnavailable(
            f"the journal did not accept this rank's last events within {LAST_FLUSH_S:g} s"
        )
    if stop is None or stop == YIELDED or not rank_process.yield_asked():
        return stop
    client.ask(ASK_S)  # rank 0 may know of the user's stop request before this rank does
    return stop if client.stop_requested is not None else YIELDED


def _failure(exc: BaseException, rank: int, job: RankJob, redactor: Redactor) -> StepFailed:
    """Describe and log an error. Secrets are removed from its texts."""
    error = describe_error(exc, rank)
    if error.kind is ErrorKind.DEVICE:
        error = with_device_evidence(error, _device(job.use_gpu))
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


def _train(job: RankJob, launch: RankLaunch, journal: RankJournal) -> Left | None:
    """Run the loop, or the user's function, to its end."""
    set_threads(job.spec)
    reports = CheckpointReports(job.run_dir, rank_process.note_report)
    reports.start()
    context = _context(job, launch, journal, reports)
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
    rank_process.note_trained()
    if not reports.close(REPORT_S):
        logger.warning("Ray Train did not take all reports of checkpoints within %g s", REPORT_S)
    return stop


def loop_of(job: RankJob) -> tuple[ModuleType, str]:
    """Import the module of the training loop. Return it, and the name of its function."""
    name, _, function = job.train.partition(":")
    module = importlib.import_module(name)
    if gc.get_freeze_count() == 0:
        # Objects of the imports stay alive. A rank that leaves a broken step collects garbage,
        # which should not search all of torch. Only once in a process: an object of an earlier
        # attempt must not stay forever.
        gc.freeze()
    return module, function


def _context(
    job: RankJob, launch: RankLaunch, journal: RankJournal, reports: CheckpointReports
) -> WorkerContext:
    """Return the rank's place in its attempt."""
    place = ray.train.get_context()
    return WorkerContext(
        spec=job.spec,
        run_dir=job.run_dir,
        submission=job.submission,
        attempt=launch.attempt,
        world_rank=place.get_world_rank(),
        world_size=place.get_world_size(),
        local_rank=place.get_local_rank(),
        local_world_size=place.get_local_world_size(),
        node_id=ray.get_runtime_context().get_node_id(),
        num_nodes=launch.num_nodes,
        device=_device(job.use_gpu),
        journal=journal,
        report_checkpoint=reports.add,
        profile_ordered=journal.profile_ordered,
        flip_ordered=journal.flip_ordered,
        holds_lease=journal.holds_lease,
        journaled_step=journal.journaled_step,
        steps_before=launch.last_step or 0,
        report_state_bytes=rank_process.note_state_bytes,
        report_kept=rank_process.note_kept,
        is_abandoned=rank_process.is_abandoned,
        in_process=launch.in_process,
        hands_over=journal.hands_over,
        on_replaced=lambda why: _leave_at_once(launch),
    )


@cache
def _device(use_gpu: bool) -> torch.device:
    """Return the rank's device, the same for all attempts in this process.

    Ray numbers it among the GPUs of all ranks on the node, which it makes visible to each of them
    once they are created. A process that had used CUDA by then, for example to check its node,
    still sees only its own. A later attempt, with other ranks on the node, numbers it anew, but a
    process that uses CUDA keeps its first numbers.
    """
    if not use_gpu:
        return torch.device("cpu")
    device = ray.train.torch.get_device()
    return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda", 0)


def _leave_at_once(launch: RankLaunch) -> None:
    """End this process: a newer attempt runs, so this one must not write anything more into the
    run. If the newer one runs in this process, the older one has ended in order."""
    if rank_process.current_launch() is not launch:
        return
    logger.error("a newer attempt has started without this rank; exiting")
    os._exit(1)
