"""Drills: faults that an operator puts into a live run to see that it recovers, and how it took
them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from everstep.wire import Answer, Time, Verdict


class DrillKind(StrEnum):
    """What is broken."""

    KILL_WORKER = "kill_worker"
    """SIGKILL to the rank's process."""
    KILL_NODE = "kill_node"
    """SIGKILL to the raylet of the rank's node; never of the head."""
    HANG_WORKER = "hang_worker"
    """SIGSTOP to the rank's process: hang detection has to find it."""
    KILL_DRIVER = "kill_driver"
    """SIGKILL of the run's driver."""
    DRAIN_NODE = "drain_node"
    """Ray is told that the rank's node will be taken away in 30 s; it gets no more ranks."""
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    """One byte of the newest checkpoint is flipped, then all ranks are killed and what they left in
    shared memory is removed: the run has to go on from an older checkpoint."""


class DrillState(StrEnum):
    """How far a drill is."""

    REQUESTED = "requested"
    """Asked for; the driver has not taken it up."""
    STARTED = "started"
    """The fault is in; the run does not train again yet."""
    RECOVERED = "recovered"
    """The run trains again."""
    UNRECOVERED = "unrecovered"
    """The run stopped or ended before it trained again."""
    FAILED = "failed"
    """It could not be carried out; ``problem`` says why."""
    LAPSED = "lapsed"
    """The run stopped, ended or went on with another driver before it was taken up, or a newer
    drill replaced it."""


class DrillRequest(BaseModel):
    """Body of POST /v1/runs/{id}/drills."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: DrillKind
    """What to break."""
    rank: int = Field(default=0, ge=0)
    """Rank that is hit, or whose node is; the kinds that hit no single rank look past it."""


class DrillParity(Answer):
    """Whether the loss goes on as if nothing had happened.

    ``in_parity`` is true when all of this holds:

    - the step numbers go on without a gap: of the ten steps before the one that the run went on
      from up to the newest after it, none is missing (``missing_steps``);
    - no step has two losses: where one was reported more than once, because it was repeated or
      reported again, its values differ by no more than 1 part in 10,000, or 1 in 100 where the
      world size changed (``conflicting_steps``);
    - the mean loss of the first ten steps after the recovery is not above the mean of the last ten
      before by more than three of their standard deviations or a tenth, whichever is larger;
    - the sample ledger of the first epoch that ended since shows each sample used once
      (``samples_used_once``).

    It is null while fewer than ten steps were reported after the recovery and more may come. The
    events that carry the losses are looked for among the 6,000 of their kind around the drill.
    """

    in_parity: bool | None
    num_steps_after: int
    """Steps reported after the recovery that were looked at, at most ten."""
    missing_steps: tuple[int, ...]
    conflicting_steps: tuple[int, ...]
    loss_before: float | None
    """Mean of the last ten steps before; null where fewer than two were reported."""
    loss_after: float | None
    """Mean of the first ten steps after; null where there is none, or one was not finite."""
    samples_used_once: bool | None
    """Null while no epoch has ended since the recovery."""


class DrillReport(Answer):
    """What a drill did, and how the run took it; null is not known yet."""

    started_at: Time
    node_id: str | None
    """Node of the rank that was hit."""
    pid: int | None
    """Process that was hit, on its node."""
    checkpoint: str | None
    """Checkpoint that was damaged."""
    verdict: Verdict | None
    """What Everstep took the fault for."""
    total_s: float | None
    """Seconds from the fault to the end of the first step after it."""
    recovery_s: float | None
    """Seconds of that from noticing the failure on."""
    phases: dict[str, float]
    """Seconds by phase: ``detect`` until the failure was noticed, then ``leave``, ``decide``,
    ``start``, ``restore``, ``first_step``, which make up ``recovery_s``."""
    steps_lost: int | None
    world_size_before: int | None
    world_size_after: int | None
    restored_step: int | None
    """Steps done in the state that the run went on from."""
    restored_from: str | None
    """That state: ``snapshot``, ``fresh``, or a checkpoint's name."""
    rejected: tuple[str, ...]
    """States that were found damaged and passed over."""
    parity: DrillParity | None
    note: str | None
    """What is to be known beside the figures."""


class Drill(Answer):
    id: str
    kind: DrillKind
    rank: int
    at: Time
    """When it was asked for."""
    state: DrillState
    problem: str | None = None
    """Why it could not be carried out."""
    report: DrillReport | None = None
    """From the moment on that the fault is in."""

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come but the sample ledger of an epoch that has not ended."""
        if self.state is DrillState.RECOVERED:
            parity = self.report.parity if self.report else None
            return parity is not None and parity.in_parity is not None
        return self.state not in (DrillState.REQUESTED, DrillState.STARTED)
