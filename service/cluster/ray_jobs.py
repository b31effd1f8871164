"""The service's only way to Ray: HTTP to the dashboard's Jobs API and state API, with the cluster's
bearer token.

RayError
├── RayUnavailable   not reachable, too slow, or failed by itself; the same call may succeed later
│   └── RayRefused   the token is missing or wrong
├── JobNotFound      Ray knows no job of that id
└── JobRejected      Ray will never take this submission as it is
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import httpx

from storage.cluster.identity import EXIT_STORAGE, STORAGE_WORDS

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
MOST_SUBMITS = 16
"""So many jobs are submitted at a time."""
READ_TIMEOUT_S = 10.0
# Ray answers a submission only once an agent has taken it; on a cluster that has just started that
# takes a moment.
SUBMIT_TIMEOUT_S = 30.0
MAX_NODES = 10_000

NodeState = Literal["ALIVE", "DRAINING", "DEAD"]


class RayError(Exception):
    """Base of this module's errors."""


class RayUnavailable(RayError):
    """Ray cannot be asked now."""


class RayRefused(RayUnavailable):
    """Ray refuses the token."""


class JobNotFound(RayError):
    """Ray knows no such job: it was never submitted, or the cluster has lost its state."""


class JobRejected(RayError):
    """Ray refuses a submission for what it says."""


class JobStatus(StrEnum):
    """What Ray says about a job. A fact to weigh, not a verdict: FAILED may be a healthy driver
    that Ray lost sight of."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        return self not in (JobStatus.PENDING, JobStatus.RUNNING)


@dataclass(frozen=True)
class Job:
    """One Ray Job."""

    submission_id: str
    status: JobStatus
    message: str | None
    metadata: Mapping[str, str]
    driver_node_id: str | None
    driver_exit_code: int | None

    @property
    def storage_problem(self) -> str | None:
        """Why the driver left the storage alone and ended, by its last lines; None where it did
        not."""
        if not self.status.ended or self.driver_exit_code != EXIT_STORAGE:
            return None
        lines = [
            line.partition(STORAGE_WORDS)[2]
            for line in (self.message or "").splitlines()
            if STORAGE_WORDS in line
        ]
        return (
            lines[-1].strip()
            if lines
            else "the driver could not use the run's storage; its job's log says more"
        )


@dataclass(frozen=True)
class RayNode:
    """One node of the cluster."""

    node_id: str
    ip: str
    hostname: str
    state: NodeState
    is_head: bool
    resources: Mapping[str, float]
    """In Ray's names: CPU, GPU, memory (bytes), and the operator's own."""


@dataclass(frozen=True)
class RayEndpoint:
    """Where the dashboard is."""

    url: str
    """For example ``http://127.0.0.1:8265``."""
    token: str | None
    """Sent as bearer token; None sends none."""


