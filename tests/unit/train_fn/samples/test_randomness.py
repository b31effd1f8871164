"""Counter-based randomness: a function of what it is for, and of nothing else."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from train_fn.data.images import flip, shift
from train_fn.samples.sampler import key, mix, seed_micro_batch, seed_sample, uniform

CPU = torch.device("cpu")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_scalar_and_array_mixing_agree(value: int, keyed: int) -> None:
    mixed = mix(np.array([value], dtype=np.uint64), keyed)
    state = ((value ^ keyed) + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    assert int(mixed[0]) == state ^ (state >> 31)


def test_keys_depend_on_every_part_and_its_place() -> None:
    keys = {
        key(*parts) for parts in [(), (0,), (0, 0), (1, 0), (0, 1), (2**64,), (1, 2, 3), (3, 2, 1)]
    }
    assert len(keys) == 7  # 2**64 is 0


def test_uniform_is_uniform_and_its_streams_are_apart() -> None:
    indices = np.arange(100_000)
    first, second = uniform(0, 0, indices, "flip"), uniform(0, 0, indices, "shift-x")
    assert first.min() >= 0 and first.max() < 1
    assert np.allclose(np.histogram(first, bins=10, range=(0, 1))[0], 10_000, atol=500)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first, uniform(0, 1, indices, "flip"))[0, 1]) < 0.02


def test_seeds_reach_all_three_generators() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    seed_sample(1, 2, 3)
    first = draw()
    seed_sample(1, 2, 4)
    assert all(one != other for one, other in zip(draw(), first, strict=True))
    seed_sample(1, 2, 3)
    assert draw() == first
    seed_micro_batch(1, 2, 3, CPU)
    second = draw()
    assert second != first
    seed_micro_batch(1, 2, 3, CPU)
    assert draw() == second


def test_augmentation_depends_on_the_sample_and_not_on_its_neighbours() -> None:
    images = np.random.default_rng(0).integers(0, 255, (64, 3, 9, 9), dtype=np.uint8)
    indices = np.arange(64) * 7

    def augmented(chosen: np.ndarray) -> np.ndarray:
        return flip(shift(images[chosen], 5, 2, indices[chosen], 2), 5, 2, indices[chosen])

    whole = augmented(np.arange(64))
    order = np.random.default_rng(1).permutation(64)
    parts = np.concatenate([augmented(part) for part in np.array_split(order, 5)])
    assert np.array_equal(parts, whole[order])
    assert not np.array_equal(whole, images)


def test_shifts_reach_every_place_and_move_zeros_in() -> None:
    images = np.ones((2000, 1, 3, 3), dtype=np.uint8)
    shifted = shift(images, 0, 0, np.arange(2000), 1)
    assert {int(image.sum()) for image in shifted} == {4, 6, 9}
    assert len({image.tobytes() for image in shifted}) == 9
