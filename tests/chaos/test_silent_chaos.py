"""The seeded faults of ``test_chaos`` on collectives that fail as NCCL's do: no garbage is elected,
no innocent node is blamed, and the weights are those of gloo's ranks in peace, bit by bit.

Part of ``make chaos``; ``ARGS="-k silent7"`` runs one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.test_chaos import (
    CLUSTER_AND_RUN_S,
    FirstDescriptors,
    Replayed,
    check_seed,
    clusters_with,
    first_fds,
    replayed,
    world_of,
)
from tests.support.service_process import ServiceProcess
from tests.support.silent_backend import SilentOptions, autoload

__all__ = ["first_fds", "replayed"]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(CLUSTER_AND_RUN_S)]

SEEDS = tuple(sorted(range(100, 130), key=lambda seed: seed % 3))
"""None of those that run over gloo; seeds of one world size share a cluster."""
OPTIONS = SilentOptions(abort_s=0.3, run_ahead=True, delay_s=0.001)
"""Aborts take a moment, and hosts run ahead of their collectives."""


@pytest.fixture(scope="module")
def clusters(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[int], ServiceProcess]]:
    """A service whose cluster has so many nodes, and whose ranks take the silent backend."""
    env = autoload(tmp_path_factory.mktemp("plug-in"), OPTIONS)
    with clusters_with(env) as of:
        yield of


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"silent{seed}")
def test_seeded_faults_among_silent_peers(
    seed: int,
    clusters: Callable[[int], ServiceProcess],
    first_fds: FirstDescriptors,
    replayed: Replayed,
    tmp_path: Path,
) -> None:
    run = check_seed(seed, clusters(world_of(seed)), first_fds, replayed, tmp_path)
    begun = [event.data for event in run.events() if event.kind == "training_started"]
    assert {data["backend"] for data in begun} == {"silent"}
