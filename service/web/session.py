"""Who looks at a page: the log-in cookie, and the proof that a form came from one of our pages.

The cookie names a session in the database, so that it is worth nothing elsewhere, a service that
starts anew keeps its log-ins, and they end with the token that they were made with. Scripts cannot
read it (HttpOnly), other sites' forms and requests do not carry it (SameSite=Lax), and over TLS no
other host or plain connection can set it (``__Host-``). Every form carries a salted MAC under the
cookie besides, and must come from this origin where the browser tells.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, Final
from urllib.parse import parse_qsl, urlsplit

from fastapi import Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials

from service.api.auth import Principal, admitted, controlled_run, principal, visible_run
from service.api.context import ApiContext, Context
from service.api.problems import ProblemError
from service.api.spec_body import MAX_BODY_BYTES
from service.db.sessions import LASTS_S
from service.db.tokens import sha256_of
from service.model.run_rows import RunRow

COOKIE: Final = "everstep_session"
"""Name of the cookie on a plain connection, as to this machine. It held a token once."""
SECURE_COOKIE: Final = f"__Host-{COOKIE}"
CSRF_FIELD: Final = "csrf"
_SALT_BYTES: Final = 16


def cookie_of(request: Request) -> str:
    """Return the session's secret as the browser sent it; empty where it has none."""
    return request.cookies.get(SECURE_COOKIE if _is_secure(request) else COOKIE, "")


def _is_secure(request: Request) -> bool:
    return request.url.scheme == "https"


async def web_caller(request: Request, context: Context) -> Principal:
    """Whose browser this is. Raises 401 where nobody is logged in; pages answer that by the log-in
    page."""
    secret = cookie_of(request)
    found = await context.database_look(context.sessions.find, secret) if secret else None
    caller = admitted(request, context, found, sha256_of(secret))
    request.state.caller = caller
    return caller


WebCaller = Annotated[Principal, Depends(web_caller)]


async def web_run(run_id: str, context: Context, caller: WebCaller) -> RunRow:
    """The run of the path. One of another project does not exist for this caller: 404."""
    return await visible_run(run_id, context, caller)


WebRun = Annotated[RunRow, Depends(web_run)]


async def web_controlled_run(run: WebRun, caller: WebCaller) -> RunRow:
    """The run of the path, for an action on it. Raises 403 for viewers."""
    return await controlled_run(run, caller)


ControlledWebRun = Annotated[RunRow, Depends(web_controlled_run)]


async def log_in(request: Request, response: Response, context: ApiContext, token: str) -> None:
    """Begin a session of a token and set its cookie. Raises 401 where the token is not valid."""
    caller = await principal(
        request, context, HTTPAuthorizationCredentials(scheme="Bearer", credentials=token)
    )
    secret = await context.database_call(context.sessions.begin, caller.token_id)
    secure = _is_secure(request)
    if secure:
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="lax")
    name = SECURE_COOKIE if secure else COOKIE
    response.set_cookie(
        name, secret, max_age=int(LASTS_S), path="/", secure=secure, httponly=True, samesite="lax"
    )


def log_out_of_browser(request: Request, response: Response) -> None:
    """Delete the cookie, and the one of older versions, which held a token."""
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="lax")
    if _is_secure(request):
        response.delete_cookie(SECURE_COOKIE, path="/", secure=True, httponly=True, samesite="lax")


def csrf_token(secret: str) -> str:
    """A proof for one form: a new salt each time, so that compression of pages gives nothing of it
    away."""
    salt = secrets.token_hex(_SALT_BYTES)
    return f"{salt}.{_mac(secret, salt)}"


def _mac(secret: str, salt: str) -> str:
    return hmac.new(secret.encode(), f"everstep-form:{salt}".encode(), hashlib.sha256).hexdigest()


def is_csrf_token(secret: str, token: str) -> bool:
    """Whether ``token`` was made for a form of whoever is logged in with the cookie ``secret``."""
    salt, _, mac = token.partition(".")
    return token.isascii() and hmac.compare_digest(mac, _mac(secret, salt))


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form from this origin. Raises 403 for one from elsewhere, 413 for one that is
    too large."""
    _check_origin(request)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ProblemError(
                413, "body_too_large", f"The form is larger than {MAX_BODY_BYTES} bytes."
            )
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError as exc:
        raise ProblemError(
            400, "malformed_form", "The form cannot be read; reload the page and send it again."
        ) from exc


def _host_of(origin: str) -> str | None:
    """Return the host and port of an origin; None for what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # as for "http://["
        return None


def _check_origin(request: Request) -> None:
    """Browsers tell where a form is from; what tells nothing is no browser and has no cookie of
    ours to misuse."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    foreign = site is not None and site not in ("same-origin", "none")
    if origin is not None and _host_of(origin) != request.headers.get("host", ""):
        foreign = True
    if foreign:
        raise ProblemError(
            403, "foreign_origin", "This form came from another site; nothing was done."
        )


async def checked_form(request: Request, _caller: WebCaller) -> dict[str, str]:
    """The fields of a form that one of our pages made for this log-in. Raises 403."""
    fields = await read_form(request)
    if not is_csrf_token(cookie_of(request), fields.pop(CSRF_FIELD, "")):
        raise ProblemError(
            403,
            "stale_form",
            "This form was made for another log-in; nothing was done. Reload the page.",
        )
    return fields


CheckedForm = Annotated[dict[str, str], Depends(checked_form)]


def local_path(target: str | None) -> str:
    """``target`` where it is a page of this service, else the first page: a link must not lead a
    log-in elsewhere."""
    if (
        not target
        or not target.startswith("/")
        or target.startswith("//")
        or "\\" in target
        or not target.isprintable()
    ):
        return "/runs"
    return target
