"""Faulty processors and unfit tasks for tests of ``train.audit_fraction``. Each function changes
its own process only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from everstep.wire.drills import DrillKind
from tests.integration.trainees import Regression
from train_fn.checks import audit
from train_fn.checks.audit import RankFaults
from train_fn.loop import build
from train_fn.step.fingerprints import Computed, PassRecord

FAULTY_RANK, FAULTY_FROM = 1, 4


class Net(nn.Module):
    """A model whose passes draw random numbers and move running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))  # type: ignore[no-any-return]


class Moving(Regression):
    def build_model(self) -> nn.Module:
        return Net()


def moving() -> None:
    build.build_task = lambda spec: Moving()


def faulty_rank() -> None:
    """One rank computes every gradient wrongly in one bit, from a step on."""
    moving()
    plain, begin, begun = PassRecord.computed, audit.StepAudit.begin, list[None]()

    def counted(self: audit.StepAudit) -> None:
        begun.append(None)
        begin(self)

    def computed(record: PassRecord) -> Computed:
        found = plain(record)
        is_wrong = len(begun) > FAULTY_FROM and dist.get_rank() == FAULTY_RANK
        return found._replace(gradient=found.gradient ^ 1) if is_wrong else found

    audit.StepAudit.begin = counted  # type: ignore[method-assign]
    PassRecord.computed = computed  # type: ignore[method-assign]


class OnlySums(RankFaults):
    """Leaves every drill to what flips bits of sums."""

    def take(self, kind: DrillKind) -> bool:
        return False


def flipped_sums() -> None:
    """A drill flips a bit of the summed gradient, also in a step that is audited."""
    moving()
    init, flip = audit.StepAudit.__init__, RankFaults.flip

    def flipped(self: RankFaults, replica: Any, *, is_audited: bool) -> None:
        flip(self, replica, is_audited=False)

    def begun(self: audit.StepAudit, ctx: Any, *args: Any) -> None:
        init(self, ctx, *args)
        self._flips = OnlySums(ctx)

    RankFaults.flip = flipped  # type: ignore[method-assign]
    audit.StepAudit.__init__ = begun  # type: ignore[method-assign,assignment]


class Counting(Moving):
    """A task whose loss depends on how often it was called."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        self.calls += 1
        loss_sum, weight = super().loss(model, batch)
        return loss_sum * (1 + 1e-3 * self.calls), weight


_HIDDEN = torch.Generator().manual_seed(5)


class Drawing(Moving):
    """A task that draws from a generator which nobody can find."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        loss_sum, weight = super().loss(model, batch)
        return loss_sum * (1 + 1e-3 * torch.rand((), generator=_HIDDEN)), weight
