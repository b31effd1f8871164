"""One rank of a run without Ray, from its start to its exit code."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from everstep.errors import EverstepError
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.run_dir import RunDir
from train_fn.checkpoints.save_events import committed_data
from train_fn.context import WorkerContext
from train_fn.journal.local_journal import LocalJournal, Say, open_local_journal
from train_fn.loop import attempt
from train_fn.recovery.launch import Left
from train_fn.recovery.rank_error import StepFailed
from train_fn.snapshots.last_save import save_own
from train_fn.snapshots.store import snapshot_store
from train_fn.standalone.place import Place, device_of
from train_fn.standalone.submission import Start, begin_run
from train_fn.step.peers import Peers

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 75
CLOSE_S = 30.0

logger = logging.getLogger(__name__)


def say_line(line: str) -> None:
    """Print a line for people, at once."""
    print(line, flush=True)


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    """The process's exit code."""
    step: int
    """Steps done, as rank 0 knows it."""
    metrics: dict[str, float]
    """Of the last evaluation."""
    checkpoints: str
    """Where they are."""


def run_rank(
    spec: RunSpec,
    run_dir: RunDir,
    place: Place,
    *,
    fresh: bool,
    stopping: threading.Event,
    say: Say = say_line,
    train: Callable[[WorkerContext], Left | None] = attempt.train,
) -> Ended:
    """Train one rank to its end. The process group exists.

    Args:
        fresh: delete what an earlier run left in ``run_dir``.
        stopping: is set when all ranks are to save and leave.
        say: tells people how it goes.
        train: the loop. Only its StepFailed is handled here.
    """
    device = device_of(spec, place)
    ctx, journal = begin_attempt(spec, run_dir, place, device, fresh, stopping, say)
    where = f"{run_dir.local_path or run_dir.uri}/checkpoints"
    try:
        stop = train(ctx)
        report_end(journal, stop)
    except StepFailed as exc:
        error = exc.error
        logger.error(
            "rank %d stopped at step %s (%s): %s\n%s",
            place.rank,
            error.step,
            error.phase,
            error.summary,
            error.traceback,
        )
        if place.rank == 0:
            save_left(ctx, say)
        step = journal.step if error.step is None else error.step
        return Ended(EXIT_FAILED, step, journal.metrics, where)
    finally:
        journal.close(CLOSE_S)
    if place.rank == 0:
        say(f"{'paused' if stop else 'done'} at step {journal.step}; checkpoints are in {where}")
    return Ended(EXIT_STOPPED if stop else 0, journal.step, journal.metrics, where)


def begin_attempt(
    spec: RunSpec,
    run_dir: RunDir,
    place: Place,
    device: torch.device,
    fresh: bool,
    stopping: threading.Event,
    say: Say,
) -> tuple[WorkerContext, LocalJournal]:
    """Let rank 0 choose the numbers of this attempt, and tell the journal of it. A collective."""
    peers = Peers(place.rank, place.world_size, device)
    start: Start | EverstepError | StorageError | None = None
    if place.rank == 0:
        try:
            start = begin_run(run_dir, spec, place.launch, fresh=fresh)
        except (EverstepError, StorageError) as exc:
            start = exc
    start = peers.share(start, 0)
    if isinstance(start, Exception):
        raise start
    assert start is not None
    nodes = peers.gather(
        {"rank": place.rank, "node_id": place.node, "node_ip": "", "pid": os.getpid()}
    )
    journal = open_local_journal(
        run_dir, start.submission, start.attempt, place.rank, stopping, say
    )
    ctx = WorkerContext(
        spec=spec,
        run_dir=run_dir,
        submission=start.submission,
        attempt=start.attempt,
        world_rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        node_id=place.node,
        num_nodes=len({node["node_id"] for node in nodes}),
        device=device,
        journal=journal,
        report_checkpoint=lambda name, metrics: None,
    )
    journal.emit(
        EventKind.ATTEMPT_STARTED,
        {"world_size": place.world_size, "workers": nodes, "launch": place.launch},
    )
    # The next attempt takes a number after this one, so the journal must know of it before it can
    # leave a state.
    journal.flush(CLOSE_S)
    return ctx, journal


def report_end(journal: LocalJournal, stop: Left | None) -> None:
    """Report that all steps are done, or that the ranks agreed to stop."""
    cause = "stopped" if stop else "finished"
    journal.emit(EventKind.ATTEMPT_ENDED, {"cause": cause, "last_step": journal.step})
    journal.emit(
        EventKind.FINISHED,
        {"outcome": "stopped" if stop else "succeeded", "reason": None, "step": journal.step},
    )


def save_left(ctx: WorkerContext, say: Say) -> None:
    """Commit what rank 0 left on its node, since nobody knows here whether torchrun starts these
    processes again."""
    saved = save_own(ctx.run_dir, ctx.spec, snapshot_store(ctx), ctx.world_size)
    if saved is None:
        return
    if saved.manifest is not None:
        ctx.journal.emit(EventKind.CHECKPOINT_COMMITTED, committed_data(saved.manifest))
    say(f"stopped by an error; {saved.summary}")
