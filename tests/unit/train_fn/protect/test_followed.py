"""``es.loader`` of a DataLoader: it goes on at the very batch, in the order that the run's seed
gives to an epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import everstep.train as es
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, DataChanged
from train_fn.protect.batches import EqualBatches
from train_fn.protect.followed import FollowedLoader

PER_EPOCH = 5


class Loop:
    """What the loader sees of a protected loop."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, holds: bool = True) -> None:
        self.rank, self.world_size, self._holds = rank, world_size, holds
        self.step_number = 0
        self.seed = 11
        self.other_ranks: list[Any] = []
        """What other ranks say."""
        self.seeds_differ = self.draws_differ = self.must_be_alike = False

    def holds(self, part: object) -> bool:
        return self._holds

    def begin_step(self) -> None:
        pass

    def waited(self, seconds: float) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.other_ranks]

    def reseed(self, step: int | None = None) -> None:
        torch.manual_seed(1000 + (self.step_number if step is None else step))


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
    return StatefulDataLoader(numbers(), batch_size=4, shuffle=True)


class Again:
    def __init__(self, inner: Any) -> None:
        self.sampler = inner

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class Endless(DataLoader[Any]):
    """One iterator over all epochs, as trainers for detection have it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Again(self.batch_sampler))
        self.source = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr, arg-type]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.source)


class Finishing(DataLoader[Any]):
    """Finishes the batch in the main process."""

    def __iter__(self) -> Any:
        for (batch,) in super().__iter__():
            yield [batch + 100]


class OwnGenerator(Sampler[int]):
    """Draws from generators that it made once, as most samplers for balanced classes do."""

    def __init__(self, generator: Any) -> None:
        self.generator_of_mine = generator

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        own = self.generator_of_mine
        if isinstance(own, torch.Generator):
            return iter(torch.randperm(20, generator=own).tolist())
        if isinstance(own, random.Random):
            return iter(own.sample(range(20), 20))
        return iter(own.permutation(20).tolist())


def endless() -> Any:
    return Endless(numbers(), batch_size=4, shuffle=True)


def finishing() -> Any:
    return Finishing(numbers(), batch_size=4, shuffle=True)


def own_generator(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: DataLoader(numbers(), batch_size=4, sampler=OwnGenerator(make()))


LOADERS = [
    shuffled,
    with_generator,
    distributed,
    iterable,
    stateful,
    endless,
    finishing,
    own_generator(lambda: np.random.default_rng(7)),
    own_generator(lambda: np.random.RandomState(7)),
    own_generator(lambda: random.Random(7)),
    own_generator(lambda: torch.Generator().manual_seed(7)),
]


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
        assert sorted(each % 100 for each in seen) == list(range(20))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata
@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("done", [1, 3, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH])
def test_a_step_that_is_saved_as_the_next_begins_goes_on_at_the_very_batch(
    make: Callable[[], Any], done: int
) -> None:
    whole = read(FollowedLoader(make()), Loop(), 3 * PER_EPOCH)
    saved: list[dict[str, Any]] = []
    first, loop = FollowedLoader(make()), Loop()

    def save() -> None:
        if loop.step_number == done:
            saved.append(first.state_dict())

    loop.begin_step = save  # type: ignore[method-assign]
    read(first, loop, done + 1)
    for _ in range(2):  # the second time from a state that was saved before anything was read
        second, loop = FollowedLoader(make()), Loop()
        second.load_state_dict(saved[-1])
        saved.append(second.state_dict())
        loop.step_number = done
        assert read(second, loop, 3 * PER_EPOCH - done) == whole[done:]


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
    with pytest.raises(BadTask, match="leave global_batch_size, seed and drop_last out"):
        es.loader(numbers(), 8, batch_sampler=ByLength())
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


class Rows:
    """Samples that differ from process to process, or are drawn anew at each reading."""

    def __init__(self, offset: int = 0, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.offset, self.noise = offset, noise

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return index + self.noise(), float((index + self.offset) % 20)


def rows_after(num: int, rows: Rows, again: Rows, workers: int = 0) -> Any:
    first, loop = FollowedLoader(DataLoader(rows, batch_size=4, num_workers=workers)), Loop()
    for _ in islice(first.batches(loop), num):
        loop.step_number += 1
    second = FollowedLoader(DataLoader(again, batch_size=4, num_workers=workers))
    second.load_state_dict(first.state_dict())
    return next(second.batches(loop))


@pytest.mark.parametrize("num", [1, 3])
def test_a_restart_reads_its_last_batch_again_and_refuses_another_one(num: int) -> None:
    words = rf"batch {num} of epoch 0, the last one of step {num}, .*: batch\[1\]\. Put the data"
    with pytest.raises(DataChanged, match=words):
        rows_after(num, Rows(), Rows(offset=1))
    assert rows_after(num, Rows(3), Rows(3))[1].tolist()[0] == (4 * num + 3) % 20


UNSEEDED = random.Random()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "noise", [lambda: torch.rand(()).item(), lambda: UNSEEDED.random(), lambda: random.random()]
)
def test_what_is_drawn_anew_at_each_reading_is_no_other_data(
    noise: Callable[[], float], workers: int
) -> None:
    whole = rows_after(3, Rows(noise=noise), Rows(noise=noise), workers)
    assert whole[1].tolist() == [12, 13, 14, 15]
    with pytest.raises(DataChanged, match=r"batch\[1\]"):
        rows_after(3, Rows(noise=noise), Rows(5, noise), workers)


def test_a_rank_that_found_nothing_reads_again_with_the_one_that_did() -> None:
    """A loader may exchange batches between ranks: all of them read as often."""
    readings: list[int] = []

    class Counted(Rows):
        def __getitem__(self, index: int) -> Any:
            readings.append(index)
            return super().__getitem__(index)

    def after_a_restart(rank: int, *other_ranks: bool) -> int:
        first, loop = FollowedLoader(DataLoader(Rows(), batch_size=4)), Loop(world_size=2)
        read(first, loop, 3)
        again, second = Loop(rank=rank, world_size=2), FollowedLoader(DataLoader(Counted(), 4))
        again.step_number, again.other_ranks = 3, list(other_ranks)
        second.load_state_dict(first.state_dict())
        readings.clear()
        assert next(second.batches(again))[0].tolist() == [12, 13, 14, 15]
        return len(readings)

    assert after_a_restart(0) == after_a_restart(1) == 16, "two before it, the last, the next"
    assert after_a_restart(0, True) == after_a_restart(1, True) > 16


class Noisy(Rows):
    """Draws from a generator that it made once."""

    def __init__(self) -> None:
        super().__init__(noise=lambda: self.rng.random())
        self.rng = random.Random(7)


class Mixing:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, samples: list[Any]) -> Any:
        mixed = torch.rand(1, generator=self.generator).item()
        return torch.tensor([sample[0] + mixed for sample in samples])


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Noisy(), batch_size=4),
        lambda: DataLoader(Rows(), batch_size=4, collate_fn=Mixing()),
    ],
)
@pytest.mark.parametrize("done", [1, 3, PER_EPOCH, PER_EPOCH + 2])
def test_generators_that_data_own_go_on_at_the_very_batch(
    make: Callable[[], Any], done: int
) -> None:
    whole = read(FollowedLoader(make()), Loop(), 2 * PER_EPOCH)
    assert len({str(batch) for batch, _ in whole}) == 2 * PER_EPOCH
    first, loop = FollowedLoader(make()), Loop()
    read(first, loop, done)
    second = FollowedLoader(make())
    second.load_state_dict(first.state_dict())
    assert read(second, loop, 2 * PER_EPOCH - done) == whole[done:]


def test_epochs_read_one_by_another_go_on_on_a_rank_that_noted_nothing() -> None:
    """It asks for the epochs that are done, too, and does not take another rank's batch for its
    own."""

    def of_rank(rank: int) -> FollowedLoader:
        sampler = DistributedSampler(numbers(), num_replicas=2, rank=rank)
        return FollowedLoader(DataLoader(numbers(), batch_size=2, sampler=sampler))

    first, second = of_rank(0), of_rank(1)
    read(first, Loop(world_size=2), PER_EPOCH + 2)
    second.load_state_dict(first.state_dict())
    loop = Loop(rank=1, world_size=2)
    loop.step_number = PER_EPOCH + 2
    assert read(second, loop, epochs=1) == []
    assert len(read(second, loop, epochs=2)) == PER_EPOCH - 2


def test_generators_that_data_own_are_warned_of_in_loader_processes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(Rows(), batch_size=4, collate_fn=Mixing(), num_workers=1)
    next(FollowedLoader(loader).batches(Loop()))
    assert "generator of its own in loader processes" in caplog.text


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"generator": torch.Generator()}])
def test_an_iterator_that_reads_ahead_over_the_ends_of_epochs_is_refused_at_once(
    options: dict[str, Any],
) -> None:
    loader = Endless(numbers(), batch_size=4, shuffle=True, **options)
    with pytest.raises(BadTask, match=r"Endless.source is an iterator .* Make it in __iter__"):
        next(FollowedLoader(loader).batches(Loop()))


class Told:
    """Says in its samples which epoch it was told of."""

    epoch = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ToldStream(IterableDataset[int]):
    """The same, of samples that are no index's."""

    epoch = -1

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 8)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def prepared(loader: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(loader)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.parametrize(
    "data",
    [Told(), Subset(Told(), range(8)), ToldStream()],  # type: ignore[arg-type]
)
@pytest.mark.parametrize("wrap", [lambda loader: loader, prepared])
def test_data_is_told_of_the_epoch_where_it_is_read(
    options: Any, data: Any, wrap: Callable[[Any], Any]
) -> None:
    followed = FollowedLoader(wrap(DataLoader(data, batch_size=4, **options)))
    seen = [batch.unique().tolist() for batch in followed.batches(Loop(), epochs=3)]
    assert seen == [[0], [0], [1], [1], [2], [2]]


def test_ranks_that_a_loop_seeds_differently_draw_other_samples() -> None:
    def first(rank: int, differ: bool, make: Callable[[], Any] = shuffled) -> list[int]:
        loop = Loop(rank=rank, world_size=2)
        loop.seeds_differ = differ
        found: list[int] = next(FollowedLoader(make()).batches(loop))[0].tolist()
        return found

    assert first(0, True) != first(1, True)
    assert first(0, False) == first(1, False)
    assert first(0, True, distributed) == first(1, True, distributed), "it divides by itself"


@pytest.mark.parametrize("make", LOADERS[-4:])
def test_generators_that_samplers_own_by_rank_come_through_a_restart_of_any_rank(
    make: Callable[[], Any],
) -> None:
    """The state is that of one rank, and its place is one in the order of each."""

    def loop_of(rank: int, step: int = 0) -> Loop:
        loop = Loop(rank=rank, world_size=2)
        loop.draws_differ, loop.step_number = True, step
        return loop

    whole = [read(FollowedLoader(make()), loop_of(rank), 2 * PER_EPOCH) for rank in range(2)]
    assert whole[0] != whole[1]
    first = FollowedLoader(make())
    read(first, loop_of(0), 3)
    for rank in range(2):
        second = FollowedLoader(make())
        second.load_state_dict(first.state_dict())
        assert read(second, loop_of(rank, 3), 2 * PER_EPOCH - 3) == whole[rank][3:]


class OfRank(IterableDataset[int]):
    """Every second sample, and its own place among them."""

    def __init__(self, rank: int) -> None:
        self.first = self.at = rank

    def __iter__(self) -> Iterator[int]:
        while self.at < 40:
            self.at += 2
            yield self.at - 2
        self.at = self.first

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("done", [1, 3, PER_EPOCH, PER_EPOCH + 2])
def test_what_a_loader_says_of_one_rank_s_place_is_not_that_of_the_others(
    is_stream: bool, done: int
) -> None:
    def made(rank: int) -> FollowedLoader:
        data: Any = OfRank(rank) if is_stream else numbers()
        shuffle = None if is_stream else True
        return FollowedLoader(StatefulDataLoader(data, batch_size=4, shuffle=shuffle))

    def loop_of(rank: int, step: int = 0) -> Loop:
        loop = Loop(rank=rank, world_size=2)
        loop.seeds_differ, loop.step_number = True, step
        return loop

    whole = [read(made(rank), loop_of(rank), 2 * PER_EPOCH) for rank in range(2)]
    assert not {*map(str, whole[0])} & {*map(str, whole[1])}
    first = made(0)
    read(first, loop_of(0), done)
    for rank in range(2):
        second = made(rank)
        second.load_state_dict(first.state_dict())
        assert read(second, loop_of(rank, done), 2 * PER_EPOCH - done) == whole[rank][done:]


def test_generators_that_samplers_own_are_compared_by_their_states() -> None:
    def digest(seed: int) -> str:
        return FollowedLoader(own_generator(lambda: np.random.default_rng(seed))()).own_draws

    assert digest(7) == digest(7) != digest(8)


@pytest.mark.parametrize(
    ("steps", "is_refused"),
    [
        ([(1, 1), (2, 2), (3, 3)], True),
        ([(1, 2), (2, 3), (4, 5)], False),
        ([(1, 1), (2, 2), (3, 4)], False),
        ([(1, 1), (1, 1), (1, 1), (1, 1)], False),
        ([(0, 0), (0, 0), (0, 0)], False),
        ([(1, 2, 1), (3, 4, 3), (5, 6, 5)], True),
    ],
)
def test_ranks_with_equal_batches_in_several_steps_are_refused(
    steps: list[tuple[int, ...]], is_refused: bool
) -> None:
    equal = EqualBatches()
    words = "got the same batches in 3 steps.*DistributedSampler"
    with pytest.raises(BadTask, match=words) if is_refused else nullcontext():
        for marks in steps:
            equal.note(marks)


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("most_samples", "num_batches", "num_samples", "most"),
    [
        (None, 6, 24, None),
        (12, 6, 24, 3),
        (12, 3, 24, 2),  # of two ranks: at least as many
        (1, 6, 24, 1),
        (100, 6, 24, None),
        (12, None, 24, None),
        (12, 6, None, None),
    ],
)
def test_a_limit_leaves_the_same_share_of_batches_as_of_samples(
    most_samples: int | None, num_batches: int | None, num_samples: int | None, most: int | None
) -> None:
    ctx = cast(WorkerContext, SimpleNamespace(most_samples=most_samples))
    assert WorkerContext.limited_batches(ctx, num_batches, num_samples) == most


