"""Sends the messages of alerts and the webhooks of runs: each in its receiver's format, again and
again for a day, and only from the process that holds the reconciler's lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import smtplib
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.message import EmailMessage
from functools import cache
from typing import Any, Final

import httpx
import structlog
from pydantic_core import to_json

from everstep.options.serve import OPTIONS
from everstep.spec.plain_text import printable_lines, written_out
from everstep.wire.alerts import AlertMessage
from service.annexes.alerts import formats
from service.annexes.alerts.rules import with_failure
from service.annexes.alerts.store import DeliveryStore, IncidentStore
from service.annexes.alerts.tables import AlertRow, DeliveryRow
from service.db.engine import Database, DatabaseError
from service.db.events import EventStore
from service.model.operator_rules import MailServer
from service.model.rows import past
from service.submission_rules.allowed import NotifyRule, origin_of

OVER_TIME_S: Final = 5.0
"""Interval of the check of what begins and ends as time passes."""
PRUNE_S: Final = 3600.0
_MOST_CHARS: Final = 1000
_MASK: Final = "[secret]"

log = structlog.get_logger(__name__)


class AlertSender:
    """Sends due messages.

    Args:
        database: Where messages are, and the histories of runs.
        rule: Origins that webhooks may call, and alerts although they are not public; the key of
            signatures.
        mail: The operator's mail server; None if there is none.
        public_url: Base URL of the run pages; None for no links.
        clock: Unix seconds.
        transport: httpx's transport, for tests.
    """

    def __init__(
        self,
        database: Database,
        rule: NotifyRule,
        mail: MailServer | None = None,
        public_url: str | None = None,
        clock: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._deliveries = DeliveryStore(database, clock)
        self._incidents = IncidentStore(database, clock)
        self._events = EventStore(database, clock)
        self._rule = rule
        self._mail = mail
        self._public_url = public_url
        self._clock = clock
        self._transport = transport
        self._applied_at = self._pruned_at = float("-inf")

    async def work(self) -> None:
        """Apply rules over time, then send what is due in parallel. Raises DatabaseError."""
        now = self._clock()
        if now - past(self._applied_at, now) >= OVER_TIME_S:
            self._applied_at = now
            await asyncio.to_thread(self._incidents.work)
            await asyncio.to_thread(self._deliveries.adopt)
        if now - past(self._pruned_at, now) >= PRUNE_S:
            self._pruned_at = now
            await asyncio.to_thread(self._deliveries.prune)
        due = await asyncio.to_thread(self._deliveries.due)
        if due:
            async with client(self._transport) as http:
                await asyncio.gather(*(self._try(http, *each) for each in due))

    def _completed(self, delivery: DeliveryRow) -> DeliveryRow:
        """Return a message with the run's failures, before its first try."""
        message = delivery.message
        if delivery.num_tries or delivery.run_id is None or message["failure"]:
            return delivery
        failures = self._events.failures(delivery.run_id, message.get("seq"))
        return replace(delivery, message=with_failure(message, failures))

    async def _try(
        self, http: httpx.AsyncClient, delivery: DeliveryRow, alert: AlertRow | None
    ) -> None:
        try:
            delivery = await asyncio.to_thread(self._completed, delivery)
            outcome = await self._sent(http, delivery, alert)
        except DatabaseError:
            raise
        except Exception as exc:  # One message that cannot be made must not hold up the others.
            log.exception("a message could not be made", delivery_id=delivery.id)
            outcome = Outcome(f"the message could not be made: {type(exc).__name__}")
        target = alert.target if alert is not None else {"url": delivery.url}
        outcome = without_secrets(outcome, secrets_of(target))
        now = self._clock()
        values: dict[str, Any] = {
            "message": delivery.message,
            "status": outcome.status,
            "answer": outcome.answer or None,
            "error": outcome.error,
        }
        if outcome.error is None:
            values |= {"state": "delivered", "finished_at": now}
        elif now >= delivery.give_up_at:
            values |= {"state": "failed", "finished_at": now}
        else:
            values["next_at"] = now + retry_pause_s(delivery.num_tries, outcome.wait_s)
        if outcome.error is not None:
            log.warning(
                "a message was not delivered",
                alert_id=delivery.alert_id,
                run_id=delivery.run_id,
                delivery_id=delivery.id,
                problem=outcome.error,
                tries_again="next_at" in values,
            )
        await asyncio.to_thread(self._deliveries.record, delivery, values)

    async def _sent(
        self, http: httpx.AsyncClient, delivery: DeliveryRow, alert: AlertRow | None
    ) -> Outcome:
        link = None
        if self._public_url and delivery.run_id is not None:
            link = f"{self._public_url}/runs/{delivery.run_id}"
        if alert is None:
            url = str(delivery.url)
            if not self._rule.allows(url):
                return Outcome(f"not sent: its origin is not allowed; name it in {_VARIABLE}")
            body = to_json({**delivery.message, **({"url": link} if link else {})})
            return await self._posted(http, url, body, delivery.incident, is_signed=True)
        message = AlertMessage.model_validate({**delivery.message, "id": delivery.id})
        if link:
            run = message.run.model_copy(update={"url": link})
            message = message.model_copy(update={"run": run})
        if alert.format == "email":
            if self._mail is None:
                return Outcome("this service has no mail server; set EVERSTEP_SMTP_URL")
            mail = formats.email(message, self._mail.sender, alert.target["addresses"])
            return await asyncio.to_thread(send, self._mail, mail)
        url, body = alert.target["url"], body_of(message, alert)
        is_signed = alert.format == "json"
        return await self._posted(http, url, body, delivery.id, is_signed=is_signed)

    async def _posted(
        self, http: httpx.AsyncClient, url: str, body: bytes, delivery_id: str, *, is_signed: bool
    ) -> Outcome:
        try:
            place, headers, extensions = await reachable(url, self._rule)
        except NotAllowed as exc:
            return Outcome(f"not sent: the URL {exc}")
        except OSError as exc:
            return Outcome(f"the host's name does not resolve: {exc.strerror or exc}")
        headers[DELIVERY_HEADER] = delivery_id
        if is_signed and self._rule.secret:
            headers[SIGNATURE_HEADER] = signature(self._rule.secret, int(self._clock()), body)
        return await post(http, place, body, headers, extensions)


