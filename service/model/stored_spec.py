"""What the service reads of a stored spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from everstep.spec.run_spec import origin_of
from everstep.spec.sections import (
    CheckpointSpec,
    NotifySpec,
    RecoverySpec,
    ReplaySpec,
    ResumeFrom,
    ScalingSpec,
    TrainSpec,
    WandbSpec,
)


class StoredCode(BaseModel):
    """Which of a user's own loops a run calls; both are None for a task."""

    model_config = ConfigDict(frozen=True)

    train_fn: str | None = None
    script: str | None = None


class StoredSpec(BaseModel):
    """The sections of a spec that scheduling, projections and webhooks need.

    A stored spec was validated when it was submitted, perhaps by another version. A field that it
    lacks has its default, a field that is unknown here is ignored, and the other sections (task,
    most of code, optimizer, env) are not read: a spec that this version could not run does not keep
    lists and the reconciler from working. A run is started only from the whole spec, by
    ``RunSpec``.

    >>> StoredSpec.read({"train": {"epochs": 3, "from_the_future": 1}}).train.epochs
    3
    """

    model_config = ConfigDict(frozen=True)

    train: TrainSpec = TrainSpec()
    scaling: ScalingSpec = ScalingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    recovery: RecoverySpec = RecoverySpec()
    resume_from: ResumeFrom | None = None
    replay: ReplaySpec | None = None
    notify: NotifySpec | None = None
    wandb: WandbSpec | None = None
    code: StoredCode | None = None

    @property
    def origin(self) -> ResumeFrom | None:
        """As ``RunSpec.origin``."""
        return origin_of(self.resume_from, self.replay)

    @property
    def runs_own_function(self) -> bool:
        """As ``RunSpec.runs_own_function``."""
        return self.code is not None and (self.code.train_fn or self.code.script) is not None

    @classmethod
    def read(cls, spec: Mapping[str, Any]) -> Self:
        """Return the view of a spec from the database."""
        return cls.model_validate(spec, extra="ignore")
