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
    failures = struck.of(FAILURE)
    named = [(each.data["verdict"], each.data["first_rank"]) for each in failures]
    assert named == [("hardware", 1), ("out_of_memory", 1)], f"the failures were {named}"
    message = str(failures[1].data["exception"])
    assert "Tried to allocate" in message, message
    pids = [
        next(worker["pid"] for worker in event.data["workers"] if worker["rank"] == 0)
        for event in struck.of(EventKind.ATTEMPT_STARTED)
    ]
    assert len(set(pids)) == 1, f"processes of rank 0: {pids}"
    seconds = recovered_without_loss(struck, len(STRIKES))
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    return Shown(
        "hardware, then out_of_memory of rank 1; rank 0 kept its process: 0 steps lost, equal bit "
        f"by bit, recovered in {seconds} s; the message: {message[:200]}",
        "" if on_gpu else "an error of a real device beside a rank that goes on",
    )
