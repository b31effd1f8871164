"""What a run would survive at this moment, and what that would cost."""

from __future__ import annotations

from everstep.wire import Protection
from service.db.rows import RunRow


def protection(run: RunRow) -> Protection:
    """What may die now without ending the run.

    A rank, a node or the driver: the run goes on from its newest durable checkpoint, or from its first step where there is none
    yet. The head holds the driver and Ray's own state, so its loss is survived only where someone brings it back; that is the
    operator's to promise, and not claimed here.
    """
    if run.status.terminal:
        return Protection(survives=(), worst_case_steps_lost=0)
    durable = run.latest_checkpoint["step"] if run.latest_checkpoint else 0
    since = max(0, run.step - durable)
    if run.spec["recovery"]["max_system_failures"] == 0:
        return Protection(survives=("driver",), worst_case_steps_lost=since)
    return Protection(survives=("rank", "node", "driver"), worst_case_steps_lost=since)
