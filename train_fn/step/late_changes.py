"""Find tensors that forward passes change for the first time after an attempt's first pass, and
have the ranks agree on their values.

Until then nobody copied them, and other ranks may not have changed them. So a rank that sees such a
change sends a flag in the step's totals, and all ranks then exchange these tensors once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from train_fn.errors import BadTask
from train_fn.step.peers import Peers
from train_fn.step.untrained import (
    EarlierValue,
    TensorPlace,
    TensorWatch,
    copy_all,
    is_alike,
    keep,
    rules_of,
    shape_fault,
)

logger = logging.getLogger(__name__)


@dataclass
class Change:
    """Hold a tensor that this rank saw change for the first time. The ranks have not agreed on it
    yet."""

    tensor: torch.Tensor
    before: torch.Tensor | None
    """Its value when the step began; None if no copy was kept."""
    first: torch.Tensor
    """Its value after this rank's first pass."""
    total: Any
    """The sum of its values after each pass, weighted by the pass's samples: a tensor, unless a
    subclass of ``LateChanges`` keeps another form."""


class LateChanges:
    """Watch the tensors that are not known to change, and collect those that do.

    Args:
        places: of all tensors that the optimizer does not change.
        ignored: numbers of places that are left alone.
    """

    def __init__(self, places: list[TensorPlace], ignored: set[int], peers: Peers) -> None:
        self._places, self._ignored, self._peers = places, ignored, peers
        self.found: dict[int, Change] = {}
        """Changes that the ranks have not agreed on, by number of the place."""
        self._unfit: dict[int, EarlierValue] = {}
        """Tensors that took another shape since the watch began."""
        self._agreed: dict[int, torch.Tensor] = {}
        self._watch = TensorWatch({})

    def watch_others(self, moving: Iterable[int]) -> None:
        """Watch all places but ``moving``, which are known to change, from their current values."""
        skipped = self._ignored.union(moving, self.found, self._unfit)
        self._watch = TensorWatch(
            {number: place for number, place in enumerate(self._places) if number not in skipped}
        )

    # -- a step

    def begin(self) -> None:
        """Save the values at the beginning of a step."""
        if moved := self._watch.moved():  # for example by an optimizer hook
            self._watch.refresh(moved)
        for change in self.found.values():
            change.before = change.tensor.detach().clone()
            change.total = self.new_total(change.first)

    def rewind(self) -> None:
        """Reset the changed tensors to their values at the beginning of the step."""
        for number, change in self.found.items():
            self._places[number].holder[self._places[number].key] = change.tensor
            if change.before is not None:
                copy_all([change.tensor], [change.before])

    def note(self, num_samples: int, own_samples: int, *, is_first: bool) -> BadTask | None:
        """Find tensors that changed for the first time in a forward pass, and add the values of
        those found earlier.

        Return the error if a tensor took a shape that is not allowed, else None.

        Args:
            num_samples: samples of the pass.
            own_samples: samples of this rank's earlier passes in the step.
            is_first: whether it is this rank's first pass of the step.
        """
        fault = None
        for number, change in self.found.items():
            now = self._places[number].tensor
            if now is None or not is_alike(now, change.tensor):
                fault = fault or shape_fault(self._places[number], now, change.tensor)
                continue
            self.add_to_total(change, now.detach(), num_samples)
            change.first = now.detach().clone() if is_first else change.first
        moved = self._watch.moved()
        for number, kept in self._watch.drop(moved).items() if moved else ():
            place, now = self._places[number], self._places[number].tensor
            if now is None or not is_alike(now, kept.form):
                fault = fault or shape_fault(place, now, kept.form)
                self._unfit[number] = kept  # without a fault, it depends on the batch
                continue
            logger.info(
                "a forward pass changed %s for the first time; every step commits it from now on",
                place.name,
            )
            self.found[number] = self._change_of(
                kept, now, own_samples, num_samples, is_first=is_first
            )
        return fault

    def agree(self, moving: Sequence[TensorPlace], num_samples: int, own_samples: int) -> None:
        """Agree over ranks on which tensors changed for the first time in this step, and on their
        values. A collective.

        Args:
            moving: places that were known to change before.
            num_samples: samples in the global batch.
            own_samples: samples of this rank's passes in the step.
        """
        peers = self._peers
        numbers = sorted({number for each in peers.gather(list(self.found)) for number in each})
        for number in numbers:
            if number not in self.found:
                self.found[number] = self._unchanged(number, own_samples)
        rules = rules_of([self._places[number] for number in numbers], moving)
        by_first = [number for number, rule in zip(numbers, rules, strict=True) if rule == "first"]
        by_mean = [number for number, rule in zip(numbers, rules, strict=True) if rule == "mean"]
        firsts = peers.share({number: self.found[number].first.cpu() for number in by_first}, 0)
        totals = self.totals_over_ranks(by_mean)
        self._agreed = firsts | {number: total / num_samples for number, total in totals.items()}

    def adopt(self) -> list[int]:
        """Write the agreed values into the model. Return the numbers of their places."""
        agreed, self._agreed = self._agreed, {}
        for number, value in agreed.items():
            place, tensor = self._places[number], self.found[number].tensor
            place.holder[place.key] = tensor
            copy_all([tensor], [value.to(tensor.device)])
        if agreed:
            self.found = {}
        return list(agreed)

    def put_back(self, own_samples: int, *, is_first: bool) -> list[int]:
        """Prepare to ``rewind`` a step that was not committed. Return the numbers of places whose
        earlier value is not known.

        Args:
            own_samples: as in ``note``, for a pass that may have been interrupted.
            is_first: as in ``note``.
        """
        self.note(0, own_samples, is_first=is_first)
        for number, kept in self._unfit.items():
            self._places[number].holder[self._places[number].key] = kept.tensor
        unknown = [number for number, change in self.found.items() if change.before is None]
        torn = [
            number
            for number, kept in self._unfit.items()
            if self._places[number].is_saved and kept.differs(kept.tensor)
        ]
        return unknown + torn

    def put_back_new(self) -> list[int]:
        """Undo changes of tensors that had not changed before. Return the numbers of their places.

        Raise BadTask if no copy of one was kept.
        """
        moved = self._watch.moved()
        if torn := [
            self._places[number].name for number in moved if not self._watch.put_back(number)
        ]:
            raise BadTask(
                f"a forward pass that an audit repeats changes {', '.join(torn)}, of which no copy "
                "is kept. Let every forward pass change it, or set train.audit_fraction to 0"
            )
        return moved

    # -- between two steps

    def has_any(self) -> bool:
        """Return whether some tensor has changed without an agreed value. Compares contents."""
        return bool(self.found or self._unfit or self._watch.moved() or self._watch.differing())

    def unsaved_changes(self) -> list[TensorPlace]:
        """Return the places that have other contents than when the watch began, and that the
        model's ``state_dict`` leaves out."""
        return [self._places[number] for number in self._watch.unsaved_changes()]

    def unnoticed(self) -> list[int]:
        """Return the numbers of places whose contents changed without a sign, through ``.data``."""
        return self._watch.differing()

    def find_unnoticed(self) -> None:
        """Find tensors that were written through ``.data`` or changed by an evaluation, and follow
        them from now on."""
        moved = set(self._watch.moved())
        for number, kept in self._watch.drop(moved | set(self._watch.differing())).items():
            place = self._places[number]
            logger.warning(
                "%s was changed through its .data, or by an evaluation; every step commits it from "
                "now on. Change it in forward instead",
                place.name,
            )
            if number in moved:
                place.holder[place.key] = kept.tensor
                copy_all([kept.tensor], [kept.copy if kept.copy is not None else kept.tensor])
            self.found[number] = self._change_of(kept, kept.tensor, 0, 0, is_first=True)

    def _unchanged(self, number: int, own_samples: int) -> Change:
        """Return the entry for a tensor that changed only on other ranks."""
        [kept] = (self._watch.drop([number]) or {number: self._unfit.pop(number)}).values()
        current = keep([kept.tensor], kept.tensor.nbytes)[0]
        return self._change_of(current, kept.tensor, own_samples, 0, is_first=True)

    def _change_of(
        self,
        kept: EarlierValue,
        now: torch.Tensor,
        own_samples: int,
        num_samples: int,
        *,
        is_first: bool,
    ) -> Change:
        """Return the entry for a tensor that is ``now``, and was as ``kept`` after the step's
        earlier passes."""
        before = now.detach() if kept.copy is None else kept.copy
        total = self.first_total(before, now.detach(), own_samples, num_samples)
        first = (now.detach() if is_first else before).clone()
        return Change(kept.tensor, kept.copy, first, total)

    # -- sums, which a subclass may keep in another form

    def passes(self, num_samples: int, number: int) -> None:
        """Take note of a forward pass over micro-batch ``number``, before its changes."""

    def new_total(self, form: torch.Tensor) -> Any:
        """Return the sum over no pass, of a tensor like ``form``."""
        return torch.zeros_like(form, dtype=torch.float64)

    def add_to_total(self, change: Change, value: torch.Tensor, num_samples: int) -> None:
        """Add the value after a forward pass on ``num_samples`` samples."""
        change.total += value.double() * num_samples

    def first_total(
        self, before: torch.Tensor, now: torch.Tensor, own_samples: int, num_samples: int
    ) -> Any:
        """Return the sum after a pass that left ``now``, where the passes before left ``before``.

        Args:
            own_samples: samples of this rank's earlier passes in the step.
            num_samples: samples of the pass; 0 if none of this rank's changed the tensor.
        """
        return before.double() * own_samples + now.double() * num_samples

    def totals_over_ranks(self, numbers: list[int]) -> dict[int, torch.Tensor]:
        """Return the sums over all ranks for these places. A collective."""
        ranks = self._peers.gather({number: self.found[number].total.cpu() for number in numbers})
        return {number: sum(each[number] for each in ranks) for number in numbers}