def body_of(message: AlertMessage, alert: AlertRow) -> bytes:
    """Return the body of a POST in the alert's format."""
    match alert.format:
        case "slack":
            return to_json(formats.slack(message))
        case "teams":
            return to_json(formats.teams(message))
        case "pagerduty":
            return to_json(formats.pagerduty(message, alert.target["routing_key"]))
        case _:
            return message.model_dump_json().encode()


def secrets_of(target: Mapping[str, Any]) -> list[str]:
    """Return the texts of a target that no answer, error or log may show."""
    url = str(target.get("url", ""))
    parts = [url, httpx.URL(url).raw_path.decode("ascii")] if url else []
    return [each for each in (*parts, target.get("routing_key", "")) if len(each) > 1]


def without_secrets(outcome: Outcome, secrets: Iterable[str]) -> Outcome:
    """Return the outcome with secrets masked, cut, and without characters that steer a
    terminal."""

    def shown(text: str | None) -> str | None:
        if text is None:
            return None
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, _MASK)
        return printable_lines(written_out(text))[:_MOST_CHARS]

    return replace(outcome, error=shown(outcome.error), answer=shown(outcome.answer))


# ---------------------------------------------------------------- http post

# One POST to the outside.

TIMEOUT_S: Final = 5.0
SIGNATURE_HEADER: Final = "Everstep-Signature"
DELIVERY_HEADER: Final = "Everstep-Delivery"
_FIRST_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 3600.0
_MOST_ANSWER_BYTES: Final = 2000


@dataclass(frozen=True)
class Outcome:
    """What became of one try to deliver a message."""

    error: str | None = None
    """Why it was not delivered; None if it was."""
    status: int | None = None
    """HTTP or SMTP status; None without an answer."""
    answer: str | None = None
    """First characters of the answer."""
    wait_s: float = 0.0
    """How long the receiver wants to be left alone."""