@pytest.mark.parametrize("make", [shuffled, with_generator, distributed])
@pytest.mark.parametrize("done", range(7))
def test_a_limited_loader_ends_its_epochs_early_and_goes_on_at_the_very_batch(
    make: Callable[[], DataLoader[Any]], done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SimpleNamespace(most_samples=11)  # of 20 in batches of 4
    limited = SimpleNamespace(
        limited_batches=lambda *facts: WorkerContext.limited_batches(cast(Any, limits), *facts)
    )
    monkeypatch.setattr(own_loop, "present", SimpleNamespace(ctx=limited))

    def run(data: FollowedLoader, first: int, last: int) -> list[Any]:
        loop, found = Loop(), []
        loop.step_number = first
        for batch in data.batches(loop, epochs=3):
            found.append((data.epoch, data.ends_epoch_in(0), str(batch)))
            loop.step_number += 1
            if loop.step_number == last:
                break
        return found

    whole = run(FollowedLoader(make()), 0, 100)
    assert [(epoch, ends) for epoch, ends, _ in whole] == [
        (epoch, number == 2) for epoch in range(3) for number in range(3)
    ]
    broken, again = FollowedLoader(make()), FollowedLoader(make())
    begun = run(broken, 0, done) if done else []
    if done:
        again.load_state_dict(broken.state_dict())
    assert begun + run(again, done, 100) == whole


class Wrapped:
    """A loader in another object, as Fabric gives it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.ones(2)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(range(4), num_workers=2, in_order=False), "Leave in_order out"),  # type: ignore[arg-type]
        (Wrapped(), "a Wrapped, which is no DataLoader"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_refused_where_the_loop_starts(
    loader: Any, words: str
) -> None:
    with pytest.raises(BadTask, match=words):
        es.loader(loader)


class CountingEpochs(DataLoader[Any]):
    """Counts an epoch whenever it is iterated, as loaders of streams do. It has a state."""

    num_begun = 0

    def __iter__(self) -> Any:
        self.num_begun += 1
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.num_begun))
        return iter(order.split(4))

    def state_dict(self) -> dict[str, int]:
        return {"num_begun": self.num_begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_begun = state["num_begun"]


class CountingSampler(Sampler[int]):
    num_begun = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        self.num_begun += 1
        return iter(random.Random(self.num_begun).sample(range(20), 20))


class UsedUp(IterableDataset[int]):
    def __init__(self) -> None:
        self._lines = iter(range(100))

    def __iter__(self) -> Iterator[int]:
        return self._lines


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (CountingEpochs(numbers()), "CountingEpochs gives other .* by a plain DataLoader"),
        (DataLoader(numbers(), batch_size=4, sampler=CountingSampler()), r"set_epoch\(epoch\)"),
        (DataLoader(UsedUp(), batch_size=4), "uses up its data"),
    ],
)
def test_a_loader_that_is_another_one_whenever_it_is_begun_is_refused_at_its_first_batch(
    loader: Any, words: str
) -> None:
    with pytest.raises(BadTask, match=words):
        next(FollowedLoader(loader).batches(Loop()))


class ByLength:
    """Batches of numbers, another count in each epoch; a sampler as those that pack by tokens."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def batches(self) -> list[list[int]]:
        drawn = random.Random(f"{self.seed} {self.epoch}")
        order, found = drawn.sample(range(20), 20), []
        while order:
            size = drawn.randint(1, 6)
            found.append(order[:size])
            order = order[size:]
        return found

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())


