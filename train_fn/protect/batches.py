"""``es.loader``: a rank's share of every global batch of a data set, from the step that the run is
at.

Global batches do not depend on the world size. A rank takes a contiguous share of each, of nearly
equal length, so a short last batch shifts nobody's stream.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from train_fn import own_loop
from train_fn.errors import BadTask, DataChanged, few
from train_fn.samples.ledger import Count, sample_hash
from train_fn.samples.loader import KeyedDataset, begin_loader_process, taken_as_is
from train_fn.samples.sampler import IndexArray, MicroBatch, Sampler, share_of
from train_fn.state.contents import DRAW_ALIKE, Contents, require_same_contents
from train_fn.step.peers import Peers


class Share(NamedTuple):
    """One rank's share of one global batch."""

    epoch: int
    k: int
    """The global batch within its epoch."""
    indices: IndexArray
    own: Count
    """Counts the rank's own samples: none if ``indices`` repeat those of rank 0."""
    whole: Count
    """Counts all samples of the global batch."""
    weight: float
    """The share's part of the global batch, times the world size."""


def share_in(sampler: Sampler, step: int, rank: int, world_size: int) -> Share:
    """Return a rank's share of the step after ``step`` steps done."""
    epoch, k = divmod(step, sampler.steps_per_epoch)
    batch = sampler.global_batch(epoch, k)
    part = share_of(len(batch), rank, world_size)
    own = batch[part.start : part.stop]
    # A rank without samples runs those of rank 0, with weight 0: it takes part in every
    # collective of the model.
    taken = part if len(part) else share_of(len(batch), 0, world_size)
    return Share(
        epoch,
        k,
        batch[taken.start : taken.stop],
        Count(len(own), 0, 0, sample_hash(epoch, step, own)),
        Count(len(batch), 0, 0, sample_hash(epoch, step, batch)),
        len(own) * world_size / len(batch),
    )


class Consumer(Protocol):
    """What the loader uses of a protected loop."""

    rank: int
    world_size: int

    @property
    def step_number(self) -> int: ...

    def attach(self, data: Batches, end: int) -> None:
        """Let the state follow this data up to that step. Raises DataChanged if it was trained on
        other data."""

    def note_data_error(self, error: Exception) -> None:
        """Keep what ends an iteration of the data."""

    def waited(self, seconds: float) -> None:
        """Note how long the loop waited for a batch."""

    def take(self, share: Share) -> None:
        """Begin the step that trains on this share. Raises BadTask if the step before has not been
        committed."""


class Batches:
    """The data of a protected loop. ``weight`` belongs to the newest batch: multiply its mean loss
    by it, so that DDP's mean over ranks is the mean over the global batch. It differs from 1 only
    where the global batch does not divide by the world size."""

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
    ) -> None:
        """Raises BadTask for arguments that cannot be used."""
        length = _length(dataset)
        if own_loop.present is not None:
            length = own_loop.present.ctx.limited(length)
        _require_whole("global_batch_size", global_batch_size, 1)
        _require_whole("seed", seed, 0)
        _require_whole("num_workers", num_workers, 0)
        if collate is not None and not callable(collate):
            raise BadTask(
                f"es.loader(collate=…) is a {type(collate).__name__}; pass a function of a list of "
                "samples, or leave it out for torch's default_collate"
            )
        if drop_last:
            length -= length % global_batch_size
            if not length:
                raise BadTask(
                    f"es.loader(drop_last=True) leaves nothing of {len(dataset)} samples in global "
                    f"batches of {global_batch_size}; lower global_batch_size"
                )
        self.sampler = Sampler(length, global_batch_size, global_batch_size, seed)
        self.weight = 1.0
        self.taken: Taken | None = None
        """Of the newest batch."""
        self._keyed = KeyedDataset(dataset, seed, collate or default_collate, training=True)
        self._num_workers = num_workers

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return self.sampler.steps_per_epoch

    def contents(self) -> Contents:
        """Return sketches of a few samples."""
        return Contents({"train": self._keyed.dataset})

    def marks_of(self, step: int, rank: int, world_size: int) -> dict[str, int]:
        """Read this rank's batch of the step after ``step`` steps done, and return its marks."""
        share = share_in(self.sampler, step, rank, world_size)
        return Taken(self._keyed.first(_micro_batch(share, rank)).batch).marks

    @property
    def fingerprint(self) -> str:
        """Identifies the data and its order. A run is not resumed on other data."""
        sampler = self.sampler
        return (
            f"{self._keyed.fingerprint}, {sampler.num_samples} samples in global batches of "
            f"{sampler.global_batch_size}, seed {sampler.seed}"
        )

    def batches(
        self, state: Consumer, *, epochs: int | None = None, steps: int | None = None
    ) -> Iterator[Any]:
        """Yield this rank's batches from the step that ``state`` is at, up to that many epochs or
        steps of the whole run. Call ``state.step()`` once for each.

        Random numbers that the step draws are seeded by its number. Samples are collated on the
        CPU.
        """
        if epochs is None and steps is None:
            raise BadTask(
                "data.batches(state) does not say where it ends: write data.batches(state, "
                "epochs=EPOCHS) in one loop over all epochs, or data.batches(state, "
                "epochs=epoch + 1) within `for epoch in range(state.epoch, EPOCHS):`. Both go on "
                "where the state is after a restart"
            )
        total = _total_steps(len(self), epochs, steps)
        if self.sampler.global_batch_size < state.world_size:
            raise BadTask(
                f"es.loader(global_batch_size={self.sampler.global_batch_size}) is smaller than "
                f"the {state.world_size} ranks; raise it, or start fewer ranks"
            )
        state.attach(self, total)
        loaded = self._loaded(state, total)
        while state.step_number < total:
            share = share_in(self.sampler, state.step_number, state.rank, state.world_size)
            began = time.perf_counter()
            try:
                batch = next(loaded)
            except Exception as exc:
                state.note_data_error(exc)
                raise
            state.waited(time.perf_counter() - began)
            self.weight = share.weight
            state.take(share)
            self.taken = Taken(batch)
            yield batch

    def _loaded(self, state: Consumer, total: int) -> Iterator[Any]:
        place = state.rank, state.world_size
        steps = range(state.step_number, total)
        ahead = (_micro_batch(share_in(self.sampler, step, *place), state.rank) for step in steps)
        if not self._num_workers:
            return (self._keyed.__getitems__(micro).batch for micro in ahead)
        loader = DataLoader(
            self._keyed,
            batch_sampler=ahead,  # type: ignore[arg-type]  # keys, which __getitems__ takes whole
            collate_fn=taken_as_is,
            num_workers=self._num_workers,
            worker_init_fn=partial(begin_loader_process, "loader"),
        )
        return (loaded.batch for loaded in loader)