def retry_pause_s(num_tries: int, wait_s: float = 0.0) -> float:
    """Return the seconds until a message that failed is sent again.

    Args:
        num_tries: Tries before the one that failed; each doubles the pause, up to an hour.
        wait_s: How long the receiver wants to be left alone.
    """
    pause_s = _FIRST_PAUSE_S * 2.0 ** min(num_tries, 16)
    return min(_LONGEST_PAUSE_S, max(pause_s, wait_s))


def signature(secret: str, at: int, body: bytes) -> str:
    """Return ``t=UNIX_SECONDS,v1=HEX``, the HMAC-SHA256 of ``UNIX_SECONDS.BODY``.

    The time lets receivers refuse replays.
    """
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def client(transport: httpx.AsyncBaseTransport | None = None) -> httpx.AsyncClient:
    """Return a client for calls to the outside. No redirects, which may lead anywhere, and no proxy
    or credentials of the environment."""
    return httpx.AsyncClient(
        verify=_certificates(),
        timeout=TIMEOUT_S,
        follow_redirects=False,
        trust_env=False,
        transport=transport,
    )


@cache
def _certificates() -> ssl.SSLContext:
    """Return the authorities that are trusted; loading them takes long enough to delay requests."""
    return httpx.create_ssl_context(trust_env=False)


async def post(
    http: httpx.AsyncClient,
    url: httpx.URL | str,
    body: bytes,
    headers: Mapping[str, str],
    extensions: Mapping[str, Any] | None = None,
) -> Outcome:
    """Send JSON. Only the status decides; some of the answer is kept for whoever reads the error.

    Any status but 2xx is an error, and so is no complete answer within ``2 * TIMEOUT_S`` seconds.
    """
    kind = {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            http.stream(
                "POST",
                url,
                content=body,
                headers={**kind, **headers},
                extensions=dict(extensions or {}),
            ) as answer,
        ):
            text = "" if answer.is_success else await _beginning(answer)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as exc:
        return Outcome(f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__)
    if answer.is_success:
        return Outcome(None, answer.status_code)
    wait_s = _seconds(answer.headers.get("Retry-After"))
    return Outcome(f"it answered {answer.status_code}", answer.status_code, text, wait_s)


async def _beginning(answer: httpx.Response) -> str:
    found = b""
    async for chunk in answer.aiter_bytes():
        found += chunk
        if len(found) >= _MOST_ANSWER_BYTES:
            break
    return found[:_MOST_ANSWER_BYTES].decode(errors="replace")


def _seconds(retry_after: str | None) -> float:
    known = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
    return min(float(retry_after), _LONGEST_PAUSE_S) if known and retry_after else 0.0


# ---------------------------------------------------------------- addresses

# Which addresses the service may call for a URL that somebody has entered.
#
# Origins that the operator named may be called wherever they are. Any other host must have public
# addresses only: else a URL could reach the cloud's metadata, this machine, or the network behind
# it.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            "168.63.129.16/32",  # Azure's own services, beside the metadata at 169.254.169.254
            "::/96",  # IPv4-compatible
            "::ffff:0:0:0/96",  # IPv4-translated (SIIT)
            "64:ff9b:1::/48",  # NAT64 of a local network
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
            "fec0::/10",  # site-local
        ),
    )
)
"""Networks that Python's ``is_global`` takes for public."""
_VARIABLE: Final = OPTIONS["notify_origins"].variable


class NotAllowed(Exception):
    """The service does not call this URL. The message says why and what to do."""


def is_public(address: Address) -> bool:
    """Return whether an address, and any IPv4 address inside it, is one of the public internet.

    >>> is_public(ipaddress.ip_address("169.254.169.254"))
    False
    """
    inner = [address, *_embedded(address)]
    if any(each in network for each in inner for network in _NOT_PUBLIC):
        return False
    return all(each.is_global and not each.is_multicast for each in inner)


