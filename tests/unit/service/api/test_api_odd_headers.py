"""Headers, queries and paths that no client sends by itself: answered with 4xx at most, whatever
they hold."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from service.api.callers import RateLimit
from service.submission_rules.allowed import StorageRoots
from tests.support.api_service import ApiService, spec

HEADERS = (
    "origin",
    "host",
    "authorization",
    "cookie",
    "range",
    "if-range",
    "if-none-match",
    "accept",
    "accept-encoding",
    "content-type",
    "content-length",
    "last-event-id",
    "idempotency-key",
    "sec-fetch-site",
    "x-forwarded-for",
    "x-forwarded-proto",
    "x-forwarded-host",
    "forwarded",
    "hx-request",
    "hx-target",
    "referer",
    "expect",
    "transfer-encoding",
)
ODD = (
    b"http://[",
    b"[",
    b"]",
    b"http://]",
    b"http://[::1",
    b"https://\xe2\x84\x80/",
    b"//",
    b"a:b:c",
    b"http://a:99999999/",
    b"",
    b"\xff\xfe",
    b"\x00",
    b"null",
    b",",
    b";=",
    b"=;",
    b"bytes=-",
    b"bytes=9-1",
    b"bytes=" + b"9" * 300 + b"-",
    b"Bearer",
    b"Bearer ",
    b"Bearer \xe9",
    b"Basic ====",
    b"everstep_session=\xff",
    b'a="\\',
    b"application/json; charset=\xff",
    b"multipart/form-data",
    b"multipart/form-data; boundary=",
    b"text/event-stream",
    b"-1",
    b"1e9",
    b"9" * 5000,
    b"%00",
    b"\t",
)
STREAMS = (("accept", b"text/event-stream"),)


async def status_of(
    app: Any,
    method: str,
    path: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes = b"",
) -> int:
    """Return the status of one request that goes to the application as it is, past any client's and
    server's own checks."""
    status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    scope = {
        **{
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
        },
        **{
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "server": ("127.0.0.1", 80),
        },
        "client": ("127.0.0.1", 1234),
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and not status.done():
            status.set_result(message["status"])

    call = asyncio.ensure_future(app(scope, receive, send))
    await asyncio.wait({call, status}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    if not status.done():
        call.cancel()
        raise AssertionError(f"{method} {path} {headers}: no answer ({call})")
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await call
    return status.result()


def app_of(api: ApiService) -> Any:
    return api._server.config.loaded_app


def requests(run_id: str) -> list[tuple[str, str]]:
    """Methods and paths with one of each kind."""
    of_run = (f"/v1/runs/{run_id}/{rest}" for rest in ("events", "logs", "checkpoints/1/archive"))
    gets = ("/v1", "/v1/nodes", "/v1/runs", f"/v1/runs/{run_id}", *of_run, "/metrics", "/healthz")
    pages = ("/", "/login", "/static/app.css", f"/runs/{run_id}", f"/runs/{run_id}/fork")
    posts = (
        "/v1/runs",
        "/v1/code",
        f"/v1/runs/{run_id}/cancel",
        "/login",
        "/logout",
        f"/runs/{run_id}/cancel",
    )
    return [*(("GET", path) for path in (*gets, *pages)), *(("POST", path) for path in posts)]


async def test_random_headers_queries_and_paths(api: ApiService) -> None:
    run_id, app = await api.create(), app_of(api)
    api.door.rate_limit = RateLimit(1e9)
    token = (b"authorization", api.http.headers["authorization"].encode())
    header = st.tuples(
        st.sampled_from(HEADERS), st.one_of(st.sampled_from(ODD), st.binary(max_size=40))
    )
    loop = asyncio.get_running_loop()

    # ``Origin: http://[`` was a 500, without any token
    @example(("POST", "/login"), [("origin", b"http://[")], b"token=x", False, "")
    @settings(max_examples=150, deadline=None)
    @given(
        st.sampled_from(requests(run_id)),
        st.lists(header, max_size=4),
        st.binary(max_size=30),
        st.booleans(),
        st.text(max_size=9),
    )
    def send(
        request: tuple[str, str],
        headers: list[tuple[str, bytes]],
        query: bytes,
        known: bool,
        odd: str,
    ) -> None:
        method, path = request
        sent = [(name.encode(), value) for name, value in headers if (name, value) not in STREAMS]
        sent += [token] if known else []
        for each in (path, f"{path}/{odd}", path.replace(run_id, odd or "x")):
            asked = asyncio.run_coroutine_threadsafe(
                status_of(app, method, each, query, sent, query), loop
            )
            assert asked.result(60) < 500, (method, each, sent, query)

    await asyncio.to_thread(send)


@pytest.mark.parametrize("place", ["s3://[", "http://]/x", "s3://a[b/c"])
def test_a_place_that_is_no_uri_is_a_fault_of_the_spec(place: str) -> None:
    given = spec()
    given["task"]["data"] = {"name": "image_folder", "args": {"root": place}}
    with contextlib.suppress(InvalidSpec):
        found = parse_spec(given)
        with pytest.raises(InvalidSpec, match="none of the roots"):
            StorageRoots(["/data"]).check_data(found)
