"""es.loader: at any world size the ranks' shares make up the same global batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.unit.train_fn.protect.test_followed import Told
from train_fn import own_loop
from train_fn.errors import BadTask
from train_fn.protect.batches import Batches, Share, share_in
from train_fn.samples.ledger import Count, sample_hash
from train_fn.samples.sampler import Sampler


class Loop:
    """A protected loop of one rank that only counts."""

    def __init__(self, rank: int = 0, world_size: int = 1, step: int = 0) -> None:
        self.rank, self.world_size, self.step_number = rank, world_size, step
        self.taken: list[Share] = []

    def attach(self, data: Batches, end: int) -> None:
        pass

    def take(self, share: Share) -> None:
        self.taken.append(share)

    def waited(self, seconds: float) -> None:
        pass


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def read(data: Batches, loop: Loop, steps: int) -> Iterator[Any]:
    for (batch,) in data.batches(loop, steps=steps):
        yield batch
        loop.step_number += 1


@given(
    num_samples=st.integers(1, 90),
    global_batch_size=st.integers(1, 20),
    world_size=st.integers(1, 7),
    first=st.integers(0, 200),
)
def test_shares_make_up_the_global_batches(
    num_samples: int, global_batch_size: int, world_size: int, first: int
) -> None:
    sampler = Sampler(num_samples, global_batch_size, global_batch_size, 3)
    for step in range(first, first + 70):
        epoch, k = divmod(step, sampler.steps_per_epoch)
        batch = sampler.global_batch(epoch, k)
        shares = [share_in(sampler, step, rank, world_size) for rank in range(world_size)]
        own = [share.indices for share in shares if share.own.num_samples]
        assert np.array_equal(np.concatenate(own), batch)
        assert all(len(share.indices) for share in shares), "a rank has nothing to run"
        total = Count()
        for share in shares:
            total = total + share.own
            assert share.weight == share.own.num_samples * world_size / len(batch)
        hashed = sample_hash(epoch, step, batch)
        assert total == shares[0].whole == Count(len(batch), 0, 0, hashed)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_goes_on_at_the_very_batch(num_workers: int) -> None:
    data = Batches(numbers(50), 8, num_workers=num_workers)
    assert len(data) == 7
    whole = [batch.tolist() for batch in read(data, Loop(), 14)]
    resumed = [batch.tolist() for batch in read(data, Loop(step=5), 14)]
    assert resumed == whole[5:]
    assert sorted(number for batch in whole[:7] for number in batch) == list(range(50))
    assert len(whole[6]) == 2


def test_a_rank_without_samples_keeps_its_stream_and_counts_for_nothing() -> None:
    data = Batches(numbers(17), 8)
    weights, seen = [], []
    for batch in read(data, Loop(rank=1, world_size=2), 6):
        weights.append(data.weight)
        seen.append(len(batch))
    assert weights == [1.0, 1.0, 0.0] * 2 and seen == [4, 4, 1] * 2


def test_the_short_batch_can_be_left_out() -> None:
    data = Batches(numbers(17), 8, drop_last=True)
    assert len(data) == 2
    assert [len(batch) for batch in read(data, Loop(), 4)] == [8] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataset": DataLoader(numbers(8))}, "pass loader.dataset"),
        ({"dataset": iter([1])}, "map-style"),
        ({"dataset": []}, "length 0"),
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": 2.5}, "global_batch_size"),
        ({"seed": -1}, "seed"),
        ({"collate": 3}, "collate"),
        ({"global_batch_size": 99, "drop_last": True}, "drop_last"),
        ({"num_workers": True}, "num_workers"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadTask, match=words):
        Batches(**{"dataset": numbers(8), "global_batch_size": 4, **arguments})


def test_more_ranks_than_samples_in_a_batch_are_refused() -> None:
    with pytest.raises(BadTask, match="smaller than the 9 ranks"):
        next(Batches(numbers(20), 8).batches(Loop(world_size=9), steps=1))
    with pytest.raises(BadTask, match="steps"):
        next(Batches(numbers(20), 8).batches(Loop(), steps=0))


def whole(data: Batches, loop: Loop, steps: int) -> Iterator[Any]:
    """Batches as they are yielded."""
    for batch in data.batches(loop, steps=steps):
        yield batch
        loop.step_number += 1


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_data_is_told_of_the_epoch_in_the_process_that_reads(
    wrapped: bool, num_workers: int
) -> None:
    dataset: Any = Subset(Told(), range(8)) if wrapped else Told()  # type: ignore[arg-type]
    data = Batches(dataset, 4, num_workers=num_workers)
    seen = [batch.unique().tolist() for batch in whole(data, Loop(), 6)]
    assert seen == [[0], [0], [1], [1], [2], [2]]
    again = [batch.unique().tolist() for batch in whole(data, Loop(step=3), 6)]
    assert again == seen[3:], "a restart begins within an epoch"


def test_a_restart_that_reads_its_last_batch_again_tells_the_data_of_the_epoch_anew() -> None:
    """What it says for that reading is undone with it."""
    data = Batches(Told(), 4)
    expected = Batches(Told(), 4).marks_of(2, 0, 1)
    assert data.marks_of(2, 0, 1) == expected
    again = [batch.unique().tolist() for batch in whole(data, Loop(step=3), 6)]
    assert again == [[1], [2], [2]]


class Mixing:
    """Draws from a generator that it made once."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __call__(self, samples: list[Any]) -> float:
        return float(self.rng.random())


class Noisy:
    """Data that draw from the generators that ``change`` holds, or reads as a global."""

    def __init__(self, change: Any) -> None:
        self.steps = [change]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(self.steps[0](index))


def closure() -> Any:
    own = random.Random(7)
    return lambda _: own.random()


OF_MODULE = np.random.RandomState(7)


def of_module(_: Any) -> Any:
    return OF_MODULE.random()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [None, Mixing, closure, lambda: of_module])
def test_own_generators_of_data_and_collate_function_go_on_at_the_place(
    num_workers: int, make: Any
) -> None:
    def drawn(step: int) -> list[Any]:
        collate = {} if make else {"collate": Mixing()}
        data = Batches(Noisy(make()) if make else numbers(8), 4, num_workers=num_workers, **collate)
        return [str(each) for each in whole(data, Loop(step=step), 6)]

    assert len(set(drawn(0))) == 6
    assert drawn(3) == drawn(0)[3:]


def test_a_collate_function_is_told_of_the_epoch_too() -> None:
    class Sizes(Told):
        def __call__(self, samples: list[Any]) -> int:
            return self.epoch

    data = Batches(numbers(8), 4, Sizes())
    assert list(whole(data, Loop(), 4)) == [0, 0, 1, 1]


def test_a_rehearsal_reads_a_part_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = SimpleNamespace(limited=lambda num_samples: min(num_samples, 9))
    monkeypatch.setattr(own_loop, "present", SimpleNamespace(ctx=ctx))
    data = Batches(list(range(100)), 4)
    assert (len(data), data.sampler.num_samples) == (3, 9)
