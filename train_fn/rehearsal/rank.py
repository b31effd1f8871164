"""One rank of a rehearsal: a process that serves one attempt."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  (torch imports it at the first step: once for all ranks)
import torch.distributed as dist

from everstep.errors import EverstepError
from everstep.spec.run_spec import RunSpec
from storage.checkpoints.store import CheckpointStore
from storage.errors import StorageError
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.loop.attempt import train
from train_fn.loop.training import RankProgress
from train_fn.node import children
from train_fn.own_loop import OwnLoop
from train_fn.recovery.evidence import RankError, StepFailed, describe_error
from train_fn.rehearsal.recorder import Orders, Recorder
from train_fn.rehearsal.values import OfLoop, OfTask, Source
from train_fn.standalone.rank import CLOSE_S, LocalPlace, begin_attempt, device_of, set_up
from train_fn.step.nccl import begin_attempt as begin_collectives
from train_fn.step.nccl import group_backend
from train_fn.step.peers import end_process_group
from train_fn.user_code.modules import add_to_path, files_on_node, import_from, load_named
from train_fn.user_code.script import find_script, run_as_main
from train_fn.user_code.script_run import SHARED_VARIABLE, environment

REHEARSAL_VARIABLE = "EVERSTEP_REHEARSAL"
"""Set for the user's code, so that it can leave out what others would see."""
SAVED_S = 3.0
"""Longest wait for a checkpoint before a death."""
WRITTEN_S = 0.5
"""Longest wait for a checkpoint before the step before that."""
COLLECTIVE_S = 60.0
"""Longest wait of a rank for its peers."""


@dataclass(frozen=True)
class Attempt:
    """What a rank is told of one attempt."""

    spec: RunSpec
    storage: str
    run_id: str
    rank: int
    world_size: int
    launch: str
    rendezvous: str
    """A file that does not exist yet, at which the ranks meet."""
    port: int
    """Of the store at which a script's own process group meets."""
    record: Path
    """File for what the steps are made of."""
    work_dir: Path
    """Where a script runs."""
    orders: Orders
    most_samples: int | None
    """Limit on the samples of a data set."""


@dataclass(frozen=True)
class RankEnded:
    """How a rank's part in an attempt ended."""

    error: str | None = None
    """None if the code came to its end."""
    traceback: str = ""
    is_collateral: bool = False
    """Whether it only follows from another rank's end."""
    is_unprotected: bool = False
    """Whether the code has ended without ``es.protect``."""


def serve(pipe: Connection, log: str) -> None:
    """Serve the attempt that comes through the pipe. The process's output goes to a file."""
    os.environ[REHEARSAL_VARIABLE] = "1"
    multiprocessing.set_start_method("fork", force=True)  # loader processes end with their rank
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        attempt: Attempt = pipe.recv()
    except EOFError:
        return
    ended = _run(attempt, pipe)
    sys.stdout.flush()
    pipe.send(ended)
    pipe.close()
    os._exit(0)  # what the user's code has started must not keep the process


