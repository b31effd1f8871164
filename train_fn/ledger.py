"""The sample ledger: proof of which samples the loaders really yielded, step by step, inside the training state."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from train_fn.randomness import MASK64, key, mix
from train_fn.sampler import IndexArray

_START = hashlib.sha256(b"everstep ledger 1").hexdigest()


@dataclass(frozen=True)
class Count:
    """What one rank saw of one global batch. ``sample_hash`` is a sum modulo 2**64, so that ranks' sums add up in any order."""

    num_samples: int = 0
    num_unexpected: int = 0
    """Yielded, but not expected here: samples of other batches, or one a second time."""
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


def count(epoch: int, step: int, expected: IndexArray, yielded: IndexArray) -> Count:
    """Compare what a loader yielded with what the sampler expected of it."""
    bits = mix(yielded.astype(np.uint64), key(epoch, step, 5))
    sample_hash = int(np.add.reduce(bits))
    if expected.tobytes() == yielded.tobytes():
        return Count(len(yielded), 0, 0, sample_hash)
    want, num_want = np.unique(expected, return_counts=True)
    have, num_have = np.unique(yielded, return_counts=True)
    both = np.minimum(num_want[np.isin(want, have)], num_have[np.isin(have, want)]).sum()
    return Count(len(yielded), len(yielded) - int(both), len(expected) - int(both), sample_hash)


@dataclass
class Ledger:
    """Counts of the epoch in progress, and two hash chains over the steps: of the whole run, and of this epoch."""

    chain: str = _START
    epoch_chain: str = _START
    samples: int = 0
    used_once: int = 0
    duplicates: int = 0
    missing: int = 0

    def commit(self, step: int, total: Count) -> None:
        """Enter one global batch, counted over all ranks. ``step`` counts the steps done before it."""
        line = f"{step} {total.num_samples} {total.sample_hash:016x} {total.num_unexpected} {total.num_missing}"
        self.chain = _link(self.chain, line)
        self.epoch_chain = _link(self.epoch_chain, line)
        self.samples += total.num_samples
        self.used_once += total.num_samples - total.num_unexpected
        self.duplicates += total.num_unexpected
        self.missing += total.num_missing

    def close_epoch(self) -> dict[str, Any]:
        """Counts and digest of the epoch that ended; the next one starts from nothing."""
        closed = {
            "samples": self.samples,
            "used_once": self.used_once,
            "duplicates": self.duplicates,
            "missing": self.missing,
            "digest": self.epoch_chain,
        }
        self.__dict__.update(asdict(Ledger(chain=self.chain)))
        return closed

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(asdict(Ledger(**state)))


def _link(chain: str, line: str) -> str:
    return hashlib.sha256(f"{chain} {line}".encode()).hexdigest()
