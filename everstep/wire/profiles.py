"""Profiles: traces of a few steps of a training rank, recorded on request."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire import Answer, Time

MOST_STEPS = 100


class ProfileState(StrEnum):
    """The state of a profile."""

    REQUESTED = "requested"
    """Requested; the rank has not started recording."""
    STARTED = "started"
    """The rank records its steps, or writes its trace."""
    DONE = "done"
    """The trace is in the run's directory."""
    FAILED = "failed"
    """No trace could be recorded; ``problem`` says why."""
    LAPSED = "lapsed"
    """The rank's attempt ended before the trace was complete."""


class ProfileRequest(BaseModel):
    """Body of POST /v1/runs/{id}/profiles."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rank: int = Field(default=0, ge=0)
    """The rank to record."""
    steps: int = Field(default=10, ge=1, le=MOST_STEPS)
    """Number of steps to record, starting with the next."""


class AllReduce(Answer):
    """Time of the all-reduces of one bucket of gradients, including the wait for slower ranks."""

    bucket: int | None
    """Index of the DDP bucket, in the order in which backward fills them; null for all other
    all-reduces together."""
    size_bytes: int
    """Size of one all-reduce; the largest if they differ."""
    count: int
    mean_s: float
    max_s: float


class Profile(Answer):
    id: str
    rank: int
    steps: int
    """Requested number of steps; once recorded, the number in the trace."""
    at: Time
    """When it was requested."""
    state: ProfileState
    problem: str | None = None
    """Why there is no trace."""
    first_step: int | None = None
    """First step in the trace; null before recording starts."""
    step_s: float | None = None
    """Mean seconds of a step while recording."""
    size_bytes: int | None = None
    """Size of the stored trace."""
    all_reduces: tuple[AllReduce, ...] = ()
    """All-reduces in the trace, by bucket; empty for a run of one rank."""

    @property
    def complete(self) -> bool:
        """Return whether the profile is final."""
        return self.state not in (ProfileState.REQUESTED, ProfileState.STARTED)
