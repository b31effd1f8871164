"""The sample ledger: a proof, in the training state, of which samples the loaders yielded at each
step. And the chain of the steps themselves.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from train_fn.errors import BadTask
from train_fn.samples.loader import Loaded
from train_fn.samples.sampler import MASK64, IndexArray, key, mix

_START = hashlib.sha256(b"everstep ledger 1").hexdigest()
_MOST_WAITING = 64


@dataclass(slots=True)
class Count:
    """Count one rank's samples of one global batch. ``sample_hash`` is a sum modulo 2**64, so the
    ranks' values can be added in any order."""

    num_samples: int = 0
    num_unexpected: int = 0
    """Yielded but not expected: samples of other batches, or duplicates."""
    num_missing: int = 0
    """Expected, but not yielded."""
    sample_hash: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.num_samples + other.num_samples,
            self.num_unexpected + other.num_unexpected,
            self.num_missing + other.num_missing,
            (self.sample_hash + other.sample_hash) & MASK64,
        )


def sample_hashes(places: Sequence[tuple[int, int]], batches: Sequence[IndexArray]) -> list[int]:
    """Return the hash of each batch of samples at its (epoch, step). No batch may be empty."""
    if not batches:
        return []
    lengths = [len(indices) for indices in batches]
    keys = np.array([key(epoch, step, 5) for epoch, step in places], dtype=np.uint64)
    bits = mix(np.concatenate(batches).astype(np.uint64), np.repeat(keys, lengths))
    hashes: list[int] = np.add.reduceat(bits, np.cumsum([0, *lengths[:-1]])).tolist()
    return hashes


def difference(
    epoch: int, step: int, expected: IndexArray, yielded: IndexArray, expected_hash: int
) -> Count | None:
    """Return the correction from the count of expected to that of loaded samples; None if they are
    equal.

    Args:
        expected_hash: hash of the expected samples, computed earlier.
    """
    if expected.tobytes() == yielded.tobytes():
        return None
    sample_hash = int(np.add.reduce(mix(yielded.astype(np.uint64), key(epoch, step, 5))))
    want, num_want = np.unique(expected, return_counts=True)
    have, num_have = np.unique(yielded, return_counts=True)
    both = np.minimum(num_want[np.isin(want, have)], num_have[np.isin(have, want)]).sum()
    num_common = int(both)
    return Count(
        len(yielded) - len(expected),
        len(yielded) - num_common,
        len(expected) - num_common,
        (sample_hash - expected_hash) & MASK64,
    )


@dataclass
class _Entered:
    """Hold the totals of the steps entered so far."""

    chain: str = _START
    epoch_chain: str = _START
    samples: int = 0
    used_once: int = 0
    duplicates: int = 0
    missing: int = 0

    def enter(self, step: int, total: Count) -> None:
        line = (
            f"{step} {total.num_samples} {total.sample_hash:016x} {total.num_unexpected} "
            f"{total.num_missing}"
        )
        self.chain = _link(self.chain, line)
        self.epoch_chain = _link(self.epoch_chain, line)
        self.samples += total.num_samples
        self.used_once += total.num_samples - total.num_unexpected
        self.duplicates += total.num_unexpected
        self.missing += total.num_missing


class Ledger:
    """Keep counts of the current epoch, and two hash chains over steps: one for the whole run, one
    for this epoch.

    Steps are entered in groups. Between a model's passes the caches are cold, and entering a single
    step costs ten times as much as entering it in a group.
    """

    def __init__(self) -> None:
        self._entered = _Entered()
        self._waiting: list[tuple[int, Callable[[], Count]]] = []

    def commit(self, step: int, total: Callable[[], Count]) -> None:
        """Enter one global batch. ``step`` counts the steps done before it.

        Args:
            total: returns the count over all ranks; called when the step is entered.
        """
        self._waiting.append((step, total))
        if len(self._waiting) == _MOST_WAITING:
            self._enter()

    def _enter(self) -> _Entered:
        waiting, self._waiting = self._waiting, []
        for step, total in waiting:
            self._entered.enter(step, total())
        return self._entered

    def close_epoch(self) -> dict[str, Any]:
        """Return counts and digest of the epoch that ended, and reset them for the next one."""
        entered = self._enter()
        self._entered = _Entered(chain=entered.chain)
        return {
            "samples": entered.samples,
            "used_once": entered.used_once,
            "duplicates": entered.duplicates,
            "missing": entered.missing,
            "digest": entered.epoch_chain,
        }

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._enter())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._entered, self._waiting = _Entered(**state), []


def _link(chain: str, line: str) -> str:
    return hashlib.sha256(f"{chain} {line}".encode()).hexdigest()


# ---------------------------------------------------------------- bookmarks

