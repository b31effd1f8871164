"""Two ranks share one GPU over NCCL, and FSDP2 shards their model. One is killed after its
optimizer has stepped, its replacement while it starts, and then the other one; the final pieces
equal those of an undisturbed run bit by bit."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from signal import SIGKILL

import torch

from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import Strike
from tests.gpu.parts.two_ranks import NEVER, cluster_of, recovered_without_loss, train
from tests.gpu.verdict import Shown
from tests.integration.ray_cluster import RayCluster, ray_cluster
from tests.integration.test_exactness import assert_same, final_state

STRIKES = [
    Strike("commit", 1, 6, 1, SIGKILL),
    Strike("start", 1, 0, 2, SIGKILL),
    Strike("commit", 0, 13, 3, SIGKILL),
]
SHARDED = {"sharding": "full", "ema_decay": None}


def run(device: torch.device, directory: Path) -> Shown:
    on_gpu = device.type == "cuda"
    with _cluster(device, directory) as cluster:
        peace = train(cluster, directory / "peace", NEVER, device, on_cpu="gloo", **SHARDED)
        struck = train(
            cluster,
            directory / "struck",
            STRIKES,
            device,
            on_cpu="gloo",
            **SHARDED,
        )
    kinds = [event.data["rung"] for event in struck.of(EventKind.RECOVERED)]
    seconds = recovered_without_loss(struck, len(kinds))
    assert_same(final_state(struck.run_dir), final_state(peace.run_dir))
    return Shown(
        f"a rank killed in the commit, in a start and in the commit: rungs {', '.join(kinds)}, 0 "
        f"steps lost, all pieces equal bit by bit, recovered in {seconds} s",
        "" if on_gpu else "NCCL, pieces that are copied from a GPU",
    )


def _cluster(device: torch.device, directory: Path) -> AbstractContextManager[RayCluster]:
    # the stand-in has no collectives of shards
    return cluster_of(2, device, directory) if device.type == "cuda" else ray_cluster(2)
