"""The data order: a permutation of every epoch, cut the same way whatever the world size and
wherever it is resumed."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_fn.samples import sampler as sampler_module
from train_fn.samples.sampler import MicroBatch, Sampler, WholeShares, permute, share_of

SAMPLERS = st.builds(
    lambda num_samples, global_batch_size, divisor, seed: Sampler(
        num_samples, global_batch_size, max(1, global_batch_size // divisor), seed
    ),
    num_samples=st.integers(1, 700),
    global_batch_size=st.integers(1, 150),
    divisor=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
)


def flat(micro_batches: list[MicroBatch]) -> list[int]:
    return [index for micro in micro_batches for index in micro.indices.tolist()]


@given(num_samples=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = permute(seed, epoch, num_samples, np.arange(num_samples, dtype=np.uint64))
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@given(sampler=SAMPLERS, epoch=st.integers(0, 50), world_size=st.integers(1, 9))
def test_every_sample_of_an_epoch_is_used_once_at_any_world_size(
    sampler: Sampler, epoch: int, world_size: int
) -> None:
    used = []
    for k in range(sampler.steps_per_epoch):
        shares = [sampler.share(epoch, k, rank, world_size) for rank in range(world_size)]
        batch = [index for share in shares for index in flat(share)]
        # contiguous runs, in canonical order
        assert batch == sampler.global_batch(epoch, k).tolist()
        assert [micro.number for share in shares for micro in share] == list(
            range(sum(map(len, shares)))
        )
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        sizes = {len(micro.indices) for share in shares for micro in share[:-1]}
        assert sizes <= {sampler.micro_batch_size}
        used += batch
    assert sorted(used) == list(range(sampler.num_samples))


@given(sampler=SAMPLERS, data=st.data(), world_size=st.integers(1, 5))
def test_a_resumed_stream_goes_on_where_the_whole_one_was(
    sampler: Sampler, data: st.DataObject, world_size: int
) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    step = data.draw(st.integers(0, 2 * sampler.steps_per_epoch))
    before = [
        micro
        for earlier in range(step)
        for micro in sampler.share(*divmod(earlier, sampler.steps_per_epoch), rank, world_size)
    ]
    num_more = (
        5
        if any(sampler.share(0, k, rank, world_size) for k in range(sampler.steps_per_epoch))
        else 0
    )
    whole = list(islice(sampler.stream(0, 0, rank, world_size), len(before) + num_more))
    resumed = list(
        islice(sampler.stream(*divmod(step, sampler.steps_per_epoch), rank, world_size), num_more)
    )
    assert flat(before) + flat(resumed) == flat(whole)


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    orders = {
        tuple(Sampler(1000, 1000, 100, seed).global_batch(epoch, 0).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    # A shuffle sends neighbours apart: of a random permutation of n, about 2 neighbours stay
    # neighbours.
    order = np.array(next(iter(orders)))
    assert (np.abs(np.diff(order)) == 1).sum() < 12
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.12


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(1000, 64, 16, 5)
    expected = [sampler.global_batch(2, k).tolist() for k in range(sampler.steps_per_epoch)]
    monkeypatch.setattr(sampler_module, "_BLOCK", 100)
    sampler_module._block.cache_clear()
    found = [sampler.global_batch(2, k).tolist() for k in range(sampler.steps_per_epoch)]
    sampler_module._block.cache_clear()
    assert found == expected


def test_the_order_never_changes_between_versions() -> None:
    """A run that is resumed by a later version must meet the same order."""
    assert Sampler(1437, 128, 32, 0).global_batch(0, 0)[:6].tolist() == [
        76,
        1319,
        379,
        217,
        999,
        601,
    ]
    assert Sampler(10**12, 4, 1, 7).global_batch(3, 10**11).tolist() == [
        335593528760,
        770191972706,
        901297041918,
        358527634353,
    ]


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="training set is empty"):
        Sampler(0, 4, 1, 0)


@given(count=st.integers(0, 100), world_size=st.integers(1, 20))
def test_shares_cover_everything_once(count: int, world_size: int) -> None:
    assert [
        thing for rank in range(world_size) for thing in share_of(count, rank, world_size)
    ] == list(range(count))


@pytest.mark.parametrize("world_size", [1, 3, 4, 9])
@pytest.mark.parametrize("num_samples", [40, 100])
def test_a_rank_without_micro_batches_has_an_empty_stream(
    world_size: int, num_samples: int
) -> None:
    sampler = Sampler(num_samples, 64, 16, 5)
    num_micro = -(-min(num_samples, 64) // 16)
    for rank in range(world_size):
        found = list(islice(sampler.stream(1, sampler.steps_per_epoch - 1, rank, world_size), 2))
        assert len(found) == (2 if rank < num_micro else 0), rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 12])
def test_whole_shares_are_the_global_batch_and_none_is_a_single_sample(world_size: int) -> None:
    for num_samples in (53, 48, 49, 24):
        sampler = WholeShares(num_samples, 12, 12, 7)
        plain = Sampler(num_samples, 12, 12, 7)
        for k in range(sampler.steps_per_epoch):
            shares = [sampler.share(0, k, rank, world_size) for rank in range(world_size)]
            sizes = [len(micro.indices) for [micro] in filter(None, shares)]
            found = np.concatenate([micro.indices for [micro] in filter(None, shares)])
            assert found.tolist() == plain.global_batch(0, k).tolist()
            assert [micro.number for [micro] in filter(None, shares)] == list(range(len(sizes)))
            assert max(sizes) - min(sizes) <= 1 and (min(sizes) > 1 or len(found) == 1)
            assert len(sizes) == max(1, min(world_size, len(found) // 2))
