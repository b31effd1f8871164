"""Tell data which epoch begins: ``set_epoch`` of a data set, of those that it holds, and of what
makes its batches. It is called in the process that reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from train_fn.samples.as_built import data_sets_in


def told_of_epochs(roots: Iterable[Any]) -> list[Any]:
    """Return what has ``set_epoch`` among these objects, and the data sets inside them."""
    seen: set[int] = set()
    found: list[Any] = []
    for root in roots:
        for each in (root, *data_sets_in(root, seen)):
            is_new = not any(each is other for other in found)
            if is_new and callable(getattr(each, "set_epoch", None)):
                found.append(each)
    return found


class ToldEpoch:
    """Tell data of an epoch when it reads the first sample of it in this process."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._told: list[Any] | None = None
        self._epoch: int | None = None

    def begin(self, epoch: int) -> None:
        """Tell the data, if this epoch is not the newest one that it was told of."""
        if epoch == self._epoch:
            return
        if self._told is None:
            self._told = told_of_epochs(self._roots)
        self._epoch = epoch
        for each in self._told:
            each.set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_told": None, "_epoch": None}
