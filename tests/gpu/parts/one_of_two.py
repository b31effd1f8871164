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
        struck = train(cluster, directory / "struck", STRIKES, device)
    named = [(each.data["verdict"], each.data["first_rank"]) for each in struck.of(FAILURE)]
    assert named == [("hardware", 1), ("out_of_memory", 1)], f"the failures were {named}"
    message = str(struck.of(FAILURE)[-1].data["exception"])
    assert "Tried to allocate" in message, message
    restored = [event.data["step"] for event in struck.of(EventKind.RESTORED)]
    assert restored == [0, *(strike.step for strike in STRIKES)], f"went on from {restored}"
    seconds = recovered_without_loss(struck, 2)
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    return Shown(
        "hardware of rank 1, then want of memory: "
        f"0 steps lost, equal bit by bit, recovered in {seconds} s; the message: {message[:200]}",
        "" if on_gpu else "an error of a real device beside a rank that goes on",
    )
