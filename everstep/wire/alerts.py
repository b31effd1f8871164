"""Alerts of a project: rules, deliveries, and the message that receivers of generic JSON get."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.wire.base import Answer, Open, Time
from everstep.wire.run import RunStatus, Verdict

AlertWhen = Literal["failed", "finished", "recovered", "straggler", "stalled"]
AlertFormat = Literal["json", "slack", "teams", "pagerduty", "email"]
AlertEvent = Literal["trigger", "resolve", "test"]
DeliveryState = Literal["waiting", "delivered", "failed"]

DEFAULT_MORE_THAN: Final = 3
DEFAULT_STALLED_S: Final = 600.0
PAGERDUTY_URL: Final = "https://events.pagerduty.com/v2/enqueue"
_MAIL_ADDRESS: Final = re.compile(r"[^@\s<>\"(),:;\x00-\x1f\x7f]+@[^@\s<>\"(),:;\x00-\x1f\x7f]+")

AlertName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
AlertProject = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


def _fault(code: str, text: str, **values: Any) -> PydanticCustomError:
    return PydanticCustomError(code, text, values)


class AlertRequest(BaseModel):
    """Body of POST /v1/alerts: when to send a message, and where to.

    >>> AlertRequest(name="on-call", when="stalled", format="json", url="https://a.example").stalled_s
    600.0
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )

    project: AlertProject = "default"
    """Project whose runs it watches."""
    name: AlertName
    """A name for people; it is in every message."""
    when: AlertWhen
    """``failed`` and ``finished`` (however the run ended), ``recovered`` (more than ``more_than``
    times within an hour), ``straggler`` (a rank slows its peers down), ``stalled`` (no step for
    ``stalled_s`` seconds)."""
    more_than: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Recoveries within an hour that are not yet reported; default 3. Only for ``recovered``."""
    stalled_s: Annotated[float, Field(ge=10, le=30 * 86_400, allow_inf_nan=False)] | None = None
    """Seconds without a step; default 600. Only for ``stalled``."""
    format: AlertFormat
    """``json`` (signed, for a program), ``slack``, ``teams``, ``pagerduty`` (Events API v2) or
    ``email``."""
    url: SecretStr | None = None
    """Where to POST. Slack's and Teams' URLs are secrets: no answer shows more than the host. For
    ``pagerduty`` the default is https://events.pagerduty.com/v2/enqueue."""
    routing_key: SecretStr | None = None
    """Integration key of a PagerDuty service; only for ``pagerduty``."""
    addresses: Annotated[tuple[str, ...], Field(max_length=20)] | None = None
    """Recipients; only for ``email``."""

    @field_validator("more_than")
    @classmethod
    def _counts_recoveries(cls, value: int | None, info: ValidationInfo) -> int | None:
        found: int | None = _only_for(value, info, "when", "recovered", DEFAULT_MORE_THAN)
        return found

    @field_validator("stalled_s")
    @classmethod
    def _times_steps(cls, value: float | None, info: ValidationInfo) -> float | None:
        found: float | None = _only_for(value, info, "when", "stalled", DEFAULT_STALLED_S)
        return found

    @field_validator("url")
    @classmethod
    def _url_is_complete(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        kind = info.data.get("format")
        if kind == "email" and value is not None:
            raise _fault("url_of_email", "is not used by email; remove it and set addresses")
        if kind == "pagerduty" and value is None:
            return SecretStr(PAGERDUTY_URL)
        if kind in ("json", "slack", "teams") and value is None:
            raise _fault("url_missing", "is required for {kind}; set the receiver's URL", kind=kind)
        if value is not None and not _is_url(value.get_secret_value()):
            raise _fault(
                "url_invalid",
                "is not a URL that can be called; use https://HOST/PATH without a user name, at "
                "most 2048 characters",
            )
        return value

    @field_validator("routing_key")
    @classmethod
    def _key_is_of_pagerduty(
        cls, value: SecretStr | None, info: ValidationInfo
    ) -> SecretStr | None:
        value = _only_for(value, info, "format", "pagerduty", None)
        if value is not None:
            if not re.fullmatch(r"[A-Za-z0-9_-]{8,64}", value.get_secret_value()):
                raise _fault(
                    "routing_key_invalid",
                    "is not an integration key; copy it from the PagerDuty service's "
                    "integration 'Events API v2'",
                )
        elif info.data.get("format") == "pagerduty":
            raise _fault("routing_key_missing", "is required for pagerduty; set its key")
        return value

    @field_validator("addresses")
    @classmethod
    def _addresses_are_of_email(
        cls, value: tuple[str, ...] | None, info: ValidationInfo
    ) -> tuple[str, ...] | None:
        value = _only_for(value, info, "format", "email", None)
        for address in value or ():
            if not is_mail_address(address):
                raise _fault(
                    "address_invalid",
                    "{address} is not an e-mail address; use NAME@HOST",
                    address=repr(address[:300]),
                )
        if not value and info.data.get("format") == "email":
            raise _fault("addresses_missing", "is required for email; name at least one recipient")
        return value


def _only_for(value: Any, info: ValidationInfo, field: str, wanted: str, default: Any) -> Any:
    """Return a value that one choice of ``field`` uses, or its default; refuse it with others."""
    chosen = info.data.get(field, wanted)
    if chosen == wanted:
        return default if value is None else value
    if value is not None:
        raise _fault(
            "not_used",
            "has no effect with {field} {chosen}; remove it, or set {field} to {wanted}",
            field=field,
            chosen=chosen,
            wanted=wanted,
        )
    return None


def is_mail_address(text: str) -> bool:
    """Return whether mail can be sent to an address, as far as its form shows."""
    return len(text) <= 254 and _MAIL_ADDRESS.fullmatch(text) is not None


def _is_url(text: str) -> bool:
    if len(text) > 2048 or not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


class Alert(Answer):
    """A rule, without its secrets."""

    id: str
    project: str
    name: str
    when: Open[AlertWhen]
    more_than: int | None
    """Recoveries within an hour that are not yet reported; null unless ``when`` is
    ``recovered``."""
    stalled_s: float | None
    """Seconds without a step; null unless ``when`` is ``stalled``."""
    format: Open[AlertFormat]
    target: str
    """Where its messages go: the receiver's host, or the recipients. URLs and keys are not shown
    again."""
    created_at: Time


class AlertDelivery(Answer):
    """One message of an alert, and what became of it."""

    id: str
    """Also the message's ``id`` and the header ``Everstep-Delivery``; it stays when it is sent
    again."""
    alert_id: str
    run_id: str | None
    """The run that it is about; null for a test."""
    event: Open[AlertEvent]
    summary: str
    """The message in one line."""
    state: Open[DeliveryState]
    """``waiting`` for its first or next try, ``delivered``, or ``failed``: no more tries."""
    tries: int
    created_at: Time
    next_at: Time | None
    """When it is tried next; null once it is delivered or failed."""
    finished_at: Time | None
    status: int | None
    """HTTP or SMTP status of the last answer; null if there was none."""
    answer: str | None
    """First characters of that answer."""
    error: str | None
    """Why the last try failed; null if it did not."""


class AlertRun(Answer):
    """The run that a message is about."""

    id: str
    name: str
    project: str
    status: Open[RunStatus]
    reason: str | None
    """Why it has this status, in words."""
    step: int
    total_steps: int | None
    url: str | None
    """The run's page."""


class AlertFailure(Answer):
    """The run's last failure."""

    at: Time
    verdict: Verdict
    first_rank: int | None
    node_id: str | None
    step: int | None
    exception: str | None
    """The line of the exception that says what happened."""
    action: str
    drill: str | None
    """The drill that caused it, in words; null for a failure that nobody ordered."""
    steps_lost: int | None
    detect_s: float | None
    recovery_s: float | None


class AlertCost(Answer):
    """What failures have cost the run so far."""

    restarts: int
    steps_lost: int
    recovery_s: float
    """From the detection of each failure to the next first step, added up."""


class AlertMessage(Answer):
    """Body of a message in format ``json``; the other formats are made from it."""

    id: str
    """Id of the delivery. A message may arrive twice, with the same id."""
    alert: str
    """Name of the alert."""
    alert_id: str
    when: Open[AlertWhen]
    event: Open[AlertEvent]
    """``resolve`` ends the incident that a ``trigger`` with the same ``incident`` began."""
    incident: str
    at: Time
    summary: str
    run: AlertRun
    failure: AlertFailure | None
    """Null if nothing has failed."""
    cost: AlertCost
