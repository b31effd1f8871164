"""Sweeps: runs of one spec with other values, compared by a metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from service.annex import Annex, Beside, PageLink, ServiceParts, TableHooks
from service.annexes.sweeps import pages, routes
from service.annexes.sweeps.driver import INTERVAL_S, SweepDriver
from service.annexes.sweeps.store import SPECS_TO_COME, SweepStore, sweeps
from service.db.runs import RunStore
from service.reconciler.loop import Background


def beside(parts: ServiceParts) -> Sequence[Beside]:
    """Return the work that advances sweeps."""
    driver = SweepDriver(SweepStore(parts.database), RunStore(parts.database))
    return [Background(INTERVAL_S, driver.work)]


SWEEPS: Final = Annex(
    "sweeps",
    routers=(routes.router,),
    pages=(pages.router,),
    navigation=(PageLink("/sweeps", "Sweeps", 20),),
    package="service.annexes.sweeps",
    slots={"run_links": "sweep_link.html"},
    tables=TableHooks(specs_to_come=SPECS_TO_COME, in_project={"sweeps": sweeps}),
    beside=beside,
)
