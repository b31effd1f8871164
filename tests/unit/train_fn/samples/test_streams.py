"""Iterable data sets: streams that make the same global batches at any world size, and go on at the
very sample after a restart."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from everstep.spec.run_spec import RunSpec
from train_fn.errors import BadTask
from train_fn.samples.ledger import BOOKMARK_STEPS, Bookmarks
from train_fn.samples.loader import Loaded, Loader, WholePass
from train_fn.samples.streams import StreamSampler, StreamSet, _equal, num_streams_of

pytestmark = pytest.mark.own_process

CPU = torch.device("cpu")


class _Shared(list[int]):
    """Counts over all copies of a data set."""

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class Numbers(IterableDataset[torch.Tensor]):
    """Numbers below ``count`` that are this stream's, with noise; keeps its place as torchdata's
    data sets do."""

    def __init__(self, count: int) -> None:
        self.count, self.position = count, 0
        self.reads = _Shared()

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        while self.position * worker.num_workers + worker.id < self.count:
            self.position += 1
            self.reads.append(self.position)
            yield torch.tensor(
                (self.position - 1) * worker.num_workers + worker.id + float(torch.rand(())) / 2
            )
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Forgetful(IterableDataset[torch.Tensor]):
    """Shuffles by the global generator, and keeps nothing."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        yield from torch.randperm(50)[worker.id :: worker.num_workers].float()


class PlaceInIterator(IterableDataset[int]):
    """Keeps its place in the iterator."""

    class Places:
        def __init__(self, first: int) -> None:
            self.next = first

        def __iter__(self) -> PlaceInIterator.Places:
            return self

        def __next__(self) -> int:
            self.next += 2
            return self.next - 2

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = state["next"]

    def __iter__(self) -> PlaceInIterator.Places:
        worker = get_worker_info()
        assert worker is not None
        return self.Places(worker.id)


def make_spec(num_workers: int = 0, max_workers: int = 2, **train: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "streams",
            "code": {"archive": "sha256:" + "0" * 64, "task": "task:Task"},
            "train": {
                "global_batch_size": 16,
                "micro_batch_size": 4,
                "loader": {"num_workers": num_workers},
                **train,
            },
            "scaling": {"max_workers": max_workers},
        }
    )


def stream_set(
    dataset: Any,
    num_samples: int = 90,
    num_workers: int = 0,
    num_streams: int = 2,
    collate: Any = default_collate,
) -> StreamSet:
    sampler = StreamSampler(num_samples, 16, 4, 3, num_streams)
    return StreamSet(
        dataset,
        sampler,
        make_spec(num_workers),
        1,
        collate,
        "Task.build_datasets (task.py, line 3)",
    )


