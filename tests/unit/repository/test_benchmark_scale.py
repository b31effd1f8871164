"""The simulation of large clusters: where its answer can be worked out by hand, it gives that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale.parameters import EVERSTEP, MTTF_AT_16384_S, TORCHRUN, Costs
from benchmarks.scale.simulation import predict, simulate

PLAIN = replace(EVERSTEP, stall_s=0.0, per_gpu_s=0.0, state_s=0.0, warm_after_s=0.0)


def small(costs: Costs, **changes: float | bool) -> Costs:
    return replace(costs, **{"stall_s": 0.0, "per_gpu_s": 0.0, "state_s": 0.0, **changes})  # type: ignore[arg-type]


def test_a_kill_costs_its_recovery_and_a_node_its_return_too() -> None:
    ranks = [(60.0 * minute + 20, "process") for minute in range(10)]
    assert predict(PLAIN, ranks, 600) == pytest.approx(1 - PLAIN.recovery_s / 60)
    nodes = [(60.0 * minute + 20, "node") for minute in range(10)]
    assert predict(PLAIN, nodes, 600) == pytest.approx(1 - (PLAIN.recovery_s + 0.51) / 60)


def test_steps_since_the_last_save_are_lost_where_nobody_keeps_them() -> None:
    costs = small(TORCHRUN, recovery_s=40.0, again_s=40.0, most_interval_s=100.0)
    assert predict(costs, [(250.0, "process")], 1000) == pytest.approx((1000 - 40 - 50) / 1000)
    assert predict(replace(costs, loses_steps=False), [(250.0, "process")], 1000) == pytest.approx(
        0.96
    )


def test_a_failure_within_a_recovery_begins_it_again() -> None:
    kills = [(100.0, "process"), (100.4, "process")]
    assert predict(PLAIN, kills, 200) == pytest.approx(1 - (0.4 + PLAIN.recovery_s) / 200)
    slow = replace(PLAIN, warm_after_s=20.0)
    assert predict(slow, [(100.0, "process"), (105.0, "process")], 200) == pytest.approx(
        1 - (PLAIN.recovery_s + 4.5) / 200
    )


def test_goodput_at_scale_is_what_the_rates_say() -> None:
    """No node is away for long, nothing is lost: what is left is the recovery at each failure, and
    a growth for each node's."""
    goodput, shares = simulate(
        replace(PLAIN, recovery_s=60.0, again_s=60.0, grow_s=0.0), 16_384, num_failures=2000
    )
    assert shares["restarting"] == pytest.approx(60 / MTTF_AT_16384_S, rel=0.1)
    assert goodput + sum(shares.values()) == pytest.approx(1.0, abs=0.01)
