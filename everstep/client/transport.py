"""HTTP to the service: retries, and the one place where httpx's errors and problem answers become
ours."""

from __future__ import annotations

import email.utils
import json
import os
import ssl
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from everstep.client.address import Address
from everstep.client.timing import Timing
from everstep.errors import (
    AuthError,
    EverstepError,
    FieldError,
    ServiceError,
    Unavailable,
    UsageError,
    error_from_answer,
)
from everstep.wire import Page, Problem

M = TypeVar("M", bound=BaseModel)
Params = Mapping[str, str | int | float | bool | list[str] | None]

TRY_AGAIN = frozenset({429, 502, 503, 504})
NOT_TAKEN = frozenset({429, 503})
"""Answers that say that nothing was done: safe to try again whatever the request."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before a request left: likewise."""
MAX_RETRY_AFTER_S = 60.0
PAGE_SIZE = 200


@dataclass(frozen=True)
class _Meaning:
    kind: type[EverstepError]
    code: str
    words: str


_MEANINGS: tuple[tuple[type[Exception], _Meaning], ...] = (
    (httpx.ConnectTimeout, _Meaning(Unavailable, "unreachable", "no connection in time")),
    (httpx.TimeoutException, _Meaning(Unavailable, "timeout", "no answer in time")),
    (httpx.ConnectError, _Meaning(Unavailable, "unreachable", "no connection")),
    (httpx.ProxyError, _Meaning(Unavailable, "unreachable", "the proxy refused")),
    (httpx.UnsupportedProtocol, _Meaning(UsageError, "usage", "not a URL of a service")),
    (httpx.InvalidURL, _Meaning(UsageError, "usage", "not a URL of a service")),
    (httpx.TooManyRedirects, _Meaning(ServiceError, "service_error", "it redirects in a circle")),
    (
        httpx.DecodingError,
        _Meaning(ServiceError, "service_error", "its answer is not what its headers say"),
    ),
    (httpx.TransportError, _Meaning(Unavailable, "connection_lost", "the connection broke")),
    (httpx.StreamError, _Meaning(Unavailable, "connection_lost", "the connection broke")),
    (httpx.HTTPError, _Meaning(ServiceError, "service_error", "the request failed")),
)
"""What each error of httpx means; the first that fits, so special ones stand before general
ones."""


def translate(exc: Exception, url: str) -> EverstepError:
    """Our error for one of httpx's; says what to do where the service was not reached."""
    meaning = next(meaning for kind, meaning in _MEANINGS if isinstance(exc, kind))
    cause = str(exc) or type(exc).__name__
    message = f"{url}: {meaning.words} ({cause})"
    if meaning.code == "unreachable":
        message = (
            f"cannot reach the service at {message}; start it with `everstep serve`, or set "
            "EVERSTEP_URL to where it runs"
        )
    return meaning.kind(message, code=meaning.code)