def _embedded(address: Address) -> list[Address]:
    """Return the IPv4 addresses to which packets to an IPv6 address may go."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour]
    found += list(address.teredo or ())
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in found if each is not None]


def check_url(url: str, rule: NotifyRule) -> None:
    """Raise NotAllowed for a URL that is never called, whatever its host resolves to."""
    try:
        origin = origin_of(url)
    except httpx.InvalidURL as exc:
        raise NotAllowed("is not a URL that can be called; use https://HOST/PATH") from exc
    if origin in rule.origins:
        return
    if not origin.startswith("https://"):
        raise NotAllowed(
            f"is not https; use https, or ask the operator to add {origin} to {_VARIABLE}"
        )
    literal = _literal(httpx.URL(url).host)
    if literal is not None and not is_public(literal):
        raise _refused(origin, literal)


async def reachable(url: str, rule: NotifyRule) -> tuple[httpx.URL, dict[str, str], dict[str, Any]]:
    """Return the URL to call, the headers and httpx's extensions that make it reach ``url``.

    A host is resolved once, and the connection goes to the address that was checked: between two
    look-ups a name may change. Raises NotAllowed, OSError if the name does not resolve.
    """
    check_url(url, rule)
    parsed = httpx.URL(url)
    if origin_of(url) in rule.origins:
        return parsed, {}, {}
    port = parsed.port or 443
    found = await asyncio.get_running_loop().getaddrinfo(parsed.host, port, type=socket.SOCK_STREAM)
    address = _checked(origin_of(url), [str(each[4][0]) for each in found])
    name = parsed.raw_host.decode("ascii")
    host = f"[{name}]" if ":" in name else name
    headers = {"Host": host if parsed.port is None else f"{host}:{port}"}
    return parsed.copy_with(host=str(address)), headers, {"sni_hostname": name}


def _checked(origin: str, texts: Sequence[str]) -> Address:
    """Return the first address of a host. Raises NotAllowed if any of them is not public."""
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    for address in addresses:
        if not is_public(address):
            raise _refused(origin, address)
    return addresses[0]


def _refused(origin: str, address: Address) -> NotAllowed:
    return NotAllowed(
        f"{origin} is at {address}, which is not a public address; ask the operator to add "
        f"{origin} to {_VARIABLE} if the service may call it"
    )


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


# ---------------------------------------------------------------- mail

# Hand mail in at the operator's server: encrypted unless the operator says otherwise.


def send(server: MailServer, mail: EmailMessage, context: ssl.SSLContext | None = None) -> Outcome:
    """Hand one message in; blocks for a few ``TIMEOUT_S`` at most.

    Args:
        server: The server and who uses it.
        mail: The message.
        context: Which certificates are trusted; None for those of the system.
    """
    try:
        with _connected(server, context or ssl.create_default_context()) as smtp:
            if server.user:
                smtp.login(server.user, server.password)
            refused = smtp.send_message(mail)
    except smtplib.SMTPRecipientsRefused as exc:
        return _refusal(exc.recipients)
    except smtplib.SMTPResponseException as exc:
        return Outcome(f"it answered {exc.smtp_code}", exc.smtp_code, _text(exc.smtp_error))
    except (smtplib.SMTPException, OSError) as exc:
        return Outcome(f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__)
    return _refusal(refused) if refused else Outcome(None, 250)


def _connected(server: MailServer, context: ssl.SSLContext) -> smtplib.SMTP:
    if server.scheme == "smtps":
        return smtplib.SMTP_SSL(server.host, server.port, timeout=TIMEOUT_S, context=context)
    smtp = smtplib.SMTP(server.host, server.port, timeout=TIMEOUT_S)
    if server.scheme == "smtp":
        try:
            smtp.starttls(context=context)
        except BaseException:
            smtp.close()
            raise
    return smtp


def _refusal(refused: dict[str, tuple[int, bytes]]) -> Outcome:
    """Return the outcome for recipients that the server did not take. The others have the
    message."""
    code, text = next(iter(refused.values()))
    return Outcome(f"it refused {', '.join(refused)}", code, _text(text))


def _text(answer: bytes | str) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
