"""Drills: faults that an operator injects into a live run to see that it recovers."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire import Verdict
from everstep.wire.base import Answer, Open, Time
from everstep.wire.events import OWN_FILES


class DrillKind(StrEnum):
    """The fault to inject."""

    KILL_WORKER = "kill_worker"
    """SIGKILL to the rank's process."""
    KILL_NODE = "kill_node"
    """SIGKILL to the raylet of the rank's node; never on the head."""
    HANG_WORKER = "hang_worker"
    """SIGSTOP to the rank's process, which hang detection must find."""
    KILL_DRIVER = "kill_driver"
    """SIGKILL to the run's driver."""
    DRAIN_NODE = "drain_node"
    """Announce to Ray that the rank's node will be taken away in 30 s. It gets no more ranks."""
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    """Flip one byte of the newest checkpoint, then kill all ranks and remove their snapshots: the
    run must continue from an older checkpoint."""
    CORRUPT_GRADIENT = "corrupt_gradient"
    """Flip the lowest bit of one number of the summed gradient in the rank's memory: its peers must
    notice at the next step. In an audited step, flip one of the rank's own gradient instead: the
    audit must notice."""
    CORRUPT_WEIGHTS = "corrupt_weights"
    """Flip the lowest bit of one weight in the rank's memory: its peers must notice within 64
    steps."""
    SLOW_RANK = "slow_rank"
    """The rank waits in each step of its attempt: it must be found to be a straggler."""


IN_RANK = frozenset({DrillKind.CORRUPT_GRADIENT, DrillKind.CORRUPT_WEIGHTS, DrillKind.SLOW_RANK})
"""What the rank does to itself, and only its peers can notice."""
"""Drills that a rank carries out on its own memory."""


class DrillState(StrEnum):
    """The state of a drill."""

    REQUESTED = "requested"
    """Requested; the driver has not started it."""
    STARTED = "started"
    """The fault is injected; the run does not train again yet."""
    RECOVERED = "recovered"
    """The run trains again."""
    UNRECOVERED = "unrecovered"
    """The run stopped or ended before it trained again."""
    FAILED = "failed"
    """The fault could not be injected; ``problem`` says why."""
    LAPSED = "lapsed"
    """The run stopped, ended or got another driver before the drill started, or a newer drill
    replaced it."""


class DrillRequest(BaseModel):
    """Body of POST /v1/runs/{id}/drills."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: DrillKind
    """The fault to inject."""
    rank: int = Field(default=0, ge=0)
    """The rank to hit, or whose node to hit. Ignored by kinds that hit no single rank."""


class DrillParity(Answer):
    """Whether the loss continues as if nothing had happened.

    ``in_parity`` is true when all of this holds:

    - no step is missing, from ten steps before the restored one to the newest after it
      (``missing_steps``);
    - no step has two losses: if a step was repeated or reported again, its values differ by at most
      1 part in 10,000, or 1 in 100 if the world size changed (``conflicting_steps``);
    - the mean loss of the first ten steps after the recovery is not above the mean of the last ten
      before by more than three of their standard deviations or a tenth, whichever is larger;
    - the sample ledger of the first epoch that ended after the recovery shows each sample used once
      (``samples_used_once``).

    It is null while fewer than ten steps were reported after the recovery and more may come. Losses
    are read from the 6,000 metrics events around the drill.
    """

    in_parity: bool | None
    num_steps_after: int
    """Steps after the recovery that were compared, at most ten."""
    missing_steps: tuple[int, ...]
    """Steps without a loss."""
    conflicting_steps: tuple[int, ...]
    """Steps with two losses that differ."""
    loss_before: float | None
    """Mean of the last ten steps before; null if fewer than two were reported."""
    loss_after: float | None
    """Mean of the first ten steps after; null if there are none, or one was not finite."""
    samples_used_once: bool | None
    """Null while no epoch has ended after the recovery."""


class DrillReport(Answer):
    """What a drill did, and how the run recovered. Null means not known yet."""

    started_at: Time
    node_id: str | None
    """Node of the rank that was hit."""
    pid: int | None
    """Id of the process that was hit."""
    checkpoint: str | None
    """Checkpoint that was damaged."""
    verdict: Verdict | None
    """Everstep's verdict on the fault."""
    total_s: float | None
    """Seconds from the fault to the end of the first step after it."""
    recovery_s: float | None
    """The part of it after the failure was detected."""
    phases: dict[str, float]
    """Seconds by phase: ``detect`` until the failure was detected, then ``leave``, ``decide``,
    ``start``, ``restore``, ``first_step``, which add up to ``recovery_s``."""
    steps_lost: int | None
    """Steps that had to be repeated."""
    redone_s: float | None = None
    """For a `train_fn` whose steps are its reports: how long it had worked since the last one. Null
    if a step is an optimizer step."""
    world_size_before: int | None
    world_size_after: int | None
    restored_step: int | None
    """Steps done in the restored state."""
    restored_from: str | None
    """The restored state: ``snapshot``, ``fresh``, ``own_files`` of a script, or a checkpoint's
    name."""
    rejected: tuple[str, ...]
    """States that were found damaged and skipped."""
    parity: DrillParity | None
    note: str | None
    """A remark on the figures."""