class RayJobs:
    """A client of one Ray cluster's dashboard.

    Args:
        endpoint: Asked before every request, since an embedded cluster that starts again has
            another address; None means that there is no cluster now.
    """

    def __init__(self, endpoint: Callable[[], RayEndpoint | None]) -> None:
        self._endpoint = endpoint
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S), trust_env=False
        )
        # A thousand runs may start at once. The client's pool goes through all requests that wait
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
        """Base URL of the dashboard; None where there is no cluster now."""
        endpoint = self._endpoint()
        return endpoint.url if endpoint else None

    async def submit(self, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> str:
        """Submit a job, or find that it was submitted before: calling again with one id makes one
        job.

        No runtime_env and no resources of the entrypoint: either would keep the run's actors from
        Ray's warm processes.

        Returns:
            The submission id.

        Raises:
            RayUnavailable: It may or may not have been submitted; call again.
            JobRejected: Ray will not take it.
        """
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "metadata": dict(metadata),
        }
        async with self._submits:
            response = await self._send(
                "POST", "/api/jobs/", json=body, read_timeout_s=SUBMIT_TIMEOUT_S
            )
        if response.is_success:
            return submission_id
        if "already exists" in response.text:
            # Refused atomically, but answered as an internal error with a traceback.
            return (await self.job(submission_id)).submission_id
        if response.status_code == httpx.codes.BAD_REQUEST:
            raise JobRejected(f"Ray refuses job {submission_id}: {_last_line(response)}")
        raise _unavailable(response)

    async def job(self, submission_id: str) -> Job:
        """What Ray says about a job. Raises JobNotFound, RayUnavailable."""
        response = await self._send("GET", f"/api/jobs/{submission_id}")
        return _read(_found(response, submission_id), _job)

    async def stop(self, submission_id: str) -> None:
        """Ask Ray to end a job's driver; one that has ended is left alone. Raises JobNotFound,
        RayUnavailable."""
        _found(await self._send("POST", f"/api/jobs/{submission_id}/stop"), submission_id)

    async def jobs(self) -> list[Job]:
        """Every submitted job that Ray remembers."""
        response = await self._send("GET", "/api/jobs/")
        return _read(_successful(response), _jobs)

    async def version(self) -> str:
        """Ray's version, for example ``2.60.0``."""
        return _read(
            _successful(await self._send("GET", "/api/version")),
            lambda answer: str(answer["ray_version"]),
        )

    async def live_nodes(self) -> list[RayNode]:
        """Nodes that are alive, cheaply: draining ones count as alive, and hostnames are
        addresses."""
        return await self._nodes(
            {"filter_keys": "state", "filter_predicates": "=", "filter_values": "ALIVE"}
        )

    async def nodes(self) -> list[RayNode]:
        """Every node that the cluster remembers, dead ones too, with hostnames and drains."""
        nodes = await self._nodes({})
        response = _successful(await self._send("GET", "/nodes", params={"view": "summary"}))

        def with_summaries(answer: Any) -> list[RayNode]:
            by_id = {raw.get("raylet", {}).get("nodeId"): raw for raw in answer["data"]["summary"]}
            return [_with_summary(node, by_id.get(node.node_id)) for node in nodes]

        return _read(response, with_summaries)

    async def is_dead(self, node_id: str) -> bool:
        """Whether Ray tells this node dead, which it stays; not of one that Ray does not know."""
        found = await self._nodes(
            {"filter_keys": "node_id", "filter_predicates": "=", "filter_values": node_id}
        )
        return any(node.state == "DEAD" for node in found if node.node_id == node_id)

    async def _nodes(self, filters: Mapping[str, str]) -> list[RayNode]:
        params = {"limit": str(MAX_NODES), "detail": "1", **filters}
        response = _successful(await self._send("GET", "/api/v0/nodes", params=params))
        return _read(
            response, lambda answer: [_node(raw) for raw in answer["data"]["result"]["result"]]
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
        """One request; the only place where httpx's errors become ours."""
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
                f"Ray's dashboard at {endpoint.url} refuses the token: set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH"
            )
        return response


def _found(response: httpx.Response, submission_id: str) -> httpx.Response:
    # Ray's own words, not a proxy's
    if response.status_code == httpx.codes.NOT_FOUND and "does not exist" in response.text:
        raise JobNotFound(f"Ray knows no job {submission_id}")
    return _successful(response)


def _read(response: httpx.Response, parse: Callable[[Any], T]) -> T:
    """What an answer says. Raises RayUnavailable for one that is not Ray's: a proxy has pages of
    its own."""
    try:
        return parse(response.json())
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise RayUnavailable(
            f"what answered {response.status_code} to {response.request.url.path} is not Ray "
            f"({type(exc).__name__}: {exc}): "
            f"{response.text[:100]!r}"
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
    """The line of a traceback that says what happened."""
    lines = [line.strip() for line in response.text.splitlines() if len(line.strip()) > 1]
    return lines[-1][:300] if lines else response.reason_phrase


def _job(raw: Mapping[str, Any]) -> Job:
    return Job(
        submission_id=raw["submission_id"],
        status=JobStatus(raw["status"]),
        message=raw.get("message"),
        metadata=raw.get("metadata") or {},
        driver_node_id=raw.get("driver_node_id"),
        driver_exit_code=raw.get("driver_exit_code"),
    )


def _jobs(answer: Sequence[Mapping[str, Any]]) -> list[Job]:
    if not isinstance(answer, list):
        raise TypeError("no list of jobs")
    return [_job(raw) for raw in answer if raw["submission_id"] is not None]


def _node(raw: Mapping[str, Any]) -> RayNode:
    return RayNode(
        node_id=raw["node_id"],
        ip=raw["node_ip"],
        hostname=raw.get("node_name") or raw["node_ip"],
        state="ALIVE" if raw["state"] == "ALIVE" else "DEAD",
        is_head=bool(raw["is_head_node"]),
        resources=raw.get("resources_total") or {},
    )


def _with_summary(node: RayNode, raw: Mapping[str, Any] | None) -> RayNode:
    """The same node with what only the dashboard's summary tells."""
    if raw is None:
        return node
    draining = raw["raylet"].get("stateSnapshot", {}).get("state") == "DRAINING"
    state: NodeState = "DRAINING" if draining and node.state == "ALIVE" else node.state
    return RayNode(
        node.node_id,
        node.ip,
        raw.get("hostname") or node.hostname,
        state,
        node.is_head,
        node.resources,
    )
