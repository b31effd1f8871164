"""Alerts and webhooks: messages to people and programs when something happens to runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from service.annex import Annex, Beside, PageLink
from service.annexes.alerts import pages, routes
from service.annexes.alerts.sender import AlertSender
from service.annexes.alerts.store import TELLING_KINDS, apply_alerts, queue_webhook
from service.annexes.alerts.tables import alerts
from service.api.answers import ServiceLinks
from service.db.engine import Database
from service.db.tables import TableHooks
from service.parts import ServiceParts
from service.reconciler.loop import Background
from service.settings import Settings

INTERVAL_S: Final = 1.0


def beside(parts: ServiceParts) -> Sequence[Beside]:
    """Return the work that sends messages."""
    settings, url = parts[Settings], parts[ServiceLinks].public_url
    sender = AlertSender(parts[Database], settings.notify, settings.mail, url)
    return [Background(INTERVAL_S, sender.work)]


ALERTS: Final = Annex(
    "alerts",
    routers=(routes.router,),
    pages=(pages.router,),
    navigation=(PageLink("/alerts", "Alerts", 60, "admin"),),
    package="service.annexes.alerts",
    tables=TableHooks(
        run_changed=apply_alerts,
        run_events=TELLING_KINDS,
        status_changed=queue_webhook,
        of_project=(alerts,),
    ),
    spec_checks={"notify": routes.check_notify},
    beside=beside,
)
