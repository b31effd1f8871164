"""Replays: steps of a run trained again by a run of their own, and compared one by one."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire.base import Answer

ReplayResult = Literal["equal", "differs", "not_proven"]


class ReplayRequest(BaseModel):
    """Body of POST /v1/runs/{id}/replays."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    from_step: int = Field(ge=0)
    """Steps done in the state to begin with: 0, or a checkpoint of the run."""
    to_step: int = Field(ge=1)
    """Last step to train again."""
    workers: int | None = Field(default=None, ge=1)
    """Number of ranks; null is as many as trained these steps."""


class Replay(Answer):
    """What a run trains again, and what came of it."""

    run_id: str
    """The run whose steps are trained again. Nothing of it is changed."""
    from_step: int
    """Steps done in the state that the replay began with."""
    to_step: int
    """Last step of the replay."""
    result: ReplayResult | None = None
    """Null until the replay has ended. `equal`: every step is equal in every bit that was recorded.
    `differs`: `step` is the first one that is not. `not_proven`: nothing differs, but something is
    missing for a proof."""
    step: int | None = None
    """The first step that differs, or for which something is missing."""
    differs: tuple[Literal["loss", "gradient", "weights", "samples"], ...] = ()
    """What differs at that step."""
    compared: int = 0
    """Steps that were compared and are equal."""
    message: str | None = None
    """The result in words."""
