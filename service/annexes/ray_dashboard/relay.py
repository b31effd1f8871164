"""Ray's dashboard for people: pass requests of a browser on with the cluster's token, as streams
with limits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from enum import StrEnum
from typing import Final

import httpx

from service.cluster.ray_jobs import (
    CONNECT_TIMEOUT_S,
    RayClient,
    RayEndpoint,
    RayRefused,
    RayUnavailable,
)

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


class RayDashboard(RayClient):
    """Passes requests on to the dashboard of one Ray cluster."""

    def __init__(self, endpoint: Callable[[], RayEndpoint | None]) -> None:
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=5.0),
            limits=httpx.Limits(max_connections=MOST_REQUESTS, max_keepalive_connections=8),
            trust_env=False,
        )
        super().__init__(endpoint, client)

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
            headers=[*headers.items(), *endpoint.headers.items()],
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=5.0),
        )
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise endpoint.away(exc) from exc
        problem: RayRefused | RayUnavailable | None = None
        length = response.headers.get("content-length", "")
        if response.status_code == httpx.codes.UNAUTHORIZED or (
            response.status_code == httpx.codes.FORBIDDEN and path == "api/version"
        ):
            problem = endpoint.refused()
        elif length.isdigit() and int(length) > MAX_BYTES:
            problem = RayUnavailable(
                f"Ray's answer has {length} bytes, more than {MAX_BYTES}; ask for fewer lines"
            )
        if problem is not None:
            await response.aclose()
            raise problem
        return response


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


# ---------------------------------------------------------------- ray routes

# Which requests to Ray's dashboard are passed on, and what they do there.
#
# Ray's dashboard has no roles: whoever has its token may stop jobs, and some GET requests act, for
# example by attaching a profiler to a process. So a request is passed on only if it is listed here.


class RayAccess(StrEnum):
    """What a GET request to Ray's dashboard does."""

    READ = "read"
    PROFILE = "profile"
    """It attaches a profiler to a process on a node, which slows that process down."""


_ID: Final = r"[A-Za-z0-9_-]{1,200}"
_READS: Final = (
    r"api/cluster_status",
    r"api/data/datasets/ID",
    r"api/gcs_healthz",
    r"api/grafana_health",
    r"api/jobs/",
    r"api/jobs/ID",
    r"api/jobs/ID/logs",
    r"api/profiling_enabled",
    r"api/prometheus_health",
    r"api/ray/version",
    r"api/serve/applications/",
    r"api/train/v2/runs",
    r"api/train/v2/runs/v1",
    r"api/v0/(actors|jobs|nodes|objects|placement_groups|runtime_envs|tasks|workers)",
    r"api/v0/(actors|objects|tasks)/summarize",
    r"api/v0/(cluster_events|cluster_metadata|platform_events|runtime_env_redaction)",
    r"api/v0/logs",
    r"api/v0/logs/(file|stream)",
    r"api/v0/tasks/timeline",
    r"api/version",
    r"events",
    r"logical/actors",
    r"logical/actors/ID",
    r"nodes",
    r"nodes/ID",
    r"timezone",
    r"usage_stats_enabled",
)
_PROFILES: Final = (
    r"memory_profile",
    r"task/(cpu_profile|traceback)",
    r"worker/(cpu_profile|gpu_profile|jax_profile|traceback)",
)


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(patterns).replace("ID", _ID))


_TABLE: Final = {RayAccess.READ: _any_of(_READS), RayAccess.PROFILE: _any_of(_PROFILES)}


def access_to(path: str) -> RayAccess | None:
    """Return what GET of this path does; None for a path that is not passed on.

    >>> access_to("api/jobs/raysubmit_1"), access_to("worker/traceback"), access_to("test/dump")
    (<RayAccess.READ: 'read'>, <RayAccess.PROFILE: 'profile'>, None)
    """
    return next((access for access, known in _TABLE.items() if known.fullmatch(path)), None)
