"""Hand mail in at the operator's server: encrypted unless the operator says otherwise."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage

from service.alerts.http_post import TIMEOUT_S, Outcome
from service.model.mail_server import MailServer


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