def _micro_batch(share: Share, rank: int) -> MicroBatch:
    return MicroBatch(share.epoch, rank, np.asarray(share.indices), share.k)


def _total_steps(per_epoch: int, epochs: int | None, steps: int | None) -> int:
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None:
            _require_whole(name, value, 1, of="batches")
    ends = [*([epochs * per_epoch] if epochs else []), *([steps] if steps else [])]
    return min(ends)


def _length(dataset: Any) -> int:
    if isinstance(dataset, DataLoader):
        raise BadTask("es.loader(dataset=…) is a DataLoader; pass loader.dataset")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise BadTask(
            f"es.loader(dataset=…) is a {type(dataset).__name__} without __len__ and __getitem__; "
            "pass a map-style data set, or iterate your own loader and pass it as "
            "es.protect(extra=…) if it has a state_dict"
        )
    length = len(dataset)
    if not length:
        raise BadTask("es.loader(dataset=…) has length 0; there is nothing to train on")
    return length


def _require_whole(name: str, value: Any, least: int, of: str = "loader") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadTask(f"es.{of}({name}={value!r}) must be a whole number of at least {least}")


# ---------------------------------------------------------------- batch marks

# Marks of a batch as the loop got it: a short digest of a few values of each of its parts.
#
# A restart reads the last batch again and compares. Ranks compare theirs, since equal batches train
# on the same samples several times.

_MOST_VALUES = 1024
"""Values of a tensor that enter, evenly spaced over it."""
_MOST_PARTS = 256
_MOST_DEPTH = 6
_BITS = 60
EQUAL_STEPS = 3
"""Steps in a row in which ranks may have equal batches."""


class Taken:
    """A few values of a batch, copied before the loop can change it. On a GPU they are read when
    the marks are first asked for."""

    def __init__(self, batch: Any) -> None:
        self._values = dict(_parts(batch, "batch", 0))
        self._marks: dict[str, int] | None = None

    @property
    def marks(self) -> dict[str, int]:
        """Return a digest of each part, by its place in the batch."""
        if self._marks is None:
            self._marks = {name: _digest(value) for name, value in self._values.items()}
            self._values = {}
        return self._marks

    @property
    def whole(self) -> int:
        """Return one number for the whole batch; never 0."""
        return _digest(repr(self.marks)) or 1


