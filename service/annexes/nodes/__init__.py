"""Care of nodes: cordon, drain, nodes that fail too often, checks of the deployment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from service.annex import Annex, Beside
from service.annexes.nodes import routes
from service.annexes.nodes.care import INTERVAL_S, CordonRule, NodeCare
from service.annexes.nodes.store import MarksFile, NodeMarkStore
from service.cluster.ray_jobs import RayJobs
from service.db.engine import Database
from service.db.node_marks import StorageRecords
from service.parts import ServiceParts
from service.reconciler.loop import Background
from service.settings import Settings
from service.storage_identity import StorageGate
from storage.filesystem import Storage


def beside(parts: ServiceParts) -> Sequence[Beside]:
    """Return the work that looks after nodes."""
    settings, storage, database = parts[Settings], parts[Storage], parts[Database]
    marks = NodeMarkStore(database)
    gate = StorageGate(storage, StorageRecords(database))
    rule = CordonRule(settings.cordon_runs, settings.cordon_failures, settings.cordon_window_s)
    care = NodeCare(marks, MarksFile(storage, marks, gate.require), parts[RayJobs], rule)
    return [Background(INTERVAL_S, care.check)]


NODES: Final = Annex(
    "nodes",
    routers=(routes.router, routes.checks_router),
    pages=(routes.pages,),
    package="service.annexes.nodes",
    slots={"node_actions": "node_actions.html"},
    beside=beside,
)
