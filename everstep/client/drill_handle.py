"""A drill: wait for it and read its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.client.order_handle import OrderHandle
from everstep.wire.drills import Drill, DrillKind, DrillReport, DrillState


class DrillFields:
    """The fields of a drill, for type checkers."""

    if TYPE_CHECKING:
        kind: DrillKind
        rank: int
        state: DrillState
        problem: str | None
        report: DrillReport | None


class DrillHandle(DrillFields, OrderHandle[Drill]):
    """One drill. Its fields (``drill.state``, ``drill.report``, …) are those of the last response,
    which ``drill.drill`` holds.

    ``wait`` returns when the report is complete: the run has trained ten more steps, has ended, or
    the drill was not carried out. ``report.parity`` compares the run before and after.

    >>> run.drill("kill_worker", rank=1).wait().report.recovery_s   # doctest: +SKIP
    1.1
    """

    _noun = "drill"
    _fields = frozenset(Drill.model_fields)

    def __repr__(self) -> str:
        return f"<drill {self.id} {self.drill.kind} of rank {self.drill.rank}, {self.drill.state}>"

    @property
    def drill(self) -> Drill:
        return self._order