def _run(attempt: Attempt, pipe: Connection) -> RankEnded:
    place = LocalPlace(
        attempt.rank,
        attempt.world_size,
        attempt.rank,
        attempt.world_size,
        os.uname().nodename,
        attempt.launch,
    )
    spec, run_dir = attempt.spec, RunDir(open_storage(attempt.storage), attempt.run_id)
    try:
        begin_collectives()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_up(spec)
        device = device_of(spec, place)
        children.begin()
        dist.init_process_group(
            group_backend(device),
            init_method=f"file://{attempt.rendezvous}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        children.connected()
        ctx, journal, watch, _ = begin_attempt(
            spec, run_dir, place, device, False, threading.Event(), lambda line: None
        )
        watch.close()  # who has finished ends at once
    except (EverstepError, StorageError, OSError, RuntimeError) as exc:
        return RankEnded(f"{type(exc).__name__}: {exc}")

    ctx = dataclasses.replace(ctx, most_samples=attempt.most_samples)

    def wait(word: str) -> None:
        """Wait to be ended."""
        journal.flush(CLOSE_S)
        pipe.send(word)
        threading.Event().wait()

    try:
        if spec.code is not None and spec.code.task is None:
            return _own_code(ctx, attempt, wait)
        return _task(ctx, attempt, wait)
    finally:
        journal.close(CLOSE_S)


def _task(ctx: WorkerContext, attempt: Attempt, wait: Any) -> RankEnded:
    """Train a task by Everstep's loop."""
    progress = RankProgress()
    code = attempt.spec.code
    root = attempt.work_dir
    if code is not None:
        root = files_on_node(ctx.run_dir.storage, code.archive).directory
    with _recorded(ctx, attempt, root, OfTask(progress), wait) as recorder:
        ctx = dataclasses.replace(ctx, on_commit=recorder.commit)
        try:
            train(ctx, progress)
            recorder.finish()
        except StepFailed as exc:
            return _failed(exc.error)
        finally:
            end_process_group()
    return RankEnded()


def _own_code(ctx: WorkerContext, attempt: Attempt, wait: Any) -> RankEnded:
    """Run a script or a Ray Train function."""
    code = ctx.spec.code
    assert code is not None
    present = own_loop.present = OwnLoop(ctx)
    raised: BaseException | None = None
    root = attempt.work_dir
    if code.script is None:
        root = files_on_node(ctx.run_dir.storage, code.archive).directory
    with _recorded(ctx, attempt, root, OfLoop(present), wait) as recorder:
        present.ctx = dataclasses.replace(ctx, on_commit=recorder.commit)
        try:
            if code.script is not None:
                _run_script(ctx, attempt)
            else:
                _call_function(present.ctx)
        except BaseException as exc:
            raised = exc
        failure = present.failure(raised)
        if failure is not None:
            error = (
                failure.error
                if isinstance(failure, own_loop.Left)
                else describe_error(failure, ctx.world_rank)
            )
            return _failed(error)
        recorder.finish()
        return RankEnded(is_unprotected=present.protection is None)


def _failed(error: RankError) -> RankEnded:
    return RankEnded(error.summary, error.traceback, error.collateral)


@contextlib.contextmanager
def _recorded(
    ctx: WorkerContext, attempt: Attempt, root: Path, source: Source, wait: Any
) -> Iterator[Recorder]:
    """Record what happens inside."""

    def settle(step: int) -> None:
        """Wait until the state of that step is saved, so that a death goes on from there."""
        is_near = step == attempt.orders.dies_at
        deadline = time.monotonic() + (SAVED_S if is_near else WRITTEN_S)
        while ctx.world_rank == 0 and time.monotonic() < deadline:
            if any(manifest.step >= step for manifest in CheckpointStore(ctx.run_dir).list()):
                return
            time.sleep(0.01)

    recorder = Recorder(attempt.record, attempt.rank, attempt.orders, root, source, wait, settle)
    try:
        yield recorder
    finally:
        recorder.close()


def _run_script(ctx: WorkerContext, attempt: Attempt) -> None:
    """Run a script as torchrun would."""
    code = attempt.spec.code
    assert code is not None and code.script is not None
    end_process_group()
    root = attempt.work_dir
    files = files_on_node(open_storage(attempt.storage), code.archive)
    os.environ.update(environment(ctx, ("127.0.0.1", attempt.port)))
    os.environ[SHARED_VARIABLE] = str(root)
    os.chdir(root)
    import_from(root, files.names)
    run_as_main(find_script(root, files.names, code.script), root, code.argv)


def _call_function(ctx: WorkerContext) -> None:
    """Call a Ray Train function. Ray's own local mode stands for its cluster."""
    # Ray is needed for such a function alone.
    from ray.train.v2._internal.execution.train_fn_utils import (
        LocalTrainFnUtils,
        set_train_fn_utils,
    )

    code = ctx.spec.code
    assert code is not None and code.train_fn is not None
    if code.datasets is not None:
        raise BadTask(
            f"code.datasets ({code.datasets}) needs a Ray cluster, and a rehearsal has none. "
            "Submit the run without one"
        )
    set_train_fn_utils(
        LocalTrainFnUtils(
            experiment_name=ctx.run_dir.run_id,
            world_size=ctx.world_size,
            world_rank=ctx.world_rank,
            local_rank=ctx.local_rank,
            local_world_size=ctx.local_world_size,
        )
    )
    add_to_path(ctx.run_dir.storage, code.archive)
    function = load_named(code.train_fn)
    if not callable(function):
        raise BadTask(f"{code.train_fn} is a {type(function).__name__}, not a function")
    takes_config = bool(inspect.signature(function).parameters)
    function(*([dict(code.config)] if takes_config else []))
