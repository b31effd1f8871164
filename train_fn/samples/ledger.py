"""The sample ledger: a proof, in the training state, of which samples the loaders yielded at each
step. And the chain of the steps themselves.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from train_fn.errors import BadTask
from train_fn.samples.loader import Loaded
from train_fn.samples.sampler import MASK64, IndexArray, key, mix

_START = hashlib.sha256(b"everstep ledger 1").hexdigest()


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


def sample_hash(epoch: int, step: int, indices: IndexArray) -> int:
    """Return the hash of the samples of one batch; 0 if there are none."""
    return int(np.add.reduce(mix(indices.astype(np.uint64), key(epoch, step, 5))))


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
    want, num_want = np.unique(expected, return_counts=True)
    have, num_have = np.unique(yielded, return_counts=True)
    both = np.minimum(num_want[np.isin(want, have)], num_have[np.isin(have, want)]).sum()
    num_common = int(both)
    return Count(
        len(yielded) - len(expected),
        len(yielded) - num_common,
        len(expected) - num_common,
        (sample_hash(epoch, step, yielded) - expected_hash) & MASK64,
    )


@dataclass
class Ledger:
    """Keep counts of the current epoch, and two hash chains over steps: one for the whole run, one
    for this epoch."""

    chain: str = _START
    epoch_chain: str = _START
    samples: int = 0
    used_once: int = 0
    duplicates: int = 0
    missing: int = 0

    def commit(self, step: int, total: Count) -> None:
        """Enter one global batch, with the count over all ranks. ``step`` counts the steps done
        before it."""
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

    def close_epoch(self) -> dict[str, Any]:
        """Return counts and digest of the epoch that ended, and reset them for the next one."""
        closed = asdict(self)
        self.load_state_dict({"chain": closed.pop("chain")})
        return {"digest": closed.pop("epoch_chain"), **closed}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(asdict(Ledger(**state)))


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
"""The chain of a run that has taken no step."""


def linked(
    chain: str, step: int, gradient: int | None, loss_sum: float, weight: float, count: Count
) -> str:
    """Return the chain after one more step.

    Args:
        step: steps done after it.
        gradient: digest of the summed gradient; None for a task that makes its own steps.
        count: all ranks' samples.
    """
    samples = (
        f"{count.num_samples} {count.sample_hash:016x} {count.num_unexpected} {count.num_missing}"
    )
    digest = "-" if gradient is None else f"{gradient:016x}"
    return _hashed(f"{chain} {step} {digest} {loss_sum.hex()} {weight.hex()} {samples}")
