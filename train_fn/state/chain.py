"""A hash chain over the steps of a run: which step, what its gradient summed up to, its loss, and
the samples behind it. Two runs whose chains are equal took the same steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from train_fn.samples.ledger import Count

_DIGEST_BYTES = 16
_MOST_WAITING = 64


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
