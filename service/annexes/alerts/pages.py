"""The page *alerts*: rules of projects, a test of each, and what became of their messages; for
administrators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import RedirectResponse

from everstep.errors import FieldError
from everstep.wire.alerts import AlertRequest
from service.annexes.alerts import routes
from service.annexes.alerts.routes import Alerts
from service.annexes.alerts.store import AlertStore
from service.annexes.alerts.tables import AlertRow
from service.api.blocking import db_read
from service.api.bodies import parse_model
from service.api.callers import Principal
from service.api.dependencies import Projects, TheSettings
from service.api.problems import ApiProblem
from service.db.projects import ProjectStore
from service.settings import Settings
from service.web.rendering import PageRoute, page
from service.web.session import CheckedForm, WebCaller

router: Final = APIRouter(prefix="/alerts", route_class=PageRoute, include_in_schema=False)

_MESSAGES: Final = 30

WHENS: Final = {
    "failed": "a run has failed",
    "finished": "a run has ended",
    "recovered": "a run recovers more than N times an hour",
    "straggler": "a rank slows its peers down",
    "stalled": "a run makes no step",
}

FORMATS: Final = {
    "slack": "Slack",
    "teams": "Teams",
    "pagerduty": "PagerDuty",
    "email": "E-mail",
    "json": "JSON",
}

_FIELDS: Final = (
    *("project", "name", "when", "more_than", "stalled_s", "format"),
    *("url", "routing_key"),
)


async def alerts_administrator(caller: WebCaller) -> Principal:
    """Return who is logged in. Raises 403 if it is not an administrator."""
    caller.require("admin")
    return caller


Administrator = Annotated[Principal, Depends(alerts_administrator)]


async def known_alert(alert_id: str, alerts: Alerts, caller: Administrator) -> AlertRow:
    """Return the alert in the path. Raises 404 if it does not exist."""
    return await routes.known_alert(alert_id, alerts, caller)


KnownAlert = Annotated[AlertRow, Depends(known_alert)]


@dataclass(frozen=True)
class AlertsPage:
    """The page, for an administrator."""

    request: Request
    caller: Principal
    alerts: AlertStore
    projects: ProjectStore
    settings: Settings

    async def shown(
        self, form: dict[str, str] | None = None, faults: tuple[FieldError, ...] = ()
    ) -> Response:
        rows = sorted(await db_read(self.alerts.all), key=lambda row: (row.created_at, row.id))
        messages = await db_read(self.alerts.deliveries, None, _MESSAGES)
        return page(
            self.request,
            "alerts.html",
            self.caller,
            alerts=[routes.alert_answer(row) for row in rows],
            names={row.id: row.name for row in rows},
            messages=[routes.delivery_answer(row) for row in messages],
            projects=[row.name for row, _ in await db_read(self.projects.all)],
            whens=WHENS,
            formats=FORMATS,
            has_mail=self.settings.mail is not None,
            form=form or {},
            faults=faults,
        )


async def alerts_page(
    request: Request,
    caller: Administrator,
    alerts: Alerts,
    projects: Projects,
    settings: TheSettings,
) -> AlertsPage:
    return AlertsPage(request, caller, alerts, projects, settings)


ThePage = Annotated[AlertsPage, Depends(alerts_page)]


@router.get("")
async def get_alerts(page: ThePage) -> Response:
    return await page.shown()


@router.post("")
async def post_alert(page: ThePage, form: CheckedForm) -> Response:
    """Create an alert. With a fault, show the form again; the key and the URL are not repeated."""
    given = {name: form.get(name, "").strip() for name in _FIELDS}
    body: dict[str, object] = {name: value for name, value in given.items() if value}
    if addresses := form.get("addresses", "").replace(",", " ").split():
        body["addresses"] = addresses
    try:
        wanted = parse_model(AlertRequest, body)
        await routes.add_alert(page.alerts, page.settings, wanted, page.caller.token_id)
    except ApiProblem as exc:
        if exc.status != 422:
            raise
        answer = await page.shown(form, exc.errors)
        answer.status_code = 422
        return answer
    return RedirectResponse("/alerts", 303)


@router.post("/{alert_id}/test")
async def post_test(alert: KnownAlert, alerts: Alerts, _form: CheckedForm) -> Response:
    await routes.test_alert(alert, alerts)
    return RedirectResponse("/alerts#messages", 303)


@router.post("/{alert_id}/delete")
async def post_delete(alert: KnownAlert, alerts: Alerts, _form: CheckedForm) -> Response:
    await routes.delete_alert(alert, alerts)
    return RedirectResponse("/alerts", 303)


@router.post("/{alert_id}/deliveries/{delivery_id}/retry")
async def post_retry(
    alert: KnownAlert, delivery_id: str, alerts: Alerts, _form: CheckedForm
) -> Response:
    await routes.retry_delivery(alert, delivery_id, alerts)
    return RedirectResponse("/alerts#messages", 303)