class Drill(Answer):
    id: str
    kind: Open[DrillKind]
    rank: int
    at: Time
    """When it was requested."""
    state: Open[DrillState]
    problem: str | None = None
    """Why the fault could not be injected."""
    report: DrillReport | None = None
    """Present once the fault is injected."""

    @property
    def complete(self) -> bool:
        """Return whether the report is final, apart from the sample ledger of an unfinished
        epoch."""
        if self.state is DrillState.RECOVERED:
            if self.report is not None and self.report.restored_from == OWN_FILES:
                return True
            parity = self.report.parity if self.report else None
            return parity is not None and parity.in_parity is not None
        return self.state not in (DrillState.REQUESTED, DrillState.STARTED)


# ---------------------------------------------------------------- profiles

# Profiles: traces of a few steps of a training rank, recorded on request.

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
    state: Open[ProfileState]
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


# ---------------------------------------------------------------- stacks

# What the ranks of a run do now: the Python stacks of their training threads.


class RankStack(Answer):
    rank: int
    node_id: str
    does: str
    """What it does, in words: ``waits in ray.train.report (train.py, line 12)``."""
    stack: str | None
    """The Python stacks of its process, its training thread last; null if it does not answer.
    Values of secrets are removed."""


class StackReport(Answer):
    """The ranks at one moment: because somebody asked, or because nothing had moved for a while."""

    id: str | None
    """Of the request; null for a report that nobody asked for."""
    at: Time
    attempt: int
    complete: bool
    """Whether the ranks' stacks are there. If not, the request has not been carried out yet."""
    quiet_s: float | None = None
    """Seconds for which nothing had moved then."""
    step: int | None = None
    """Steps done then; null before the first."""
    summary: str | None = None
    """What the ranks do, and what to change where that is known."""
    ranks: tuple[RankStack, ...] = ()


# ---------------------------------------------------------------- rehearsals


class RehearsalDifference(Answer):
    """What is first different from a training that nobody disturbed."""

    what: str
    step: int
    """The step that is made, from 1."""
    rank: int
    detail: str
    where: str | None = None
    """Line of the user's code."""
    held: tuple[str, ...] = ()
    """What that holds by itself and is different as well."""
    advice: str
    """What to write instead."""


class RehearsalRow(Answer):
    """What one death showed."""

    name: str
    outcome: Literal["equal", "different", "impossible", "left out"]
    text: str
    difference: RehearsalDifference | None = None
    went_on_from: str | None = None
    traceback: str | None = None


class Rehearsal(Answer):
    """What ``everstep rehearse`` found: a few steps of a user's code, trained undisturbed, and
    again with deaths."""

    outcome: Literal["equal", "different", "impossible"]
    """``impossible``: nothing could be compared; the first row says why."""
    text: str
    ranks: int
    steps: int
    """Steps that each training made."""
    rows: tuple[RehearsalRow, ...]
    notes: tuple[str, ...] = ()


REHEARSAL_TAG = "everstep.rehearsal"
"""Tag of a run with what a rehearsal before its submission showed: ``equal`` or ``different``, the
beginning of ``RunSpec.trained_digest``, and words, each after a space."""


class RunRehearsal(Answer):
    """Whether a restart was rehearsed on a run's code, and what that showed."""

    state: Literal["none", "made"]
    """``made``: before the run was submitted."""
    text: str
    """In words, with what to do where something is to be done."""
    at: Time | None = None
    """When the run was submitted with it; null if nothing is known."""