# Bookmarks: the positions in a data set's streams from which a later attempt resumes at the exact
# sample.
#
# The convention is that of torchdata's StatefulDataLoader: a data set, or its iterator, may have
# ``state_dict()`` and ``load_state_dict(state)``. A bookmark is such a state with the number of
# samples before it. Samples between the bookmark and the first one needed are read and dropped.
#
# Bookmarks are taken every few steps, and leave the loader process with their micro-batch. Ranks
# exchange them, so that every rank has those of all streams and a dead rank loses none.

BOOKMARK_STEPS = 20
"""Steps from one bookmark to the next."""


class Bookmark(NamedTuple):
    """Describe a position in a stream."""

    ordinal: int
    """Number of the stream's samples before it."""
    pass_began: int
    """Number of those samples that precede the current pass over the data."""
    state: bytes | None
    """State of the data set and its iterator; None if they have no ``state_dict``."""
    pass_number: int = 0
    """Passes over the data before the current one."""


class Bookmarks:
    """Hold the newest bookmark of every stream that this rank knows, as part of the training
    state."""

    def __init__(self) -> None:
        self.newest: dict[int, Bookmark] = {}
        self._passed: dict[int, Bookmark] = {}

    def note(self, loaded: Loaded) -> None:
        """Note the bookmark of a micro-batch that the loader returned, if it has one."""
        if loaded.place is not None:
            stream, bookmark = loaded.place
            self._passed[stream] = bookmark

    def exchange(self, step: int, gather: Callable[[Any], list[Any]]) -> None:
        """Share the passed bookmarks with all ranks, once every BOOKMARK_STEPS steps. All ranks
        call this after a step was committed."""
        if step % BOOKMARK_STEPS == 0:
            for passed in gather(self._passed):
                self.newest.update(passed)
            self._passed = {}

    def state_dict(self) -> dict[str, Any]:
        return {str(stream): list(bookmark) for stream, bookmark in self.newest.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.newest = {int(stream): Bookmark(*values) for stream, values in state.items()}
        self._passed = {}


def pack_state(source: str, state: dict[str, Any]) -> bytes:
    """Return a state as bytes that a checkpoint can hold. They run no code when they are read
    back.

    Raise BadTask, with ``source``, if the state holds other objects than such bytes can.
    """
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        unpack_state(buffer.getvalue())
    except Exception as exc:
        raise BadTask(
            f"{source}: the state_dict of train cannot be kept, for {state!r:.200} holds more "
            "than numbers, strings, lists, tuples, dicts and tensors; of a numpy array keep "
            ".tolist()"
        ) from exc
    return buffer.getvalue()


def unpack_state(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


# ---------------------------------------------------------------- chain

# A hash chain over the steps of a run: which step, what its gradient summed up to, its loss, and
# the samples behind it. Two runs whose chains are equal took the same steps.

_DIGEST_BYTES = 16


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


START = _hashed("everstep chain 1")
"""The chain of a run that has taken no step, or that continues a state of an older version."""


class Link(NamedTuple):
    """Hold what one step adds to the chain."""

    step: int
    """Steps done after it."""
    gradient: int | None
    """Digest of the summed gradient; None for a task that makes its own steps."""
    loss_sum: float
    weight: float
    total: Callable[[], Count]
    """Returns the count of all ranks' samples."""
    record: dict[str, Any]
    """Gets the chain after this step, under ``chain``."""


class Chain:
    """Link steps in groups: between a model's passes the caches are cold, and a single step costs
    ten times as much as one of a group."""

    def __init__(self) -> None:
        self._value = START
        self._waiting: list[Link] = []
        self.newest: dict[str, Any] = {}
        """The record of the newest step."""

    def add(self, link: Link) -> None:
        """Add a step. Its record is complete after the next ``enter``."""
        self.newest = link.record
        self._waiting.append(link)
        if len(self._waiting) == _MOST_WAITING:
            self.enter()

    def enter(self) -> str:
        """Enter all steps so far. Return the chain after the newest one, as hexadecimal digits."""
        waiting, self._waiting = self._waiting, []
        for link in waiting:
            self._value = linked(self._value, link)
            link.record["chain"] = self._value
        return self._value

    def load(self, value: str | None) -> None:
        """Continue from the chain of a state; None for a state of an older version."""
        self._value, self._waiting = value or START, []


def linked(chain: str, link: Link) -> str:
    """Return the chain after one more step."""
    count = link.total()
    gradient = "-" if link.gradient is None else f"{link.gradient:016x}"
    samples = (
        f"{count.num_samples} {count.sample_hash:016x} {count.num_unexpected} {count.num_missing}"
    )
    return _hashed(
        f"{chain} {link.step} {gradient} {link.loss_sum.hex()} {link.weight.hex()} {samples}"
    )
