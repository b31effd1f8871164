"""A small DDP training function for tests of the driver: real ranks and collectives, no data, no
model of any use.

What it does is written in ``spec.tags``: ``step_ms``, ``steps``, ``raise_at`` (a step at which rank
0 raises), ``hang_at`` (a step at which rank 1 of the first attempt never gets on), ``tell`` (a
variable whose value is printed and raised).
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import traceback

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.wire.events import EventKind
from storage.run_control import Stop
from train_fn.context import WorkerContext
from train_fn.recovery.evidence import StepFailed, describe_error


def train(ctx: WorkerContext) -> Stop | None:
    tags = ctx.spec.tags
    step, error = _restore(ctx), None
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    ddp = DistributedDataParallel(model) if ctx.world_size > 1 else model
    if ctx.world_rank == 0:
        ctx.journal.emit(
            EventKind.RESTORED,
            {"step": step, "epoch": 0, "source": "snapshot", "checkpoint": None, "rejected": []},
        )
        ctx.journal.emit(EventKind.TRAINING_STARTED, {"total_steps": int(tags["steps"])})
    suffix = f": {os.environ[tags['tell']]}" if "tell" in tags else ""
    try:
        while step < int(tags["steps"]):
            stop = _agreed_stop(ctx)
            if stop is not None:
                _save(ctx, step)
                return stop
            if ctx.world_rank == 0 and step == int(tags.get("raise_at", -1)):
                raise ValueError(f"the data of step {step} is spoilt{suffix}")
            while ctx.world_rank == 1 and ctx.attempt == 1 and step == int(tags.get("hang_at", -1)):
                time.sleep(0.01)
            ddp(torch.randn(4, 8)).sum().backward()
            step += 1
            print(f"step {step}{suffix}")
            if ctx.world_rank == 0:
                ctx.journal.emit(
                    EventKind.METRICS,
                    {"points": [{"step": step, "at": time.time(), "values": {"loss": 1.0}}]},
                )
            time.sleep(float(tags["step_ms"]) / 1000)
    except BaseException as exc:
        _save(ctx, step)
        described = describe_error(exc, ctx.world_rank)
        error = StepFailed(
            dataclasses.replace(described, step=step, phase="step", snapshot_step=step)
        )
        traceback.clear_frames(exc.__traceback__)
    if error is not None:
        del ddp
        gc.collect()
        dist.destroy_process_group()
        raise error
    return None


def _agreed_stop(ctx: WorkerContext) -> Stop | None:
    codes = {None: 0, "pause": 1, "cancel": 2}
    asked = torch.tensor([codes[ctx.journal.stop_requested]])
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return {code: stop for stop, code in codes.items()}[int(asked)]  # type: ignore[return-value]


def _save(ctx: WorkerContext, step: int) -> None:
    """The state of this loop is its step; kept in the run's directory by every rank on its own."""
    ctx.run_dir.files.write(
        f"{ctx.run_dir.checkpoints_path('small')}/rank-{ctx.world_rank}", str(step).encode()
    )


def _restore(ctx: WorkerContext) -> int:
    place = ctx.run_dir.checkpoints_path("small")
    steps = [
        int(ctx.run_dir.files.read(f"{place}/{entry.name}"))
        for entry in ctx.run_dir.files.list(place)
    ]
    newest = torch.tensor([max(steps, default=0)])
    dist.all_reduce(newest, op=dist.ReduceOp.MAX)
    return int(newest)
