"""Browser sessions: the log-in cookie, and the CSRF protection of forms.

The cookie names a session in the database. So it is useless elsewhere, survives a restart of the
service, and ends with its token. Scripts cannot read it (HttpOnly), other sites' forms and requests
do not send it (SameSite=Lax), and over TLS no other host or plain connection can set it
(``__Host-``). In addition, every form carries a salted MAC keyed by the cookie, and must come from
this origin if the browser sends it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, Final
from urllib.parse import parse_qsl, urlsplit

from fastapi import Depends, Request, Response

from service.api.auth import controlled_run, visible_run
from service.api.blocking import db_write
from service.api.callers import Door, Principal
from service.api.dependencies import Runs
from service.api.problems import ApiProblem
from service.db.tokens import LASTS_S, SessionStore
from service.model.run_rows import RunRow
from service.parts import parts_of

COOKIE: Final = "everstep_session"
"""Name of the cookie on a plain connection, as on this machine."""
SECURE_COOKIE: Final = f"__Host-{COOKIE}"
CSRF_FIELD: Final = "csrf"
_SALT_BYTES: Final = 16


def cookie_of(request: Request) -> str:
    """Return the session's secret from the browser; empty if there is none."""
    return request.cookies.get(SECURE_COOKIE if is_secure(request) else COOKIE, "")


def is_secure(request: Request) -> bool:
    """Return whether the browser's connection is encrypted."""
    return request.url.scheme == "https"


async def web_caller(request: Request) -> Principal:
    """Return who is logged in. Raises 401 if nobody is; pages then redirect to the log-in page."""
    caller = await parts_of(request)[Door].by_session(request, cookie_of(request))
    request.state.caller = caller
    return caller


WebCaller = Annotated[Principal, Depends(web_caller)]


async def web_run(run_id: str, runs: Runs, caller: WebCaller) -> RunRow:
    """Return the run in the path. Runs of other projects do not exist for this caller: 404."""
    return await visible_run(run_id, runs, caller)


WebRun = Annotated[RunRow, Depends(web_run)]


async def web_controlled_run(run: WebRun, caller: WebCaller) -> RunRow:
    """Return the run in the path, for an action on it. Raises 403 for viewers."""
    return await controlled_run(run, caller)


ControlledWebRun = Annotated[RunRow, Depends(web_controlled_run)]


async def log_in(
    request: Request, response: Response, door: Door, sessions: SessionStore, token: str
) -> None:
    """Start a session for a token and set its cookie. Raises 401 if the token is not valid."""
    caller = await door.by_token(request, token)
    await begin_session(request, response, sessions, caller.token_id)


async def begin_session(
    request: Request,
    response: Response,
    sessions: SessionStore,
    token_id: str,
    lasts_s: float = LASTS_S,
) -> None:
    """Start a session for a token that is known to be valid, and set its cookie. The browser's
    earlier session ends."""
    earlier = cookie_of(request)
    if earlier:
        await db_write(sessions.end, earlier)
    secret = await db_write(
        sessions.begin,
        token_id,
        lasts_s,
        request.client.host if request.client else None,
        request.headers.get("user-agent"),
    )
    secure = is_secure(request)
    if secure:
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="lax")
    name = SECURE_COOKIE if secure else COOKIE
    response.set_cookie(
        name, secret, max_age=int(lasts_s), path="/", secure=secure, httponly=True, samesite="lax"
    )


def log_out_of_browser(request: Request, response: Response) -> None:
    """Delete the cookie, and that of a plain connection."""
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="lax")
    if is_secure(request):
        response.delete_cookie(SECURE_COOKIE, path="/", secure=True, httponly=True, samesite="lax")


def csrf_token(secret: str) -> str:
    """Return a token for one form. A new salt each time keeps page compression from leaking it."""
    salt = secrets.token_hex(_SALT_BYTES)
    return f"{salt}.{_mac(secret, salt)}"


def _mac(secret: str, salt: str) -> str:
    return hmac.new(secret.encode(), f"everstep-form:{salt}".encode(), hashlib.sha256).hexdigest()


def is_csrf_token(secret: str, token: str) -> bool:
    """Return whether ``token`` was made for a form of the session ``secret``."""
    salt, _, mac = token.partition(".")
    return token.isascii() and hmac.compare_digest(mac, _mac(secret, salt))


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, as ``read_fields``; of a repeated one the last."""
    return dict(await read_fields(request))


async def read_fields(request: Request) -> list[tuple[str, str]]:
    """Return the fields of a form from this origin. Raises 403 for another origin."""
    _check_origin(request)
    try:
        return parse_qsl(
            (await request.body()).decode(), keep_blank_values=True, max_num_fields=100
        )
    except ValueError as exc:
        raise ApiProblem(
            400, "malformed_form", "The form cannot be read; reload the page and send it again."
        ) from exc


def host_of(origin: str) -> str | None:
    """Return the host and port of an origin or URL; None if it is invalid."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # as for "http://["
        return None


def _check_origin(request: Request) -> None:
    """Raise 403 for a form from another origin. Browsers send the origin; other clients have no
    session cookie to misuse."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    foreign = site is not None and site not in ("same-origin", "none")
    if origin is not None and host_of(origin) != request.headers.get("host", ""):
        foreign = True
    if foreign:
        raise ApiProblem(
            403,
            "foreign_origin",
            "This form came from another site; nothing was done. Open the page here and try again.",
        )


async def checked_form(request: Request, caller: WebCaller) -> dict[str, str]:
    """Return the fields of a form that one of our pages made for this session. Raises 403."""
    return dict(await checked_fields(request, caller))


async def checked_fields(request: Request, _caller: WebCaller) -> list[tuple[str, str]]:
    """Return the fields as ``checked_form``, repeated ones too. Raises 403."""
    fields = await read_fields(request)
    if not is_csrf_token(cookie_of(request), dict(fields).get(CSRF_FIELD, "")):
        raise ApiProblem(
            403,
            "stale_form",
            "This form belongs to another session; nothing was done. Reload the page.",
        )
    return [(name, value) for name, value in fields if name != CSRF_FIELD]


CheckedFields = Annotated[list[tuple[str, str]], Depends(checked_fields)]
CheckedForm = Annotated[dict[str, str], Depends(checked_form)]


def local_path(target: str | None) -> str:
    """Return ``target`` if it is a page of this service, else the first page: a link must not
    redirect a log-in elsewhere."""
    if (
        not target
        or not target.startswith("/")
        or target.startswith("//")
        or "\\" in target
        or not target.isprintable()
    ):
        return "/runs"
    return target
