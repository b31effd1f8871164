"""Batches by tokens: every sample once an epoch, none too large, the same at any world size."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.spec.sections import TrainSpec
from train_fn.errors import BadTask
from train_fn.samples.sampler import MicroBatch
from train_fn.samples.token_batches import TokenSampler, token_sampler


class Texts:
    def __init__(self, lengths: Any, size: int | None = None) -> None:
        self.lengths, self.size = lengths, len(lengths) if size is None else size

    def __len__(self) -> int:
        return self.size


def sampler_of(lengths: Any, tokens: int, micro_tokens: int, seed: int = 0) -> TokenSampler:
    train = TrainSpec(batch_by="tokens", global_batch_size=tokens, seed=seed)
    return token_sampler(train, micro_tokens, Texts(lengths), None, "train")


SAMPLERS = st.builds(
    lambda lengths, room, divisor, seed: sampler_of(
        lengths, max(lengths) + room, max(1, (max(lengths) + room) // divisor), seed
    ),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=200),
    room=st.integers(0, 900),
    divisor=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)


def padded(sampler: TokenSampler, indices: Any) -> int:
    return len(indices) * int(sampler.lengths[indices].max())


def flat(micro_batches: list[MicroBatch]) -> list[int]:
    return [index for micro in micro_batches for index in micro.indices.tolist()]


@given(sampler=SAMPLERS, epoch=st.integers(0, 50), world_size=st.integers(1, 7))
def test_every_sample_is_used_once_an_epoch_in_batches_that_fit(
    sampler: TokenSampler, epoch: int, world_size: int
) -> None:
    used = []
    for k in range(sampler.steps_per_epoch):
        batch = sampler.global_batch(epoch, k)
        assert padded(sampler, batch) <= sampler.global_batch_size
        assert (sampler.size_of(k), sampler.num_before(k)) == (len(batch), len(used))
        most = max(1, sampler.global_batch_size // sampler.micro_batch_size)
        assert sampler.num_micro(k) <= sampler.num_micro(sampler.fullest) <= most
        assert sampler.tokens_in(epoch, k) == sampler.lengths[batch].sum()
        shares = [sampler.share(epoch, k, rank, world_size) for rank in range(world_size)]
        assert [index for share in shares for index in flat(share)] == batch.tolist()
        for rank, share in enumerate(shares):
            numbers = [micro.number for micro in share]
            assert numbers == list(sampler.numbers(k, rank, world_size))
            for micro in share:
                is_small = padded(sampler, micro.indices) <= sampler.micro_batch_size
                assert is_small or len(micro.indices) == 1
        used += batch.tolist()
    assert sorted(used) == list(range(sampler.num_samples))


@given(sampler=SAMPLERS, data=st.data(), world_size=st.integers(1, 4))
def test_a_rank_goes_on_where_the_whole_run_was(
    sampler: TokenSampler, data: st.DataObject, world_size: int
) -> None:
    rank, steps = data.draw(st.integers(0, world_size - 1)), sampler.steps_per_epoch
    step = data.draw(st.integers(0, 2 * steps))
    before = sum(
        len(sampler.share(*divmod(earlier, steps), rank, world_size)) for earlier in range(step)
    )
    whole = list(islice(sampler.stream(0, 0, rank, world_size), before + 5))
    resumed = list(islice(sampler.stream(*divmod(step, steps), rank, world_size), 5))
    assert flat(resumed) == flat(whole[before:])


def test_a_batch_is_nearly_full_and_another_one_in_every_epoch() -> None:
    lengths = np.random.default_rng(0).integers(20, 500, 5000)
    sampler = sampler_of(lengths, 16_384, 4096)
    fill = lengths.sum() / (sampler.steps_per_epoch * 16_384)
    assert fill > 0.9, "of each batch, padding is the rest"
    one, other = (set(sampler.global_batch(epoch, sampler.fullest)) for epoch in (0, 1))
    assert len(one) == len(other) and one != other
    assert sampler_of(lengths, 16_384, 512).global_batch(3, 2).tolist() == (
        sampler.global_batch(3, 2).tolist()
    ), "the size of a micro-batch changes no global batch"
    assert sampler_of(lengths[::-1].copy(), 16_384, 4096).fingerprint != sampler.fingerprint


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Texts([5, 700, 900]), r"sample 2 of train has 900 tokens, .* at most 512: 2 of 3 samples"),
        (Texts([5, 0, 7]), r"says 0 for sample 1; a length is at least 1"),
        (Texts([]), r"is empty; give it samples"),
        (Texts([[1], [2, 3]]), r"must hold a whole number for each"),
        (Texts(np.array([5, 2**64 - 1], dtype=np.uint64)), r"says -1 for sample 1; a length"),
        (Texts([5, 7], 3), r"of shape \(2,\); it must hold a whole number for each of its 3"),
        (Texts([5.0, 7.0]), r"an array of float64"),
        (Texts(torch.tensor([[1], [2]])), r"of shape \(2, 1\)"),
        ([1, 2], r"batch_by is tokens, and train \(list\) has no lengths"),
    ],
)
def test_what_has_no_usable_length_is_named(data: Any, words: str) -> None:
    train = TrainSpec(batch_by="tokens", global_batch_size=512)
    with pytest.raises(BadTask, match=words):
        token_sampler(train, 512, data, None, "train")