class CountsItself(ByLength):
    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        return iter(self.batches())


class CountsAtTheEnd(ByLength):
    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.batches()
        self.epoch += 1


class KeepsTheFirst(ByLength):
    """It makes its batches when they are first asked for."""

    kept: list[list[int]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        self.kept = self.kept or self.batches()
        return iter(random.Random(self.epoch).sample(self.kept, len(self.kept)))


@pytest.mark.parametrize("done", [1, 4, 6, 9])
def test_a_batch_sampler_goes_on_at_the_very_batch(done: int) -> None:
    first, second, third = (es.loader(numbers(), batch_sampler=ByLength()) for _ in range(3))
    whole = read(third, Loop(), epochs=3)
    sampler, expected, loop = ByLength(), list[list[int]](), Loop()
    for sampler.epoch in range(3):
        expected += sampler.batches()
    assert [batch for batch, _ in whole] == expected
    before = read(first, loop, done)
    second.load_state_dict(first.state_dict())
    assert before + read(second, loop, epochs=3) == whole


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (CountsItself(), r"set_epoch\(epoch\)"),
        (CountsAtTheEnd(), r"set_epoch\(epoch\)"),
        (KeepsTheFirst(), r"gives other batches"),
        (iter([[1, 2], [3]]), r"is a list_iterator, which cannot begin an epoch again"),
        (7, r"is a int, which cannot"),
    ],
)
def test_a_batch_sampler_that_cannot_be_followed_is_refused_where_the_loop_starts(
    sampler: Any, words: str
) -> None:
    with pytest.raises(BadTask, match=words):
        next(es.loader(numbers(), batch_sampler=sampler).batches(Loop()))


def test_one_that_counts_only_later_is_refused_at_a_restart() -> None:
    """It is no other data, and no chance of loader processes."""

    class CountingLate(CountingEpochs):
        def __iter__(self) -> Any:
            self.num_begun += 1
            seed = max(0, self.num_begun - 3)
            return iter(torch.randperm(20, generator=torch.Generator().manual_seed(seed)).split(4))

    first, loop = FollowedLoader(CountingLate(numbers())), Loop()
    for _ in islice(first.batches(loop), PER_EPOCH + 2):
        loop.step_number += 1
    second = FollowedLoader(CountingLate(numbers()))
    second.load_state_dict(first.state_dict())
    with pytest.raises(BadTask, match="counts how often it was iterated"):
        next(second.batches(loop))
