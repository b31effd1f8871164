"""Routes of alerts: rules of a project, their test, and what became of their messages; for
administrators."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import Depends, Path, Query

from everstep.errors import FieldError, InvalidSpec
from everstep.options.serve import OPTIONS
from everstep.spec.run_spec import RunSpec
from everstep.wire import Page
from everstep.wire.alerts import Alert, AlertDelivery, AlertRequest
from service.annexes.alerts.rules import example_message
from service.annexes.alerts.sender import NotAllowed, check_url
from service.annexes.alerts.store import AlertStore
from service.annexes.alerts.tables import AlertRow, DeliveryRow
from service.api.answers import Cursor, Limit, answer_of, page_of, position
from service.api.auth import Administrator
from service.api.blocking import db_read, db_write
from service.api.bodies import ApiRouter, Parsed, example
from service.api.dependencies import Runs, TheDatabase, TheSettings
from service.api.openapi import followed_by, problem_answers
from service.api.problems import invalid_request, not_found
from service.db.audit import note_target
from service.model.rows import to_time
from service.parts import ServiceParts
from service.settings import Settings

router: Final = ApiRouter("/v1/alerts", "alerts")

AlertBody = Annotated[
    AlertRequest,
    Parsed(),
    example(
        {
            "project": "vision",
            "name": "on-call",
            "when": "recovered",
            "more_than": 3,
            "format": "slack",
            "url": "https://hooks.slack.com/services/…",
        }
    ),
]

DeliveryPath = Annotated[str, Path(max_length=32, description="The delivery's id: `dlv_…`.")]


async def alert_store(database: TheDatabase, runs: Runs) -> AlertStore:
    return AlertStore(database, runs.clock)


Alerts = Annotated[AlertStore, Depends(alert_store)]


async def known_alert(
    alert_id: Annotated[str, Path(max_length=32, description="The alert's id: `alr_…`.")],
    alerts: Alerts,
    _caller: Administrator,
) -> AlertRow:
    """Return the alert in the path. Raises 404 if it does not exist."""
    found = await db_read(alerts.get, alert_id)
    if found is None:
        raise not_found(f"alert {alert_id} does not exist; `everstep alerts list` shows all")
    return found


KnownAlert = Annotated[AlertRow, Depends(known_alert)]


@router.post(
    "",
    status_code=201,
    summary="Create an alert",
    responses={
        201: followed_by("alert_id", "id", "test_alert", "list_deliveries", "delete_alert"),
        **problem_answers(400, 403, 413, 415, 422),
    },
)
async def create_alert(
    caller: Administrator, wanted: AlertBody, alerts: Alerts, settings: TheSettings
) -> Alert:
    """The URL and the key are not shown again. What happened before is not reported."""
    return await add_alert(alerts, settings, wanted, caller.token_id)


async def add_alert(
    alerts: AlertStore, settings: Settings, wanted: AlertRequest, token_id: str
) -> Alert:
    """Store a rule. Raises 422 for a target that this service would not send to."""
    if wanted.format == "email" and settings.mail is None:
        raise invalid_request(
            "format",
            msg="is email, but this service has no mail server; ask the operator to set "
            f"{OPTIONS['smtp_url'].variable} and {OPTIONS['smtp_from'].variable}",
        )
    if wanted.url is not None:
        try:
            check_url(wanted.url.get_secret_value(), settings.notify)
        except NotAllowed as exc:
            raise invalid_request("url", msg=str(exc)) from exc
    return alert_answer(await db_write(alerts.create, wanted, token_id))


async def check_notify(parts: ServiceParts, spec: RunSpec) -> None:
    """Check the webhook of a spec. Raises InvalidSpec if this service does not call its URL."""
    rule = parts[Settings].notify
    if spec.notify is not None and not rule.allows(spec.notify.url):
        allowed = ", ".join(sorted(rule.origins)) or "none"
        msg = f"its origin is not allowed; use one that the operator allows: {allowed}"
        raise InvalidSpec((FieldError(("notify", "url"), msg),))


@router.get("", summary="Alerts", responses=problem_answers(403, 422))
async def list_alerts(
    _caller: Administrator,
    alerts: Alerts,
    project: Annotated[
        str | None, Query(max_length=64, description="Only those of this project.")
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Alert]:
    """Oldest first, without secrets."""
    found = await db_read(alerts.all, project)
    shown, behind = page_of(found, lambda row: (row.created_at, row.id), cursor, limit)
    return Page(items=tuple(map(alert_answer, shown)), next_cursor=behind)


@router.delete(
    "/{alert_id}",
    status_code=204,
    summary="Delete an alert",
    responses=problem_answers(403, 404, 422),
)
async def delete_alert(alert: KnownAlert, alerts: Alerts) -> None:
    """Also deletes its messages; those that are not sent yet will not be."""
    note_target(alert.id)
    if not await db_write(alerts.delete, alert.id):
        raise not_found(f"alert {alert.id} was deleted meanwhile")


@router.post(
    "/{alert_id}/test",
    status_code=202,
    summary="Send a test message",
    responses=problem_answers(403, 404, 422),
)
async def test_alert(alert: KnownAlert, alerts: Alerts) -> AlertDelivery:
    """Tried once, within a second or two. Read what became of it from the alert's deliveries."""
    note_target(alert.id)
    message = example_message(alert, alerts.clock())
    return delivery_answer(await db_write(alerts.add_test, alert, message))


@router.get(
    "/{alert_id}/deliveries",
    summary="Messages of an alert",
    responses=problem_answers(403, 404, 422),
)
async def list_deliveries(
    alert: KnownAlert, alerts: Alerts, limit: Limit = 50, cursor: Cursor = None
) -> Page[AlertDelivery]:
    """Newest first, for 30 days after the last try."""
    before = None if cursor is None else position(cursor, 0)
    found = await db_read(alerts.deliveries, alert.id, limit + 1, before)
    items = tuple(map(delivery_answer, found[:limit]))
    more = len(found) > limit
    return Page(items=items, next_cursor=str(found[limit - 1].seq) if more else None)


@router.post(
    "/{alert_id}/deliveries/{delivery_id}/retry",
    status_code=202,
    summary="Send a message again",
    responses=problem_answers(403, 404, 422),
)
async def retry_delivery(
    alert: KnownAlert, delivery_id: DeliveryPath, alerts: Alerts
) -> AlertDelivery:
    """Its id stays the same. Failed tries are repeated for a day."""
    note_target(alert.id)
    found = await db_write(alerts.send_again, alert.id, delivery_id)
    if found is None:
        raise not_found(f"alert {alert.id} has no delivery {delivery_id}")
    return delivery_answer(found)


def alert_answer(row: AlertRow) -> Alert:
    """Return a rule without its secrets."""
    url = row.target.get("url")
    target = urlsplit(url).netloc if url else ", ".join(row.target["addresses"])
    return answer_of(Alert, row, target=target)


def delivery_answer(row: DeliveryRow) -> AlertDelivery:
    return answer_of(
        AlertDelivery,
        row,
        summary=row.message["summary"],
        tries=row.num_tries,
        next_at=to_time(row.next_at) if row.state == "waiting" else None,
    )
