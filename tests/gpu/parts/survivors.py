"""Two ranks share one GPU over NCCL, and one of them is killed three times in a row. The other one
leaves its state; the final state equals that of an undisturbed run bit by bit, and no memory of the
device is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL
from statistics import median

import torch

from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import Strike
from tests.gpu.parts.two_ranks import NEVER, cluster_of, recovered_without_loss, train
from tests.gpu.verdict import Shown
from tests.integration.driven_run import DrivenRun
from tests.integration.test_exactness import assert_same, final_state

STRIKES = [
    Strike("all_reduce", 1, 6, 1, SIGKILL),
    Strike("commit", 1, 13, 2, SIGKILL),
    Strike("all_reduce", 1, 20, 3, SIGKILL),
]
MOST_GROWTH_BYTES = 64 << 20
"""What a communicator may keep for good, over three recoveries."""


def run(device: torch.device, directory: Path) -> Shown:
    with cluster_of(2, device, directory) as cluster:
        peace = train(cluster, directory / "peace", NEVER, device)
        with used_memory(device) as samples:
            struck = train(cluster, directory / "struck", STRIKES, device)
    rungs = [event.data["rung"] for event in struck.of(EventKind.RECOVERED)]
    assert rungs == ["snapshot"] * len(STRIKES), f"rungs: {rungs}"
    groups = [
        {worker["pid"] for worker in event.data["workers"]}
        for event in struck.of(EventKind.ATTEMPT_STARTED)
    ]
    for before, after in pairwise(groups):
        assert not before & after, f"processes of the attempts: {groups}"
    seconds = recovered_without_loss(struck, len(STRIKES))
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    return Shown(
        "one rank of two killed three times: 0 steps lost, weights, moments and "
        f"statistics equal bit by bit, recovered in {seconds} s{_growth(struck, samples)}",
        "" if device.type == "cuda" else "NCCL, CUDA tensors that stay on their device",
    )


@contextmanager
def used_memory(device: torch.device) -> Iterator[list[tuple[float, int]]]:
    """Yield a list that grows by (Unix time, used bytes of the device) every 20 ms; it stays empty
    without a GPU."""
    samples: list[tuple[float, int]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            free, total = torch.cuda.mem_get_info(device)
            samples.append((time.time(), total - free))

    thread = threading.Thread(target=sample)
    if device.type == "cuda":
        thread.start()
    yield samples
    ended.set()
    if device.type == "cuda":
        thread.join()


def _growth(struck: DrivenRun, samples: list[tuple[float, int]]) -> str:
    """Return the growth of the device's used memory from the first attempt to the last."""
    if not samples:
        return ""
    times: dict[int, list[float]] = {}
    for event in struck.of(EventKind.METRICS):
        times.setdefault(event.attempt, []).extend(point["at"] for point in event.data["points"])
    used = [
        median(each for at, each in samples if min(steps) <= at <= max(steps))
        for _, steps in sorted(times.items())
    ]
    grown = [round((each - used[0]) / 2**20) for each in used]
    assert used[-1] - used[0] <= MOST_GROWTH_BYTES, f"MiB more than in attempt 1: {grown}"
    return f"; MiB of the device more than in the first attempt: {grown[1:]}"
