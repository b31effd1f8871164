"""Ranks over NCCL whose group is broken while it starts: a peer dies before, and while, their
communicator is created, and another one while it sends the state that all go on from."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from everstep.wire.events import EventKind
from tests.gpu.parts.two_ranks import stand_in
from tests.gpu.verdict import Shown
from tests.integration.ranks import Job, Outcome, make_run_dir, run_ranks, train_to_end
from tests.integration.test_exactness import assert_same, final_state, make_spec
from train_fn.loop import attempt
from train_fn.recovery import settings
from train_fn.recovery.evidence import StepFailed

KILLED_AFTER = 13
HUNG_S = 15.0
SENDER = "tests.integration.test_silent_collectives:die_while_sending"


def run(device: torch.device, directory: Path) -> Shown:
    before = _without_a_peer(device, directory, "die_before_the_first")
    sent = _sent_in_part(device, directory)
    within = _without_a_peer(device, directory, "die_in_the_first")
    return Shown(
        f"a peer that died before the communicator was created, and while it was: {before} and "
        f"{within}; a state of which only a part arrived: {sent}",
        "" if device.type == "cuda" else "NCCL's creation of a communicator",
    )


def _without_a_peer(device: torch.device, directory: Path, setup: str) -> str:
    """Start two ranks of which one dies at once. Return how the other one ended."""
    run_dir = make_run_dir(directory, setup)
    began = time.monotonic()
    job = Job(
        run_dir,
        make_spec(deterministic=True),
        2,
        setup=f"{__name__}:{setup}",
        device=str(device),
        silent=stand_in(device),
    )
    survivor, killed = run_ranks(job, directory)
    assert killed.exit_code == -signal.SIGKILL, killed
    return f"{_lost_its_peer(survivor)} after {time.monotonic() - began:.1f} s"


def _lost_its_peer(survivor: Outcome) -> str:
    """Return the error of a rank that lost a peer before it had a state."""
    assert isinstance(survivor.error, StepFailed), survivor
    error = survivor.error.error
    assert error.collateral, f"{error.type}: {error.message}"
    assert (error.step, error.snapshot_step, error.stays_at) == (None, None, None), error
    return error.type


def die_before_the_first() -> None:
    """Rank 1 ends itself once the ranks have met, before its first collective."""
    _die_as_training_begins(0.0)


def die_in_the_first() -> None:
    """Rank 1 ends itself while its first collective creates the communicator."""
    _die_as_training_begins(0.05)


def _die_as_training_begins(delay_s: float) -> None:
    faulthandler.dump_traceback_later(HUNG_S, exit=False)  # for the log
    settings.NCCL_ENV["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "20"
    train = attempt.train

    def train_and_die(ctx: object) -> object:
        if dist.get_rank() == 1:
            if not delay_s:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            dist.all_reduce(torch.ones(1, device=ctx.device))  # type: ignore[attr-defined]
        return train(ctx)  # type: ignore[arg-type]

    attempt.train = train_and_die  # type: ignore[assignment]


def _sent_in_part(device: torch.device, directory: Path) -> str:
    """Kill a rank, then the holder of the state while it sends it."""
    spec = make_spec(deterministic=True)
    peace, broken = make_run_dir(directory, "peace"), make_run_dir(directory, "broken")
    on = {"device": str(device), "silent": stand_in(device)}
    train_to_end(Job(peace, spec, 2, **on), directory)  # type: ignore[arg-type]
    job = Job(broken, spec, 2, killed=(1, KILLED_AFTER), **on)  # type: ignore[arg-type]
    survivor, _ = run_ranks(job, directory)
    assert isinstance(survivor.error, StepFailed), survivor
    assert survivor.error.error.snapshot_step == KILLED_AFTER, survivor.error.error
    again = Job(broken, spec, 2, attempt=2, setup=SENDER, **on)  # type: ignore[arg-type]
    holder, receiver = run_ranks(again, directory)
    assert holder.exit_code == -signal.SIGKILL, holder
    _lost_its_peer(receiver)
    last = Job(broken, spec, 2, attempt=3, **on)  # type: ignore[arg-type]
    resumed = train_to_end(last, directory)
    [restored] = resumed.of_kind(EventKind.RESTORED)
    assert (restored["source"], restored["step"]) == ("snapshot", KILLED_AFTER), restored
    assert_same(final_state(peace), final_state(broken))
    return "not elected; the next attempt went on from the holder's own, equal bit by bit"