def differing(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """Return the places whose digests differ, or that only one batch has."""
    names = [*one, *(name for name in other if name not in one)]
    return [name for name in names if one.get(name) != other.get(name)]


class EqualBatches:
    """Find ranks that train on the same batches step after step. Data that is the same in every
    step says nothing."""

    def __init__(self) -> None:
        self._before: Sequence[int] = ()
        self._num_equal = 0

    def note(self, marks: Sequence[int]) -> None:
        """Note the batches of a step, one mark for each rank; 0 is not known. Raises BadTask."""
        known = [mark for mark in marks if mark]
        is_equal = len(set(known)) < len(known)
        is_new = bool(self._before) and not set(marks) & set(self._before)
        self._num_equal = self._num_equal + 1 if is_equal and (is_new or not self._before) else 0
        self._before = list(marks)
        if self._num_equal < EQUAL_STEPS:
            return
        second = next(at for at, mark in enumerate(marks) if mark and mark in marks[:at])
        raise BadTask(
            f"ranks {marks.index(marks[second])} and {second} got the same batches in "
            f"{EQUAL_STEPS} steps, so samples count twice. Divide the data: "
            "sampler=DistributedSampler(dataset) in the DataLoader, torch.manual_seed(seed + rank) "
            "before es.protect for a sampler that draws by itself, or es.loader(dataset, "
            "global_batch_size=…)"
        )


def _parts(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, _few(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield name, _few(torch.from_numpy(np.ascontiguousarray(value)))
        else:
            yield name, repr(value.reshape(-1)[:_MOST_PARTS].tolist())
    elif isinstance(value, Mapping) and depth < _MOST_DEPTH:
        for key in list(value)[:_MOST_PARTS]:
            yield from _parts(value[key], f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple) and depth < _MOST_DEPTH:
        if all(isinstance(each, bool | int | float | str | bytes) for each in value):
            yield name, repr(value[:_MOST_VALUES])
            return
        for at, each in enumerate(value[:_MOST_PARTS]):
            yield from _parts(each, f"{name}[{at}]", depth + 1)
    elif isinstance(value, bool | int | float | str | bytes) or value is None:
        yield name, repr(value)
    elif isinstance(getattr(value, "__dict__", None), dict) and depth < _MOST_DEPTH:
        for key, each in list(vars(value).items())[:_MOST_PARTS]:
            yield from _parts(each, f"{name}.{key}", depth + 1)


def _few(tensor: torch.Tensor) -> tuple[str, torch.Tensor | None]:
    form = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return form, None
    flat = tensor.detach().reshape(-1)
    if flat.numel() > _MOST_VALUES:
        return form, flat[_places(flat.numel()).to(flat.device)]
    return form, flat.clone()


@cache
def _places(size: int) -> torch.Tensor:
    return torch.linspace(0, size - 1, _MOST_VALUES, dtype=torch.float64).long()


def _digest(value: Any) -> int:
    if isinstance(value, tuple):
        form, tensor = value
        hashed = hashlib.blake2b(form.encode(), digest_size=8)
        if tensor is not None:
            hashed.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    else:
        hashed = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little") >> (64 - _BITS)


# ---------------------------------------------------------------- last batch

# The newest batch of Everstep's own loader: part of the state, and compared after a restart.


class LastBatch:
    """The newest batch that a rank got of Everstep's loader, to be compared after a restart."""

    def __init__(self, rank: int, world_size: int, taken: Taken | dict[str, int]) -> None:
        self._place, self._taken = (rank, world_size), taken
        self._contents: str | None = None

    @classmethod
    def loaded(cls, dumped: Mapping[str, Any] | None, contents: str | None) -> LastBatch | None:
        if dumped is None:
            return None
        found = cls(dumped["rank"], dumped["world_size"], dict(dumped["marks"]))
        found._contents = contents
        return found

    @property
    def marks(self) -> dict[str, int]:
        return self._taken.marks if isinstance(self._taken, Taken) else self._taken

    def dump(self) -> dict[str, Any]:
        rank, world_size = self._place
        return {"rank": rank, "world_size": world_size, "marks": self.marks}

    def require_same(self, data: Batches, contents: Contents, step: int, peers: Peers) -> None:
        """Raise DataChanged if the batch of the last step is another one now; on other ranks than
        the one that noted it, if samples are."""
        name = "the data of es.loader"
        if self._contents is not None and self._place[1] != peers.world_size:
            require_same_contents(self._contents, step, name, contents)
        if self._place != (peers.rank, peers.world_size):
            return
        found = data.marks_of(step - 1, *self._place)
        if other := differing(self.marks, found):
            drawn = differing(found, data.marks_of(step - 1, *self._place))
            if changed := [place for place in other if place not in drawn]:
                raise DataChanged(
                    f"{name} changed since step {step}: not the same: {few(changed)} of its last "
                    "batch. Put the data back as it was, or start a new run. If nothing was "
                    f"changed, each process builds other data: {DRAW_ALIKE}"
                )
