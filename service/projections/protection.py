"""Say which failures a run would survive now, and how many steps each would cost."""

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
            "The loss of a rank or a node costs no step: ranks on other nodes keep the state.",
        ),
        "published": (
            "few_steps",
            "checkpoint",
            "All ranks run on one node, which keeps the state of a recent step. The loss of "
            "processes costs the few steps since then, the loss of the node those since the last "
            "durable checkpoint.",
        ),
        None: (
            "checkpoint",
            "checkpoint",
            "The loss of a rank or a node costs the steps since the last durable checkpoint: no "
            "node keeps the state.",
        ),
    }
)
"""The cost of losing processes and of losing a node, by how nodes keep snapshots."""
ENDED: Final = Protection(survives=(), worst_case_steps_lost=0, message="The run has ended.")


def protection(run: RunRow | ListedRun) -> Protection:
    """Return what may fail now without ending the run.

    After the loss of a rank, a node or the driver, the run resumes from the newest snapshot on its
    nodes, else from its newest durable checkpoint, else from its first step. The worst case counts
    durable checkpoints only, because a new driver may find no snapshot.

    The head is never listed: it holds the driver and Ray's own state, and a run survives its loss
    only if an operator restarts it.
    """
    if run.status.terminal:
        return ENDED
    begun_at = int(run.resume_from.step) if run.resume_from else 0
    if run.replay_of is not None:
        begun_at = int(run.replay_of["from_step"])
    durable = run.latest_checkpoint["step"] if run.latest_checkpoint else begun_at
    since = max(0, run.step - durable)
    if run.max_system_failures == 0:
        message = "The loss of a rank or a node ends the run: recovery.max_system_failures is 0."
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
