"""The scaling model: its limits are those that follow from its assumptions."""

from __future__ import annotations

import pytest

from benchmarks.scaling import Compute, Network, all_reduce_s, buckets, predict, step_s

MIB = 1 << 20
COMPUTE = Compute(forward_s=0.03, backward_s=0.06, update_s=0.01)
FAST = Network(8, 450e9, 0.0, 50e9, 0.0)
SLOW = Network(1, 1e9, 0.0, 1e9, 0.0)


def test_buckets_hold_all_gradients_and_begin_small() -> None:
    assert buckets(60 * MIB, 25 * MIB) == [MIB, 25 * MIB, 25 * MIB, 9 * MIB]
    assert buckets(1000, 25 * MIB) == [1000]


def test_a_ring_moves_twice_the_share_of_the_others() -> None:
    assert all_reduce_s(1e9, 1, SLOW) == 0
    assert all_reduce_s(1e9, 4, SLOW) == pytest.approx(2 * 3 / 4)
    assert all_reduce_s(8e9, 8, FAST) == pytest.approx(2 * 7 / 8 * 8 / 450)
    assert all_reduce_s(8e9, 16, FAST) == pytest.approx(2 * 7 / 8 * 8 / 450 + 2 * 1 / 2 * 1 / 50)


def test_what_hides_behind_backward_costs_only_the_last_bucket() -> None:
    sizes = buckets(100 * MIB, 25 * MIB)
    alone = step_s(COMPUTE, sizes, 1, FAST)
    assert alone == pytest.approx(0.1)
    assert step_s(COMPUTE, sizes, 8, FAST) == pytest.approx(
        alone + all_reduce_s(sizes[-1], 8, FAST)
    )


def test_a_wire_that_is_slower_than_backward_sets_the_pace() -> None:
    sizes = buckets(1000 * MIB, 25 * MIB)
    wire = sum(all_reduce_s(size, 4, SLOW) for size in sizes)
    seconds = step_s(COMPUTE, sizes, 4, SLOW)
    # forward and update, and the time until the first bucket is full
    assert wire + 0.04 < seconds < wire + 0.05
    [_, row] = predict(COMPUTE, 1000 * MIB, 25 * MIB, [1, 4], SLOW)
    assert row["efficiency"] == pytest.approx(0.1 / seconds, abs=1e-4)


def test_the_slowest_of_many_ranks_sets_the_pace() -> None:
    jittery = Compute(0.03, 0.06, 0.01, jitter_s=0.001)
    assert step_s(jittery, [MIB], 1, FAST) == pytest.approx(0.1)
    assert step_s(jittery, [MIB], 1024, FAST) - step_s(COMPUTE, [MIB], 1024, FAST) == pytest.approx(
        0.001 * 3.723, rel=1e-3
    )


def test_efficiency_only_falls_with_more_gpus() -> None:
    rows = predict(
        COMPUTE, 102e6, 25 * MIB, [1, 2, 8, 16, 64, 1024], Network(8, 450e9, 3e-6, 50e9, 10e-6)
    )
    efficiencies = [row["efficiency"] for row in rows]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
