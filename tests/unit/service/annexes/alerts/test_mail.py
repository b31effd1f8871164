"""Mail is handed in at a real SMTP server: with a password only over TLS, and refusals are told."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from everstep.options.model import SettingsError
from service.annexes.alerts.sender import send
from service.model.operator_rules import MailServer
from service.settings import Settings
from tests.support.service_process import free_port
from tests.unit.service.process.test_serve_tls import certificate

USER, PASSWORD = "everstep", "p@ss:word"


class Mailbox:
    """Keeps what it is handed; refuses recipients that begin with ``no``."""

    def __init__(self) -> None:
        self.messages: list[Envelope] = []

    async def handle_RCPT(
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: Any
    ) -> str:
        if address.startswith("no"):
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:
        self.messages.append(envelope)
        return "250 OK"


def _authenticated(
    _server: SMTP, _session: Session, _envelope: Envelope, _how: str, data: Any
) -> AuthResult:
    known = isinstance(data, LoginPassword) and (data.login, data.password) == (
        USER.encode(),
        PASSWORD.encode(),
    )
    return AuthResult(success=known, handled=False)


@contextmanager
def serving(**options: Any) -> Iterator[tuple[Mailbox, int]]:
    box = Mailbox()
    controller = Controller(box, hostname="127.0.0.1", port=free_port(), **options)
    controller.start()
    try:
        yield box, controller.port
    finally:
        controller.stop()


def mail(*recipients: str) -> EmailMessage:
    made = EmailMessage()
    made["From"], made["To"], made["Subject"] = "e@example.org", ", ".join(recipients), "Hello"
    made.set_content("digits has failed\n")
    return made


def test_a_message_arrives() -> None:
    with serving() as (box, port):
        server = MailServer.of(f"smtp+plain://127.0.0.1:{port}", "e@example.org")
        assert send(server, mail("a@example.org", "b@example.org")).error is None
    [envelope] = box.messages
    assert envelope.rcpt_tos == ["a@example.org", "b@example.org"]
    assert b"digits has failed" in (envelope.content or b"")


def test_a_password_goes_over_tls_only_and_to_a_known_certificate(tmp_path: Path) -> None:
    files = certificate(tmp_path)
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(*files)
    trusting = ssl.create_default_context(cafile=str(files[0]))
    options = {"tls_context": own, "authenticator": _authenticated, "auth_required": True}
    with serving(require_starttls=True, **options) as (box, port):
        url = f"smtp://{USER}:p%40ss%3Aword@127.0.0.1:{port}"
        server = MailServer.of(url, "e@example.org")
        assert PASSWORD not in repr(server)
        assert send(server, mail("a@example.org"), trusting).error is None
        unknown = send(server, mail("a@example.org"))
        assert "certificate verify failed" in str(unknown.error)
        wrong = send(MailServer.of(url.replace("p%40", "q"), "e@x.org"), mail("a@x.org"), trusting)
        assert (wrong.status, wrong.error) == (535, "it answered 535")
    assert len(box.messages) == 1


def test_refused_recipients_are_named_and_a_server_that_is_away_is_said() -> None:
    with serving() as (box, port):
        server = MailServer.of(f"smtp+plain://127.0.0.1:{port}", "e@example.org")
        refused = send(server, mail("a@example.org", "nobody@example.org"))
        assert (refused.status, refused.error) == (550, "it refused nobody@example.org")
        alone = send(server, mail("nobody@example.org"))
        assert (alone.status, alone.answer) == (550, "no such mailbox")
    assert len(box.messages) == 1
    assert "ConnectionRefusedError" in str(send(server, mail("a@example.org")).error)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"EVERSTEP_SMTP_URL": "smtps://mail.example.org"}, "set EVERSTEP_SMTP_FROM"),
        ({"EVERSTEP_SMTP_FROM": "e@example.org"}, "set EVERSTEP_SMTP_URL"),
        ({"EVERSTEP_SMTP_URL": "smtp+plain://u:hidden@m"}, "without encryption"),
        ({"EVERSTEP_SMTP_URL": "https://u:hidden@m"}, "is not a mail server"),
        ({"EVERSTEP_SMTP_URL": "smtp://u@m"}, "a user without a password"),
        ({"EVERSTEP_SMTP_URL": "smtp://m:99999999"}, "is not a URL"),
    ],
)
def test_what_an_operator_may_not_say(given: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        Settings.read(given)
    assert "hidden" not in str(caught.value)
    good = {"EVERSTEP_SMTP_URL": "smtps://u:p@m", "EVERSTEP_SMTP_FROM": "e@example.org"}
    read = Settings.read(good)
    assert read.mail is not None and (read.mail.port, read.mail.user) == (465, "u")
