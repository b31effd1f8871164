"""A drill as an object: asked for, waited for, and its report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from everstep.drills import Drill, DrillKind, DrillReport, DrillState
from everstep.follow import Patience, wait_until
from everstep.transport import Transport


class DrillHandle:
    """One drill. Its fields (``drill.state``, ``drill.report``, …) are those of the last answer, kept whole in ``drill.drill``.

    >>> run.drill("kill_worker", rank=1).wait().report.recovery_s   # doctest: +SKIP
    1.1
    """

    if TYPE_CHECKING:
        kind: DrillKind
        rank: int
        state: DrillState
        problem: str | None
        report: DrillReport | None
    else:

        def __getattr__(self, name: str) -> Any:
            if name in Drill.model_fields:
                return getattr(self.drill, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __init__(self, transport: Transport, run_id: str, drill: Drill, patience: Patience) -> None:
        self.run_id = run_id
        self.drill = drill
        self._transport = transport
        self._patience = patience
        self._path = f"/v1/runs/{quote(run_id, safe='')}/drills/{quote(drill.id, safe='')}"

    def __repr__(self) -> str:
        return f"<drill {self.id} {self.drill.kind} of rank {self.drill.rank}, {self.drill.state}>"

    @property
    def id(self) -> str:
        return self.drill.id

    def refresh(self) -> DrillHandle:
        """Ask the service how far the drill is; returns itself."""
        self.drill = self._transport.get(self._path, Drill)
        return self

    def wait(self, timeout_s: float = 600.0) -> DrillHandle:
        """Wait until the report is complete: the run has trained ten steps since, or ended, or the drill was not carried out.

        Returns itself, whatever came of it: ``state`` and ``report.parity`` tell. A service that is away for a while does not end
        the waiting. Raises WaitTimeout after ``timeout_s`` seconds; Unavailable if the service stays away.
        """
        wait_until(
            lambda: self.drill.complete,
            self.refresh,
            lambda: f"drill {self.id} of run {self.run_id} is still {self.drill.state} after {timeout_s:g} s",
            self._transport.timing,
            self._patience,
            timeout_s=timeout_s,
        )
        return self