@contextmanager
def _translated(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as exc:
        raise translate(exc, url) from exc


def _trusted_certificates() -> ssl.SSLContext:
    """Return a context with the certificates that SSL_CERT_FILE or SSL_CERT_DIR names, or else
    certifi's. Raises UsageError where they cannot be read."""
    try:
        return httpx.create_ssl_context()
    except OSError as exc:  # ssl.SSLError is one
        for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
            if path := os.environ.get(name):
                raise UsageError(
                    f"{name} {path!r} cannot be used ({exc}); name a PEM file with the service's "
                    "certificate authority, or unset it"
                ) from exc
        raise


class Transport:
    """Requests to one service. ``base`` is httpx's own transport and the seam for tests."""

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float,
        max_tries: int,
        timing: Timing,
        base: httpx.BaseTransport | None = None,
    ) -> None:
        from everstep import __version__

        self.address = address
        self.timing = timing
        self._max_tries = max_tries
        self._timeout_s = timeout_s
        headers = {"Accept": "application/json", "User-Agent": f"everstep/{__version__}"}
        if address.token is not None:
            headers["Authorization"] = f"Bearer {address.token}"
        with _translated(address.url):
            self._http = httpx.Client(
                base_url=address.url,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
                transport=base,
                # A proxy of the environment has no business between two processes of one machine;
                # the certificates that it names (SSL_CERT_FILE, SSL_CERT_DIR) count there, too.
                trust_env=not address.is_local,
                verify=_trusted_certificates() if address.url.startswith("https:") else True,
            )
        # Clients are often left to the garbage collector; their connections then close without a
        # warning about them.
        weakref.finalize(self, self._http.close)

    def close(self) -> None:
        self._http.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: Any = None,
        files: Mapping[str, tuple[str, bytes, str]] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        answers: frozenset[int] = frozenset(),
    ) -> httpx.Response:
        """The answer to one request, tried again where that cannot do harm.

        ``repeatable``: whether doing it twice is the same as once; by default true for GET. A
        request that is not is tried again only if it was surely not carried out. ``answers`` are
        statuses that are returned though they are errors.
        ``files`` are sent as a form: for each field a name, the bytes and their type.
        Raises the package's errors.
        """
        repeatable = method == "GET" if repeatable is None else repeatable
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        all_headers = {
            **(headers or {}),
            **({"Content-Type": "application/json"} if content is not None else {}),
        }
        tries = 0
        while True:
            tries += 1
            try:
                response = self._http.request(
                    method,
                    path,
                    params=_given(params),
                    content=content,
                    files=files,
                    headers=all_headers,
                )
            except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as exc:
                error = translate(exc, self.address.url)
                again = isinstance(error, Unavailable) and (repeatable or isinstance(exc, NOT_SENT))
                if tries >= self._max_tries or not again:
                    raise error from exc
                wait_s = self.timing.backoff_s(tries)
            else:
                if response.is_success or response.status_code in answers:
                    return response
                again = response.status_code in (TRY_AGAIN if repeatable else NOT_TAKEN)
                stated_s = retry_after_s(response.headers.get("Retry-After"))
                if tries >= self._max_tries or not again or (stated_s or 0) > MAX_RETRY_AFTER_S:
                    raise self.problem(response)
                wait_s = self.timing.backoff_s(tries) if stated_s is None else stated_s
            self.timing.sleep(wait_s)

    def get(self, path: str, model: type[M], **params: str | int | bool | list[str] | None) -> M:
        """One answer, parsed."""
        return self.parse(self.send("GET", path, params=params), model)

    def pages(self, path: str, item: type[M], params: Params | None = None) -> Iterator[M]:
        """Items of all pages of a list, each page fetched when it is needed."""
        cursor: str | None = None
        while True:
            response = self.send(
                "GET", path, params={"limit": PAGE_SIZE, **(params or {}), "cursor": cursor}
            )
            page = self.parse(response, Page[item])  # type: ignore[valid-type]
            yield from page.items
            if page.next_cursor is None:
                return
            if page.next_cursor == cursor:
                raise ServiceError(
                    f"GET {path}: the service gives the page {cursor!r} again and again"
                )
            cursor = page.next_cursor

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        silence_s: float | None = None,
    ) -> Iterator[httpx.Response]:
        """A streamed answer; not tried again here. ``silence_s``: how long it may say nothing
        before the connection counts as lost. Errors in the ``with`` block are translated too."""
        timeout = httpx.Timeout(
            self._timeout_s, connect=min(self._timeout_s, 5.0), read=silence_s or self._timeout_s
        )
        with (
            _translated(self.address.url),
            self._http.stream(
                "GET", path, params=_given(params), headers=dict(headers or {}), timeout=timeout
            ) as response,
        ):
            if not response.is_success:
                response.read()
                raise self.problem(response)
            yield response

    def parse(self, response: httpx.Response, model: type[M]) -> M:
        """Body as ``model``. Raises ServiceError where it is something else."""
        try:
            return model.model_validate_json(response.content)
        except ValidationError as exc:
            raise self._not_ours(
                response, str(exc.errors(include_url=False, include_input=False)[0]["msg"])
            ) from exc

    def problem(self, response: httpx.Response) -> EverstepError:
        """The error that an answer means."""
        status = response.status_code
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            if status in (429, 502, 503, 504):
                return error_from_answer(
                    status, None, f"{self.address.url} answered {status} {response.reason_phrase}"
                )
            return self._not_ours(response, f"status {status}")
        errors = [FieldError(fault.loc, fault.msg) for fault in problem.errors]
        error = error_from_answer(status, problem.code, problem.detail or problem.title, errors)
        if isinstance(error, AuthError) and status == 401:
            return AuthError(
                f"{error.message} ({self.address.token_source})", code=error.code, status=status
            )
        return error

    def _not_ours(self, response: httpx.Response, problem: str) -> ServiceError:
        request = f"{response.request.method} {response.request.url}"
        start = response.text[:120].replace("\n", " ").strip()
        return ServiceError(
            f"{request}: the answer is not Everstep's ({problem}); does EVERSTEP_URL name the "
            "service, and of this version? "
            f"It begins with {start!r}",
            status=response.status_code,
        )


def retry_after_s(value: str | None, now: float | None = None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or a date; None where it says
    nothing usable."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        at = email.utils.parsedate_to_datetime(value).timestamp()
    except ValueError:
        return None
    return max(0.0, at - (time.time() if now is None else now))


def _given(params: Params | None) -> dict[str, Any]:
    """Parameters without those that are None; booleans as JSON writes them."""
    return {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in (params or {}).items()
        if value is not None
    }
