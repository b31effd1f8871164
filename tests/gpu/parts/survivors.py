"""Two ranks share one GPU, and one of them is killed twice. The other stays in its process, with
its state on the device; the final state equals that of an undisturbed run bit by bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from signal import SIGKILL

import torch

from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import Strike
from tests.gpu.parts.two_ranks import NEVER, cluster_of_two, train
from tests.gpu.verdict import Shown
from tests.integration.test_exactness import assert_same, final_state

STRIKES = [Strike("all_reduce", 1, 7, 1, SIGKILL), Strike("all_reduce", 1, 12, 2, SIGKILL)]


def run(device: torch.device, directory: Path) -> Shown:
    with cluster_of_two(device, directory) as cluster:
        peace = train(cluster, directory / "peace", NEVER, device)
        struck = train(cluster, directory / "struck", STRIKES, device, in_process=True)
    recovered = [event.data for event in struck.of(EventKind.RECOVERED)]
    told = [(data["rung"], data["steps_lost"]) for data in recovered]
    assert told == [("in_process", 0)] * 2, f"rungs and steps lost: {told}"
    groups = [
        {worker["pid"] for worker in event.data["workers"]}
        for event in struck.of(EventKind.ATTEMPT_STARTED)
    ]
    for before, after in pairwise(groups):
        assert len(before & after) == 1, f"processes of the attempts: {groups}"
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    seconds = ", ".join(f"{data['recovery_s']:.2f}" for data in recovered)
    return Shown(
        "one rank killed twice while the other stayed: 0 steps lost, weights, moments and "
        f"statistics equal bit by bit, recovered in {seconds} s",
        "" if device.type == "cuda" else "CUDA tensors that stay on their device",
    )
