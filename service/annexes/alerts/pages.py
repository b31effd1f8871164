"""The page *alerts*: rules of projects, a test of each, and what became of their messages; for
administrators."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from everstep.errors import FieldError
from everstep.wire.alerts import AlertRequest
from service.annexes.alerts import routes
from service.api.bodies import parse_model
from service.api.callers import Principal
from service.api.context import ApiContext, Context
from service.api.problems import ApiProblem
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


@router.get("")
async def get_alerts(request: Request, context: Context, caller: WebCaller) -> Response:
    caller.require("admin")
    return await _page(request, context, caller)


@router.post("")
async def post_alert(
    request: Request, context: Context, caller: WebCaller, form: CheckedForm
) -> Response:
    """Create an alert. With a fault, show the form again; the key and the URL are not repeated."""
    caller.require("admin")
    given = {name: form.get(name, "").strip() for name in _FIELDS}
    body: dict[str, object] = {name: value for name, value in given.items() if value}
    if addresses := form.get("addresses", "").replace(",", " ").split():
        body["addresses"] = addresses
    try:
        await routes.add_alert(context, parse_model(AlertRequest, body), caller.token_id)
    except ApiProblem as exc:
        if exc.status != 422:
            raise
        answer = await _page(request, context, caller, form, exc.errors)
        answer.status_code = 422
        return answer
    return RedirectResponse("/alerts", 303)


@router.post("/{alert_id}/test")
async def post_test(
    alert_id: str, context: Context, caller: WebCaller, _form: CheckedForm
) -> Response:
    caller.require("admin")
    await routes.test_alert(await routes.known_alert(alert_id, context, caller), context)
    return RedirectResponse("/alerts#messages", 303)


@router.post("/{alert_id}/delete")
async def post_delete(
    alert_id: str, context: Context, caller: WebCaller, _form: CheckedForm
) -> Response:
    caller.require("admin")
    await routes.delete_alert(await routes.known_alert(alert_id, context, caller), context)
    return RedirectResponse("/alerts", 303)


@router.post("/{alert_id}/deliveries/{delivery_id}/retry")
async def post_retry(
    alert_id: str, delivery_id: str, context: Context, caller: WebCaller, _form: CheckedForm
) -> Response:
    caller.require("admin")
    alert = await routes.known_alert(alert_id, context, caller)
    await routes.retry_delivery(alert, delivery_id, context)
    return RedirectResponse("/alerts#messages", 303)


async def _page(
    request: Request,
    context: ApiContext,
    caller: Principal,
    form: dict[str, str] | None = None,
    faults: tuple[FieldError, ...] = (),
) -> Response:
    rows = sorted(
        await context.database_call(routes.store_of(context).all),
        key=lambda row: (row.created_at, row.id),
    )
    messages = await context.database_call(routes.store_of(context).deliveries, None, _MESSAGES)
    projects = [row.name for row, _ in await context.database_call(context.projects.all)]
    return page(
        request,
        "alerts.html",
        caller,
        alerts=[routes.alert_answer(row) for row in rows],
        names={row.id: row.name for row in rows},
        messages=[routes.delivery_answer(row) for row in messages],
        projects=projects,
        whens=WHENS,
        formats=FORMATS,
        has_mail=context.settings.mail is not None,
        form=form or {},
        faults=faults,
    )
