"""HTTP to the service: retries, and the mapping of httpx errors and problem responses to our
errors.
"""

from __future__ import annotations

import email.utils
import json
import os
import random
import ssl
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from everstep.client.address import Address
from everstep.errors import (
    AuthError,
    EverstepError,
    FieldError,
    InvalidSpec,
    ServiceError,
    Unavailable,
    UsageError,
    error_from_answer,
)
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.wire import Page, Problem

M = TypeVar("M", bound=BaseModel)
Params = Mapping[str, str | int | float | bool | list[str] | None]

TRY_AGAIN = frozenset({429, 502, 503, 504})
NOT_TAKEN = frozenset({429, 503})
"""Statuses that say that the request was not carried out: any request may be retried."""
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before the request was sent: any request may be retried."""
MAX_RETRY_AFTER_S = 60.0
PAGE_SIZE = 200


@dataclass(frozen=True)
class _Meaning:
    kind: type[EverstepError]
    code: str
    words: str


_MEANINGS: tuple[tuple[type[Exception], _Meaning], ...] = (
    (httpx.ConnectTimeout, _Meaning(Unavailable, "unreachable", "the connection timed out")),
    (httpx.TimeoutException, _Meaning(Unavailable, "timeout", "the request timed out")),
    (httpx.ConnectError, _Meaning(Unavailable, "unreachable", "no connection")),
    (httpx.ProxyError, _Meaning(Unavailable, "unreachable", "the proxy refused the connection")),
    (httpx.UnsupportedProtocol, _Meaning(UsageError, "usage", "not a valid URL of a service")),
    (httpx.InvalidURL, _Meaning(UsageError, "usage", "not a valid URL of a service")),
    (httpx.TooManyRedirects, _Meaning(ServiceError, "service_error", "too many redirects")),
    (
        httpx.DecodingError,
        _Meaning(ServiceError, "service_error", "the response cannot be decoded"),
    ),
    (httpx.TransportError, _Meaning(Unavailable, "connection_lost", "the connection broke")),
    (httpx.StreamError, _Meaning(Unavailable, "connection_lost", "the connection broke")),
    (httpx.HTTPError, _Meaning(ServiceError, "service_error", "the request failed")),
)
"""Our error for each error of httpx. The first match counts, so specific ones come first."""


def translate(exc: Exception, url: str) -> EverstepError:
    """Return our error for an httpx error. If the service was not reached, the message says what to
    do."""
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


class Transport:
    """Sends requests to one service. ``base`` is httpx's own transport; tests replace it.
    ``make_http`` makes the client of httpx from its arguments."""

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float,
        max_tries: int,
        timing: Timing,
        base: httpx.BaseTransport | httpx.AsyncBaseTransport | None = None,
        make_http: Callable[..., Any] = httpx.Client,
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
            self._http: httpx.Client = make_http(
                base_url=address.url,
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
                transport=base,
                # Two processes on one machine do not talk through the environment's proxy; the
                # environment's certificates (SSL_CERT_FILE, SSL_CERT_DIR) apply there, too.
                trust_env=not address.is_local,
                verify=trusted_certificates() if address.url.startswith("https:") else True,
            )
        # Clients are often garbage-collected without close(): this avoids a ResourceWarning.
        weakref.finalize(self, self._http.close)

    def close(self) -> None:
        """Close the connections."""
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
        """Send a request, and retry it if that is safe.

        Args:
            files: sent as a form: for each field a name, the bytes and their type.
            repeatable: whether sending twice has the same effect as once; by default True for GET.
                Other requests are retried only if they were certainly not carried out.
            answers: error statuses that are returned, not raised.

        Raises this package's errors.
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
        """Send a GET request and return the parsed response."""
        return self.parse(self.send("GET", path, params=params), model)

    def post(
        self,
        path: str,
        model: type[M],
        body: Any = None,
        *,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = False,
    ) -> M:
        """Send a POST request as ``send``, and return the parsed response."""
        response = self.send(
            "POST", path, params=params, body=body, headers=headers, repeatable=repeatable
        )
        return self.parse(response, model)

    def pages(self, path: str, item: type[M], params: Params | None = None) -> Iterator[M]:
        """Yield the items of all pages of a list. Pages are fetched lazily."""
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
                    f"GET {path}: pagination does not advance (cursor {cursor!r} repeated)"
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
        """Open a streamed response. It is not retried here. Errors in the ``with`` block are
        translated too.

        Args:
            silence_s: longest time without data before the connection counts as lost.
        """
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
        """Return the body parsed as ``model``. Raise ServiceError if it does not parse."""
        try:
            return model.model_validate_json(response.content)
        except ValidationError as exc:
            raise self._not_ours(
                response, str(exc.errors(include_url=False, include_input=False)[0]["msg"])
            ) from exc

    def problem(self, response: httpx.Response) -> EverstepError:
        """Return the error for an error response."""
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
            f"{request}: the response is not from this version of Everstep ({problem}): check "
            f"EVERSTEP_URL and the service's version. The response begins with {start!r}",
            status=response.status_code,
        )


def retry_after_s(value: str | None, now: float | None = None) -> float | None:
    """Return the seconds in a Retry-After header, given as a number or a date; None if it is
    unusable."""
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
    """Return the parameters that are not None, with booleans as in JSON."""
    return {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in (params or {}).items()
        if value is not None
    }


# ---------------------------------------------------------------- json body

# Bodies of requests, checked before they are sent: JSON has no NaN, infinity or objects.


def idempotency_header(key: str | None) -> dict[str, str]:
    """Return the header with a key, or with one of its own. Raise InvalidSpec for a key that no
    header can carry."""
    if key is None:
        key = uuid.uuid4().hex
    if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        msg = f"must be 1 to 255 printable ASCII characters, not {key[:40]!r}; choose such a key"
        raise InvalidSpec((FieldError(("idempotency_key",), msg),))
    return {"Idempotency-Key": key}


def spec_body(spec: RunSpec | Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec as the body of a request; the service validates it. Raise InvalidSpec for
    values that JSON cannot represent."""
    if isinstance(spec, RunSpec):
        # the service puts the token's project where none is written
        unset = {"project"} - spec.model_fields_set
        return spec.model_dump(mode="json", exclude=unset)
    raw = dict(spec)
    try:
        return checked(raw, "spec")
    except InvalidSpec:
        parse_spec(raw)  # names the field if the spec itself is invalid
        raise


def checked(body: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the body. Raise InvalidSpec for values that JSON cannot represent."""
    try:
        json.dumps(body, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise InvalidSpec((), f"the {what} cannot be written as JSON: {exc}") from exc
    return body


# ---------------------------------------------------------------- certificates

# Which certificates a client trusts: those that the environment names, or else certifi's.


def trusted_certificates() -> ssl.SSLContext:
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


# ---------------------------------------------------------------- timing

# The client's clock, as one object that tests replace.


@dataclass(frozen=True)
class Timing:
    """A clock, a sleep function and a source of jitter."""

    now: Callable[[], float] = time.monotonic
    """Return seconds since some fixed time."""
    sleep: Callable[[float], None] = time.sleep
    """Sleep for so many seconds."""
    jitter: Callable[[], float] = random.random
    """Return a number in [0, 1), which spreads the retries of many clients."""

    def backoff_s(self, failures: int, first_s: float = 0.2, most_s: float = 5.0) -> float:
        """Return the seconds to wait after the n-th consecutive failure: exponential, capped, with
        jitter between half and all of it."""
        whole = min(most_s, first_s * 2.0 ** min(failures - 1, 30))
        return whole * (0.5 + 0.5 * self.jitter())
