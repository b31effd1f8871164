"""The phases of ``test_phases`` on collectives that fail as NCCL's do, through Ray: nobody is freed
before the controller lets go, and what is aborted leaves garbage.

A few plans run with ``make test-all``, all of them with ``make chaos``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest

from everstep.wire.events import EventKind
from tests.chaos.test_phases import PLANS, reference, strike_and_check
from tests.integration.ray_cluster import RayCluster, ray_cluster
from tests.support.silent_backend import SilentOptions, autoload

__all__ = ["reference"]

pytestmark = pytest.mark.timeout(400)

SHORT = [
    ("all_reduce", 2, SIGSTOP),
    ("recovery", 2, SIGKILL),
]
"""Phase, number of ranks, and signal."""
LONG = [
    plan
    for phase in (*PLANS, "rendezvous")
    for world in (2, 3)
    for how in (SIGKILL, SIGSTOP)
    if (plan := (phase, world, how)) not in SHORT
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Aborts take a moment, and hosts run ahead of their collectives."""
    options = SilentOptions(abort_s=0.3, run_ahead=True, delay_s=0.001)
    with ray_cluster(3, **autoload(tmp_path_factory.mktemp("plug-in"), options)) as running:
        yield running


@pytest.fixture(scope="module")
def hanging_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    options = SilentOptions(abort_s=3600)
    with ray_cluster(3, **autoload(tmp_path_factory.mktemp("plug-in"), options)) as running:
        yield running


@pytest.mark.chaos
@pytest.mark.parametrize("how", [SIGKILL, SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("world", [2, 3])
def test_no_step_is_lost_where_an_abort_never_ends(
    world: int,
    how: Signals,
    hanging_cluster: RayCluster,
    reference: Callable[[int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    run = strike_and_check("all_reduce", world, how, hanging_cluster, reference(world), tmp_path)
    for event in run.of(EventKind.RECOVERED):
        assert event.data["phases"]["leave"] < 15, "the hold was not waited for to its end"


@pytest.mark.chaos
@pytest.mark.parametrize("world", [2, 3])
def test_an_error_of_the_device_is_the_hardwares_and_costs_no_step(
    world: int,
    cluster: RayCluster,
    reference: Callable[[int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Its peers hang in the collective that it left, until the controller lets them go."""
    run = strike_and_check("device", world, SIGKILL, cluster, reference(world), tmp_path)
    [failure] = run.of(EventKind.FAILURE)
    assert (failure.data["evidence"]["kind"], failure.data["budget"]) == (
        "device",
        "system_failures",
    )
    [recovered] = run.of(EventKind.RECOVERED)
    assert recovered.data["recovery_s"] < 30, "no node is avoided that the run cannot do without"


@pytest.mark.parametrize(
    ("phase", "world", "how"),
    [
        pytest.param(
            *plan,
            id=f"{plan[0]}-{plan[1]}-{plan[2].name}",
            marks=marks,
        )
        for plans, marks in ((SHORT, ()), (LONG, pytest.mark.chaos))
        for plan in plans
    ],
)
def test_a_rank_struck_among_silent_peers(
    phase: str,
    world: int,
    how: Signals,
    cluster: RayCluster,
    reference: Callable[[int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    run = strike_and_check(phase, world, how, cluster, reference(world), tmp_path)
    backends = {event.data["backend"] for event in run.of(EventKind.TRAINING_STARTED)}
    assert backends == {"silent"}
