"""Two ranks share one GPU over NCCL. A kernel of one writes where it must not, then the same rank
wants more memory than there is; the other one trains on with what it has."""

from __future__ import annotations

from pathlib import Path
from signal import SIGKILL

import torch

from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import Strike
from tests.gpu.parts.two_ranks import (
    FAILURE,
    NEVER,
    cluster_of,
    recovered_without_loss,
    train,
)
from tests.gpu.verdict import Shown
from tests.integration.test_exactness import assert_same, final_state

STRIKES = [Strike("device", 1, 7, 1, SIGKILL), Strike("memory", 1, 15, 2, SIGKILL)]


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    with cluster_of(2, device, directory) as cluster:
        peace = train(cluster, directory / "peace", NEVER, device)
        struck = train(cluster, directory / "struck", STRIKES, device, in_process=True)
    named = [(each.data["verdict"], each.data["first_rank"]) for each in struck.of(FAILURE)]
    assert named == [("hardware", 1)], f"the failures were {named}"
    # an error beside a process that was kept is judged only if it comes back in fresh processes
    [fell_back] = struck.of(EventKind.FELL_BACK)
    message = str(fell_back.data["reason"])
    assert "Tried to allocate" in message, message
    pids = [
        next(worker["pid"] for worker in event.data["workers"] if worker["rank"] == 0)
        for event in struck.of(EventKind.ATTEMPT_STARTED)
    ]
    assert len(pids) == 3 and pids[0] == pids[1] != pids[2], f"processes of rank 0: {pids}"
    restored = [event.data["step"] for event in struck.of(EventKind.RESTORED)]
    assert restored == [0, *(strike.step for strike in STRIKES)], f"went on from {restored}"
    seconds = recovered_without_loss(struck, 1)
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    return Shown(
        "hardware of rank 1, rank 0 kept its process; then want of memory, all began afresh: "
        f"0 steps lost, equal bit by bit, recovered in {seconds} s; the message: {message[:200]}",
        "" if on_gpu else "an error of a real device beside a rank that goes on",
    )
