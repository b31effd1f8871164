"""The service's only way to Ray: HTTP to the dashboard's Jobs API and state API, with the cluster's
bearer token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from service.cluster.ray_answers import (
    Job,
    RayNode,
    job_of,
    jobs_of,
    node_of,
    used_of,
    with_summary,
)
from service.cluster.ray_errors import JobNotFound, JobRejected, RayRefused, RayUnavailable

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
MOST_SUBMITS = 16
"""Submissions that run at the same time."""
READ_TIMEOUT_S = 10.0
# Ray answers a submission only after an agent has taken it, which is slow on a new cluster.
SUBMIT_TIMEOUT_S = 30.0
MAX_NODES = 10_000


@dataclass(frozen=True)
class RayEndpoint:
    """Address of a dashboard, and the token for it."""

    url: str
    """For example ``http://127.0.0.1:8265``."""
    token: str | None
    """Bearer token; None sends none."""


class RayJobs:
    """A client of one Ray cluster's dashboard.

    Args:
        endpoint: Called before each request, since an embedded cluster that restarts has another
            address. It returns None while there is no cluster.
        before_submit: Called before each submission; None for nothing.
    """

    def __init__(
        self,
        endpoint: Callable[[], RayEndpoint | None],
        before_submit: Callable[[], None] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._before_submit = before_submit
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S), trust_env=False
        )
        # A thousand runs may start at once, and the client's pool walks all waiting requests
        # whenever one begins or ends.
        self._submits = asyncio.Semaphore(MOST_SUBMITS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    @property
    def url(self) -> str | None:
        """Base URL of the dashboard, or None while there is no cluster."""
        endpoint = self._endpoint()
        return endpoint.url if endpoint else None

    async def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> str:
        """Submit a job. Submitting the same id again returns the job that exists.

        The request has no runtime_env and no entrypoint resources: either would keep the run's
        actors out of Ray's warm processes.

        Returns:
            The submission id.

        Raises:
            RayUnavailable: The job may or may not have been submitted; submit it again.
            JobRejected: Ray will never take it.
        """
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "metadata": dict(metadata),
        }
        if self._before_submit is not None:
            self._before_submit()
        async with self._submits:
            response = await self._send(
                "POST", "/api/jobs/", json=body, read_timeout_s=SUBMIT_TIMEOUT_S
            )
        if response.is_success:
            return submission_id
        if "already exists" in response.text:
            # Ray refuses a known id atomically, but answers with an internal error.
            return (await self.job(submission_id)).submission_id
        if response.status_code == httpx.codes.BAD_REQUEST:
            raise JobRejected(f"Ray refuses job {submission_id}: {_last_line(response)}")
        raise _unavailable(response)

    async def job(self, submission_id: str) -> Job:
        """Return a job. Raises JobNotFound, RayUnavailable."""
        response = await self._send("GET", f"/api/jobs/{submission_id}")
        return _read(_found(response, submission_id), job_of)

    async def stop(self, submission_id: str) -> None:
        """Stop a job's driver, if it has not ended. Raises JobNotFound, RayUnavailable."""
        _found(await self._send("POST", f"/api/jobs/{submission_id}/stop"), submission_id)

    async def jobs(self) -> list[Job]:
        """Return every submitted job that Ray remembers."""
        response = await self._send("GET", "/api/jobs/")
        return _read(_successful(response), jobs_of)

    async def version(self) -> str:
        """Return Ray's version, for example ``2.60.0``."""
        return _read(
            _successful(await self._send("GET", "/api/version")),
            lambda answer: str(answer["ray_version"]),
        )

    async def live_nodes(self) -> list[RayNode]:
        """Return the live nodes by one cheap request. Draining nodes count as alive, and hostnames
        are addresses."""
        return await self._nodes(
            {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
        )

    async def nodes(self) -> list[RayNode]:
        """Return every node that the cluster remembers, also dead ones, with hostname and drain."""
        nodes = await self._nodes({})
        response = _successful(await self._send("GET", "/nodes", params={"view": "summary"}))

        def with_summaries(answer: Any) -> list[RayNode]:
            by_id = {raw.get("raylet", {}).get("nodeId"): raw for raw in answer["data"]["summary"]}
            used = answer["data"].get("nodeLogicalResources") or {}
            return [
                replace(
                    with_summary(node, by_id.get(node.node_id)),
                    used=used_of(used.get(node.node_id)),
                )
                for node in nodes
            ]

        return _read(response, with_summaries)

    async def is_dead(self, node_id: str) -> bool:
        """Return whether Ray calls this node dead, which is final. False for an unknown node."""
        found = await self._nodes(
            {"filter_keys": "node_id", "filter_predicates": "=", "filter_values": node_id}
        )
        return any(node.state == "DEAD" for node in found if node.node_id == node_id)

    async def _nodes(self, filters: Mapping[str, str]) -> list[RayNode]:
        params = {"limit": str(MAX_NODES), "detail": "1", **filters}
        response = _successful(await self._send("GET", "/api/v0/nodes", params=params))
        return _read(
            response, lambda answer: [node_of(raw) for raw in answer["data"]["result"]["result"]]
        )

    async def _send(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> httpx.Response:
        """Send one request. Only this function turns httpx's errors into ours."""
        endpoint = self._endpoint()
        if endpoint is None:
            raise RayUnavailable("no Ray cluster is running now")
        headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
        try:
            response = await self._client.request(
                method,
                f"{endpoint.url}{path}",
                json=json,
                params=params,
                headers=headers,
                timeout=httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S),
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise RayUnavailable(
                f"Ray's dashboard at {endpoint.url} does not answer: {exc or type(exc).__name__}"
            ) from exc
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise RayRefused(
                f"Ray's dashboard at {endpoint.url} refuses the token; set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH"
            )
        return response


def _found(response: httpx.Response, submission_id: str) -> httpx.Response:
    # The text is Ray's; a proxy's 404 does not mean that the job is unknown.
    if response.status_code == httpx.codes.NOT_FOUND and "does not exist" in response.text:
        raise JobNotFound(f"Ray knows no job {submission_id}")
    return _successful(response)


def _read(response: httpx.Response, parse: Callable[[Any], T]) -> T:
    """Parse an answer. Raises RayUnavailable for one that is not Ray's, such as a proxy's page."""
    try:
        return parse(response.json())
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise RayUnavailable(
            f"the answer {response.status_code} to {response.request.url.path} is not Ray's "
            f"({type(exc).__name__}: {exc}): {response.text[:100]!r}"
        ) from exc


def _successful(response: httpx.Response) -> httpx.Response:
    if not response.is_success:
        raise _unavailable(response)
    return response


def _unavailable(response: httpx.Response) -> RayUnavailable:
    return RayUnavailable(
        f"Ray answered {response.status_code} to {response.request.url.path}: "
        f"{_last_line(response)}"
    )


def _last_line(response: httpx.Response) -> str:
    """Return the last line of an answer: of a traceback, the one with the error."""
    lines = [line.strip() for line in response.text.splitlines() if len(line.strip()) > 1]
    return lines[-1][:300] if lines else response.reason_phrase
