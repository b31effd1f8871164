"""Profiles: traces of a few steps of a rank that trains, made on demand."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire import Answer, Time

MOST_STEPS = 100


class ProfileState(StrEnum):
    """How far a profile is."""

    REQUESTED = "requested"
    """Asked for; the rank has not begun."""
    STARTED = "started"
    """The rank records its steps, or writes its trace."""
    DONE = "done"
    """The trace is in the run's directory."""
    FAILED = "failed"
    """No trace could be made; ``problem`` says why."""
    LAPSED = "lapsed"
    """The rank's attempt ended before the trace was complete."""


class ProfileRequest(BaseModel):
    """Body of POST /v1/runs/{id}/profiles."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rank: int = Field(default=0, ge=0)
    """Rank whose steps are recorded."""
    steps: int = Field(default=10, ge=1, le=MOST_STEPS)
    """How many steps, from the next one on."""


class AllReduce(Answer):
    """How long all-reduces of one bucket of gradients took, the waiting for slower ranks
    included."""

    bucket: int | None
    """Number of DDP's bucket, in the order in which backward fills them; null for all other
    all-reduces together."""
    size_bytes: int
    """Of one all-reduce; the largest where they differ."""
    count: int
    mean_s: float
    max_s: float


class Profile(Answer):
    id: str
    rank: int
    steps: int
    """Steps that were asked for."""
    at: Time
    """When it was asked for."""
    state: ProfileState
    problem: str | None = None
    """Why there is no trace."""
    first_step: int | None = None
    """Number of the first step in the trace; null until it has begun."""
    step_s: float | None = None
    """Mean seconds of a step while it was recorded."""
    size_bytes: int | None = None
    """Of the trace as it is kept and downloaded."""
    all_reduces: tuple[AllReduce, ...] = ()
    """Of the steps in the trace, by bucket; none for a run of one rank."""

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        return self.state not in (ProfileState.REQUESTED, ProfileState.STARTED)
