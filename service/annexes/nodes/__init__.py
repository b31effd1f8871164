"""Care of nodes: cordon, drain, nodes that fail too often, checks of the deployment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from service.annex import Annex, Beside, ServiceParts
from service.annexes.nodes import routes
from service.annexes.nodes.care import INTERVAL_S, CordonRule, NodeCare
from service.annexes.nodes.store import MarksFile, NodeMarkStore
from service.db.node_marks import StorageRecords
from service.reconciler.loop import Background
from service.storage_identity import StorageGate


def beside(parts: ServiceParts) -> Sequence[Beside]:
    """Return the work that looks after nodes."""
    settings, storage = parts.settings, parts.storage
    marks = NodeMarkStore(parts.database)
    gate = StorageGate(storage, StorageRecords(parts.database))
    rule = CordonRule(settings.cordon_runs, settings.cordon_failures, settings.cordon_window_s)
    care = NodeCare(marks, MarksFile(storage, marks, gate.require), parts.ray, rule)
    return [Background(INTERVAL_S, care.check)]


NODES: Final = Annex(
    "nodes",
    routers=(routes.router, routes.checks_router),
    pages=(routes.pages,),
    package="service.annexes.nodes",
    slots={"node_actions": "node_actions.html"},
    beside=beside,
)
