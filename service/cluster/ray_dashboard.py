"""Ray's dashboard for people: pass requests of a browser on with the cluster's token, as streams
with limits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Final, Self

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from service.cluster.ray_errors import RayRefused, RayUnavailable
from service.cluster.ray_jobs import CONNECT_TIMEOUT_S, RayEndpoint

MOST_REQUESTS: Final = 64
"""Requests that are passed on at the same time, over all callers."""
MAX_BYTES: Final = 256 * 2**20
"""Largest response. Ray's own log files rotate at half of that."""
LONGEST_S: Final = 600.0
"""Longest duration of one response, such as a log that is followed."""
READ_TIMEOUT_S: Final = 30.0
"""Longest wait for the next bytes."""
PROFILE_TIMEOUT_S: Final = 300.0
"""The same for a profile, which begins to answer once it is finished."""
HEARTBEAT_S: Final = 2.0
"""A WebSocket without messages yields an empty one this often."""
_MAX_MESSAGE_BYTES: Final = 16 * 2**20


class RayDashboard:
    """Passes requests on to the dashboard of one Ray cluster.

    Args:
        endpoint: Called before each request, as for ``RayJobs``.
    """

    def __init__(self, endpoint: Callable[[], RayEndpoint | None]) -> None:
        self._endpoint = endpoint
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=5.0),
            limits=httpx.Limits(max_connections=MOST_REQUESTS, max_keepalive_connections=8),
            trust_env=False,
        )
        self._tails = asyncio.Semaphore(MOST_REQUESTS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Ask for Ray's version, which needs the token. Raises RayUnavailable, RayRefused."""
        response = await self.open("GET", "api/version", "", {})
        await response.aclose()

    async def open(
        self,
        method: str,
        path: str,
        query: str,
        headers: Mapping[str, str],
        timeout_s: float = READ_TIMEOUT_S,
    ) -> httpx.Response:
        """Send a request without a body; return the response with its body unread. Close it.

        Args:
            method: GET or HEAD.
            path: Path without a leading slash. The caller has checked it.
            query: Query as it was received.
            headers: Headers to pass on. The token is added.
            timeout_s: Longest wait for the next bytes.

        Raises RayUnavailable, also if the response is larger than MAX_BYTES, and RayRefused.
        """
        endpoint = self._now()
        request = self._client.build_request(
            method,
            f"{endpoint.url}/{path}" + (f"?{query}" if query else ""),
            headers=[*headers.items(), *_token_header(endpoint).items()],
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=5.0),
        )
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise _away(endpoint, exc) from exc
        problem: RayRefused | RayUnavailable | None = None
        length = response.headers.get("content-length", "")
        if response.status_code == httpx.codes.UNAUTHORIZED or (
            response.status_code == httpx.codes.FORBIDDEN and path == "api/version"
        ):
            problem = _refused(endpoint)
        elif length.isdigit() and int(length) > MAX_BYTES:
            problem = RayUnavailable(
                f"Ray's answer has {length} bytes, more than {MAX_BYTES}; ask for fewer lines"
            )
        if problem is not None:
            await response.aclose()
            raise problem
        return response

    async def follow(self, path: str, query: str) -> AsyncGenerator[bytes]:
        """Yield the messages of a WebSocket, and an empty one every HEARTBEAT_S without a message.

        Ends with the WebSocket, at the latest after LONGEST_S. Raises RayUnavailable, RayRefused.
        """
        endpoint = self._now()
        url = f"ws{endpoint.url.removeprefix('http')}/{path}" + (f"?{query}" if query else "")
        if self._tails.locked():
            raise RayUnavailable(f"{MOST_REQUESTS} logs are followed already; try again later")
        async with self._tails, _connected(endpoint, url) as socket:
            ends_at = asyncio.get_running_loop().time() + LONGEST_S
            while asyncio.get_running_loop().time() < ends_at:
                try:
                    message = await asyncio.wait_for(socket.recv(), HEARTBEAT_S)
                except TimeoutError:
                    yield b""
                except ConnectionClosed:
                    return
                else:
                    yield message.encode() if isinstance(message, str) else message

    def _now(self) -> RayEndpoint:
        endpoint = self._endpoint()
        if endpoint is None:
            raise RayUnavailable("no Ray cluster is running now")
        return endpoint


async def limited(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield a response's bytes as they come, still compressed.

    Raises RayUnavailable beyond MAX_BYTES or LONGEST_S, so that the connection ends unfinished.
    """
    received, chunks = 0, aiter(response.aiter_raw())
    ends_at = asyncio.get_running_loop().time() + LONGEST_S
    while True:
        try:
            async with asyncio.timeout_at(ends_at):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except (TimeoutError, httpx.HTTPError) as exc:
            raise RayUnavailable(f"Ray's answer broke off: {exc or type(exc).__name__}") from exc
        received += len(chunk)
        if received > MAX_BYTES:
            raise RayUnavailable(f"Ray's answer has more than {MAX_BYTES} bytes")
        yield chunk


@contextlib.asynccontextmanager
async def _connected(endpoint: RayEndpoint, url: str) -> AsyncIterator[ClientConnection]:
    """Connect to a WebSocket of Ray. Raises RayUnavailable, RayRefused."""
    try:
        socket = await connect(
            url,
            additional_headers=_token_header(endpoint),
            open_timeout=READ_TIMEOUT_S,
            max_size=_MAX_MESSAGE_BYTES,
            proxy=None,
        )
    except InvalidStatus as exc:
        if exc.response.status_code in (401, 403):
            raise _refused(endpoint) from exc
        raise RayUnavailable(f"Ray answered {exc.response.status_code}") from exc
    except (OSError, TimeoutError, WebSocketException) as exc:
        raise _away(endpoint, exc) from exc
    async with socket:
        yield socket


def _token_header(endpoint: RayEndpoint) -> dict[str, str]:
    return {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}


def _away(endpoint: RayEndpoint, exc: Exception) -> RayUnavailable:
    return RayUnavailable(
        f"Ray's dashboard at {endpoint.url} does not answer: {exc or type(exc).__name__}"
    )


def _refused(endpoint: RayEndpoint) -> RayRefused:
    return RayRefused(
        f"Ray's dashboard at {endpoint.url} refuses the token; set RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH"
    )
