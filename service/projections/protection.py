"""What a run would survive at this moment, and what that would cost."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from everstep.wire import Loss, Protection
from service.model.run_rows import ListedRun, RunRow

_LOSSES: Final[Mapping[str | None, tuple[Loss, Loss, str]]] = MappingProxyType(
    {
        "survivors": (
            "no_steps",
            "no_steps",
            "The loss of a rank or of a node costs no step: ranks on other nodes keep the state.",
        ),
        "published": (
            "few_steps",
            "checkpoint",
            "All ranks run on one node, which keeps the state of a recent step: the loss of their "
            "processes costs the few steps "
            "since then, the loss of the node those since the last durable checkpoint.",
        ),
        None: (
            "checkpoint",
            "checkpoint",
            (
                "The loss of a rank or of a node costs the steps since the last durable "
                "checkpoint: "
                "no node keeps the state."
            ),
        ),
    }
)
"""What the loss of processes and of a node costs, by how nodes keep the state of a run that
trains."""
ENDED: Final = Protection(survives=(), worst_case_steps_lost=0, message="The run has ended.")


def protection(run: RunRow | ListedRun) -> Protection:
    """Return what may die now without ending the run.

    After the loss of a rank, a node or the driver the run resumes from the newest state that its
    nodes still hold, or from its newest durable checkpoint, or from its first step. A new driver
    counts durable checkpoints only. The head holds the driver and Ray's own state: a run survives
    its loss only if somebody brings the head back. The operator may promise that; it is not claimed
    here.
    """
    if run.status.terminal:
        return ENDED
    begun_at = int(run.resume_from.step) if run.resume_from else 0
    durable = run.latest_checkpoint["step"] if run.latest_checkpoint else begun_at
    since = max(0, run.step - durable)
    if run.max_system_failures == 0:
        message = "The loss of a rank or of a node ends the run: recovery.max_system_failures is 0."
        return Protection(survives=("driver",), worst_case_steps_lost=since, message=message)
    process_loss: Loss | None = None
    node_loss: Loss | None = None
    message = "No rank trains now."
    if run.workers:
        process_loss, node_loss, message = _LOSSES.get(run.snapshots, _LOSSES[None])
    return Protection(
        survives=("rank", "node", "driver"),
        worst_case_steps_lost=since,
        process_loss=process_loss,
        node_loss=node_loss,
        message=message,
    )