def read(
    data: StreamSet, steps: range, rank: int = 0, world_size: int = 1, exchange: bool = True
) -> dict[tuple[int, int], Loaded]:
    """What one rank reads in these steps, by (step, number of the micro-batch), with its bookmarks
    kept as a lone rank would."""
    sampler, spe = data.sampler, data.sampler.steps_per_epoch
    shares = [
        (step, micro)
        for step in steps
        for micro in sampler.share(step // spe, step % spe, rank, world_size)
    ]
    batches = data.batches(
        sampler.stream(steps.start // spe, steps.start % spe, rank, world_size), make_spec(), 1, CPU
    )
    found = {}
    for position, (step, micro) in enumerate(shares):
        loaded = next(batches)
        assert loaded.indices.tolist() == micro.indices.tolist()
        data.bookmarks.note(loaded)
        found[step, micro.number] = loaded
        if exchange and (position + 1 == len(shares) or shares[position + 1][0] > step):
            data.bookmarks.exchange(step + 1, lambda mine: [mine])
    return found


def values(found: dict[tuple[int, int], Loaded]) -> dict[tuple[int, int], list[float]]:
    return {place: loaded.batch.tolist() for place, loaded in found.items()}


# ---------------------------------------------------------------- the order


def test_streams_are_as_many_as_loader_processes_at_full_size() -> None:
    assert num_streams_of(make_spec(num_workers=0, max_workers=2)) == 2
    assert num_streams_of(make_spec(num_workers=2, max_workers=2)) == 4
    assert num_streams_of(make_spec(num_workers=3, max_workers=2)) == 4, (
        "no more than micro-batches"
    )


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_place_of_every_stream_is_run_once_by_one_rank(
    num_streams: int, world_size: int
) -> None:
    sampler = StreamSampler(90, 16, 4, 0, num_streams)
    owner: dict[int, int] = {}
    next_ordinal = dict.fromkeys(range(num_streams), 0)
    for step in range(3 * sampler.steps_per_epoch):
        epoch, k = divmod(step, sampler.steps_per_epoch)
        shares = [sampler.share(epoch, k, rank, world_size) for rank in range(world_size)]
        run = [index for share in shares for micro in share for index in micro.indices.tolist()]
        assert sorted(run) == sorted(sampler.global_batch(epoch, k).tolist())
        assert len(run) == min(16, 90 - 16 * k)
        assert [micro.number for share in shares for micro in share] == list(
            range(-(-len(run) // 4))
        )
        for rank, share in enumerate(shares):
            for micro in share:
                stream = sampler.stream_of(micro)
                assert owner.setdefault(stream, rank) == rank
                for index in micro.indices.tolist():
                    assert divmod(index, num_streams) == (next_ordinal[stream], stream)
                    next_ordinal[stream] += 1


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_goes_on_at_the_very_sample_at_any_world_size(num_workers: int) -> None:
    whole = values(read(stream_set(Numbers(70), num_workers=num_workers), range(26)))
    flat = [int(value) for step in range(4) for number in range(4) for value in whole[step, number]]
    assert sorted(flat) == sorted(set(flat)) and len(flat) == 64, "the streams divide the numbers"
    before = stream_set(Numbers(70), num_workers=num_workers)
    assert values(read(before, range(23))).items() <= whole.items()
    kept = before.bookmarks.state_dict()
    assert all(ordinal > 0 for ordinal, *_ in kept.values())
    after = [stream_set(Numbers(70), num_workers=num_workers) for _ in range(2)]
    for rank, data in enumerate(after):
        data.bookmarks.load_state_dict(kept)
        assert values(read(data, range(23, 26), rank, 2, exchange=False)).items() <= whole.items()


@pytest.mark.parametrize("dataset", [Forgetful(), PlaceInIterator()])
def test_data_that_keeps_its_place_elsewhere_or_nowhere_goes_on_as_well(dataset: Any) -> None:
    whole = values(read(stream_set(dataset), range(45)))
    before = stream_set(dataset)
    read(before, range(43))
    after = stream_set(dataset)
    after.bookmarks.load_state_dict(before.bookmarks.state_dict())
    assert values(read(after, range(43, 45), exchange=False)).items() <= whole.items()


class Told(IterableDataset[int]):
    """Says in its samples which pass it was told of, when the pass began."""

    def __init__(self, per_pass: int) -> None:
        self.per_pass, self.epoch = per_pass, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        told = self.epoch
        return iter([told] * self.per_pass)


class Collating:
    """Says which epoch it was told of, beside the samples."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor([[sample, self.epoch] for sample in samples])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_streams_are_told_of_their_passes_and_collate_of_the_epoch(num_workers: int) -> None:
    def made() -> StreamSet:
        return stream_set(Told(45), num_workers=num_workers, collate=Collating())

    whole = read(made(), range(26))
    for (step, _), loaded in whole.items():
        told, epochs = loaded.batch.T.tolist()
        assert told == [index // 2 // 45 for index in loaded.indices.tolist()]
        assert set(epochs) == {step // made().sampler.steps_per_epoch}
    before, after = made(), made()
    read(before, range(23))
    after.bookmarks.load_state_dict(before.bookmarks.state_dict())
    again = values(read(after, range(23, 26), exchange=False))
    assert again.items() <= values(whole).items()
    assert "before each pass" in made().guarantee()


def test_passes_that_are_no_epochs_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    read(stream_set(Told(10_000)), range(26))
    warned = [each.getMessage() for each in caplog.records if "set_epoch" in each.getMessage()]
    assert len(warned) == 2, "one for each stream"
    assert "stream 0 is in pass 0 where epoch 2 begins. Give train a __len__" in warned[0]


def test_a_rank_knows_the_processes_that_read_its_streams() -> None:
    data = stream_set(Numbers(70), num_workers=1)
    before = set(psutil.Process().children())
    own_threads = {each.ident for each in threading.enumerate()}
    loader = Loader(data, data.sampler.stream(0, 0, 0, 1), make_spec(), 1, CPU)
    for _ in data.sampler.share(0, 0, 0, 1):
        next(loader)
    begun = {child.pid for child in set(psutil.Process().children()) - before}
    assert len(begun) == data.sampler.num_streams and set(loader.processes) == begun
    feeding = {each.ident for each in threading.enumerate()} - own_threads
    assert feeding and set(loader.threads) == feeding
    loader.close()
    assert not {child.pid for child in psutil.Process().children()} & begun


def test_equal_batches_may_have_their_keys_in_another_order() -> None:
    one = {"x": torch.ones(2), "ids": [np.arange(2), "a"]}
    assert _equal(one, {"ids": [np.arange(2), "a"], "x": torch.ones(2)})
    for other in ({"x": torch.ones(2)}, {**one, "x": np.ones(2)}, {**one, "ids": [np.arange(2)]}):
        assert not _equal(one, other)
    assert not _equal(one, {**one, "x": torch.zeros(2)})


def test_a_rank_learns_the_bookmarks_of_all() -> None:
    ranks = [stream_set(Numbers(70)) for _ in range(2)]
    for rank, data in enumerate(ranks):
        read(data, range(BOOKMARK_STEPS), rank, 2, exchange=False)
    passed: list[Any] = []
    for data in ranks:
        data.bookmarks.exchange(BOOKMARK_STEPS, lambda mine: passed.append(mine) or [mine])
    for data in ranks:
        data.bookmarks.exchange(2 * BOOKMARK_STEPS, lambda mine: [*passed, mine])
        assert set(data.bookmarks.newest) == {0, 1}
    untouched = Bookmarks()
    untouched.exchange(BOOKMARK_STEPS - 1, lambda mine: pytest.fail("no step to exchange at"))


# ---------------------------------------------------------------- what is said, and refused


def test_the_guarantee_says_what_depends_on_the_data_set() -> None:
    assert "from the state that the data set gives" in stream_set(Numbers(70)).guarantee()
    assert "reading its pass again" in stream_set(Forgetful()).guarantee()
    assert "WARNING" not in stream_set(Numbers(70)).guarantee()

    class Undivided(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    assert "WARNING" not in stream_set(Undivided(), num_samples=3).guarantee(), (
        "the second stream has nothing to read"
    )
    assert (
        "WARNING: streams 0 and 1 begin with the same samples"
        in stream_set(Undivided()).guarantee()
    )


class Keeping(Numbers):
    def __init__(self, kept: Any) -> None:
        super().__init__(1000)
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (
            Keeping(np.arange(3)),
            (
                r"build_datasets \(task\.py, line 3\): the state_dict of train cannot be kept, "
                r".*\.tolist\(\)"
            ),
        ),
        (Numbers(1), r"train gives no sample to stream 1 of 2 after 0 samples"),
    ],
)
def test_what_cannot_be_resumed_is_refused(dataset: Any, words: str) -> None:
    with pytest.raises(BadTask, match=words):
        read(stream_set(dataset), range(BOOKMARK_STEPS + 1))


def test_what_cannot_be_copied_is_refused_in_this_process_only(tmp_path: Path) -> None:
    dataset = Numbers(70)
    dataset.file = (tmp_path / "open").open("w")  # type: ignore[attr-defined]
    with pytest.raises(BadTask, match=r"cannot be copied .* train\.loader\.num_workers to 1"):
        read(stream_set(dataset), range(1))
    assert read(stream_set(dataset, num_workers=1), range(1))
    dataset.file.close()  # type: ignore[attr-defined]


class Asking(IterableDataset[int]):
    """Reads the part that it is told to, as the example in the docs does."""

    def __iter__(self) -> Iterator[int]:
        part = get_worker_info()
        assert part is not None
        yield from range(part.id, 12, part.num_workers)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_validation_stream_is_told_what_to_read_with_and_without_a_loader_process(
    num_workers: int,
) -> None:
    whole = WholePass(Asking(), 5, 0, 1, 0, list)
    batches = DataLoader(whole, batch_size=None, num_workers=num_workers, collate_fn=_as_is)
    assert [loaded.batch for loaded in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert get_worker_info() is None


def _as_is(loaded: Any) -> Any:
    return loaded
