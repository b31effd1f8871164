"""``es.loader`` of a DataLoader: it goes on at the very batch, in the order that the run's seed
gives to an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import everstep.train as es
from train_fn.errors import BadTask, DataChanged
from train_fn.protect.followed import FollowedLoader

PER_EPOCH = 5


class Loop:
    """What the loader sees of a protected loop."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, holds: bool = True) -> None:
        self.rank, self.world_size, self._holds = rank, world_size, holds
        self.step_number = 0
        self.seed = 11

    def holds(self, part: object) -> bool:
        return self._holds

    def reseed(self) -> None:
        torch.manual_seed(1000 + self.step_number)


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(20))


def shuffled() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=4, shuffle=True)


def with_generator() -> DataLoader[Any]:
    """A generator that is not seeded: another order in each process, but for the loader."""
    generator = torch.Generator()
    generator.seed()
    sampler = RandomSampler(numbers(), generator=generator)
    return DataLoader(numbers(), batch_size=4, sampler=sampler)


def distributed() -> DataLoader[Any]:
    sampler = DistributedSampler(numbers(), num_replicas=1, rank=0, shuffle=True)
    return DataLoader(numbers(), batch_size=4, sampler=sampler)


def iterable() -> DataLoader[Any]:
    return DataLoader(Counting(), batch_size=4)


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(numbers(), batch_size=4, shuffle=True)


LOADERS = [shuffled, with_generator, distributed, iterable, stateful]


def read(data: FollowedLoader, loop: Loop, num: int | None = None, **limits: int) -> list[Any]:
    """Batches and the random number that their step draws."""
    found = []
    for batch in islice(data.batches(loop, **limits), num):
        values = batch[0] if isinstance(batch, list) else batch
        found.append((values.tolist(), torch.rand(1).item()))
        loop.step_number += 1
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata
@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("done", [1, 3, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH])
def test_it_goes_on_at_the_very_batch(make: Callable[[], Any], done: int) -> None:
    whole = read(FollowedLoader(make()), Loop(), 3 * PER_EPOCH)
    first, loop = FollowedLoader(make()), Loop()
    before = read(first, loop, done)
    state = first.state_dict()
    torch.manual_seed(done)  # a restart has drawn something else
    second = FollowedLoader(make())
    second.load_state_dict(state)
    assert before + read(second, loop, 3 * PER_EPOCH - done) == whole
    for epoch in range(3):
        seen = [each for batch, _ in whole[epoch * PER_EPOCH :][:PER_EPOCH] for each in batch]
        assert sorted(seen) == list(range(20))


@pytest.mark.parametrize("make", [shuffled, with_generator, distributed])
def test_epochs_have_orders_of_their_own(make: Callable[[], Any]) -> None:
    found = [batch for batch, _ in read(FollowedLoader(make()), Loop(), 2 * PER_EPOCH)]
    assert found[:PER_EPOCH] != found[PER_EPOCH:]


@pytest.mark.parametrize(("limits", "num"), [({"epochs": 2}, 10), ({"steps": 7}, 7)])
def test_it_ends_after_epochs_or_steps_of_the_run(limits: dict[str, int], num: int) -> None:
    loop = Loop()
    data = FollowedLoader(shuffled())
    assert len(read(data, loop, 3)) == 3
    again = FollowedLoader(shuffled())
    again.load_state_dict(data.state_dict())
    assert len(read(again, loop, **limits)) == num - 3
    last = FollowedLoader(shuffled())
    last.load_state_dict(again.state_dict())
    assert read(last, loop, **limits) == []


def test_batches_of_one_step_draw_different_numbers() -> None:
    batches = FollowedLoader(shuffled()).batches(Loop())
    first, second = ((next(batches), torch.rand(1))[1] for _ in range(2))
    assert first != second


def test_fewer_ranks_go_on_at_the_same_number_of_samples() -> None:
    data = FollowedLoader(iterable())
    read(data, Loop(world_size=2), 2)
    again = FollowedLoader(iterable())
    again.load_state_dict(data.state_dict())
    [(batch, _)] = read(again, Loop(world_size=1), 1)
    assert batch == [16, 17, 18, 19]


def test_what_cannot_be_followed_is_said() -> None:
    with pytest.raises(BadTask, match="extra="):
        next(FollowedLoader(shuffled()).batches(Loop(holds=False)))
    with pytest.raises(BadTask, match=r"data\.batches"):
        iter(FollowedLoader(shuffled()))
    with pytest.raises(BadTask, match="yields no batch"):
        next(FollowedLoader(DataLoader([], batch_size=2)).batches(Loop()))
    with pytest.raises(BadTask, match="no other argument"):
        es.loader(shuffled(), 8)
    with pytest.raises(BadTask, match="global_batch_size"):
        es.loader(numbers())


def place_after(make: Callable[[], Any], num: int) -> dict[str, Any]:
    """The state of another run's loader after so many batches."""
    followed = FollowedLoader(make())
    for _ in islice(followed.batches(Loop()), num):
        pass
    return followed.state_dict()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata
@pytest.mark.parametrize("before", [shuffled, stateful])
@pytest.mark.parametrize("after", [shuffled, stateful])
def test_a_fork_goes_on_at_the_place_of_the_other_run_whatever_its_loader_is(
    before: Callable[[], Any], after: Callable[[], Any]
) -> None:
    followed = FollowedLoader(after())
    whole = [batch[0].tolist() for batch in islice(FollowedLoader(after()).batches(Loop()), 8)]
    followed.load_state_dict(place_after(before, 3))
    assert [batch[0].tolist() for batch in islice(followed.batches(Loop()), 5)] == whole[3:]


def test_a_fork_on_other_data_is_refused_within_an_epoch_and_begins_one_at_its_end() -> None:
    def longer() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(28)), batch_size=4)

    followed = FollowedLoader(longer())
    followed.load_state_dict(place_after(shuffled, 3))
    words = r"7 batches an epoch, .* after batch 3 of 5\. Put the data back .* or start a new run"
    with pytest.raises(DataChanged, match=words):
        next(followed.batches(Loop()))
    followed.load_state_dict(place_after(shuffled, PER_EPOCH))
    assert next(followed.batches(Loop()))[0].tolist() == [0, 1, 2, 3]
    assert followed.epoch == 1
