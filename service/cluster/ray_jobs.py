"""The service's only way to Ray: HTTP to the dashboard's Jobs API and state API, with the cluster's
bearer token.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Literal, Self, TypeVar

import httpx

from everstep.spec.plain_text import written_out
from everstep.wire import NodeLoad
from storage.cluster import EXIT_STORAGE, STORAGE_WORDS

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
MOST_SUBMITS = 16
"""Submissions that run at the same time."""
READ_TIMEOUT_S = 10.0
# Ray answers a submission only after an agent has taken it, which is slow on a new cluster.
SUBMIT_TIMEOUT_S = 30.0
MAX_NODES = 10_000
RAY_PYTHON: Final = (
    r"""$(tr '\0' '\n' </proc/$(sed -n 's/^PPid:[^0-9]*//p' /proc/$PPID/status)/cmdline"""
    r""" | sed -n 's/^--python_worker_command=\("\([^"]*\)"\|\([^ ]*\)\) .*/\2\3/p'"""
    r""" | grep . || echo python)"""
)
"""For a job's shell: the interpreter with which the job's node starts Ray's workers, as the command
line of the raylet says, whose grandchild the shell is. A raylet that was started by its full path
has no ``python``, or another one, on its PATH."""
NEVER_BEGAN_CODES: Final = (1, 2, 126, 127)
"""Exit codes of a Python that cannot run our module, and of a shell that cannot run Python."""
_LAST_WORDS_CHARS = 1500
_RAYS_LINES: Final = re.compile(
    r"^(?:Job entrypoint command failed |.* job_manager\.py:|Running entrypoint ).*\n?",
    re.MULTILINE,
)
"""Of the message of a job that failed, what Ray itself says in it."""


@dataclass(frozen=True)
class RayEndpoint:
    """Address of a dashboard, and the token for it."""

    url: str
    """For example ``http://127.0.0.1:8265``."""
    token: str | None
    """Bearer token; None sends none."""

    @property
    def headers(self) -> dict[str, str]:
        """Return the header with the token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def away(self, exc: Exception) -> RayUnavailable:
        """Return the error for a dashboard that does not answer."""
        return RayUnavailable(
            f"Ray's dashboard at {self.url} does not answer: {exc or type(exc).__name__}"
        )

    def refused(self) -> RayRefused:
        """Return the error for a token that the dashboard refuses."""
        return RayRefused(
            f"Ray's dashboard at {self.url} refuses the token; set RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH"
        )


class RayClient:
    """A client of one Ray cluster's dashboard.

    Args:
        endpoint: Called before each request, since an embedded cluster that restarts has another
            address. It returns None while there is no cluster.
        client: The connections. Closed with this.
    """

    def __init__(
        self, endpoint: Callable[[], RayEndpoint | None], client: httpx.AsyncClient
    ) -> None:
        self.endpoint = endpoint
        self._client = client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def _now(self) -> RayEndpoint:
        """Return where the cluster is now. Raises RayUnavailable."""
        endpoint = self.endpoint()
        if endpoint is None:
            raise RayUnavailable("no Ray cluster is running now")
        return endpoint


class RayJobs(RayClient):
    """The Jobs API and the state API."""

    def __init__(self, endpoint: Callable[[], RayEndpoint | None]) -> None:
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        super().__init__(endpoint, httpx.AsyncClient(timeout=timeout, trust_env=False))
        # A thousand runs may start at once, and the client's pool walks all waiting requests
        # whenever one begins or ends.
        self._submits = asyncio.Semaphore(MOST_SUBMITS)

    @property
    def url(self) -> str | None:
        """Base URL of the dashboard, or None while there is no cluster."""
        endpoint = self.endpoint()
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
        endpoint = self._now()
        try:
            response = await self._client.request(
                method,
                f"{endpoint.url}{path}",
                json=json,
                params=params,
                headers=endpoint.headers,
                timeout=httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S),
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise endpoint.away(exc) from exc
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise endpoint.refused()
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


# ---------------------------------------------------------------- ray answers

# What Ray answers about jobs and nodes: the models, and how its JSON becomes them.

_USED: Final = re.compile(r"^ *([\d.]+)/[\d.]+ ([A-Za-z_]\w*)\b", re.MULTILINE)
NodeState = Literal["ALIVE", "DRAINING", "DEAD"]


class JobStatus(StrEnum):
    """Ray's status of a job. It is not a verdict: Ray says FAILED of a healthy driver that it lost
    contact with."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def ended(self) -> bool:
        """Whether the job is over."""
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
    def last_words(self) -> str | None:
        """Return the last lines of a program that ended by itself before ours began, or None."""
        if not self.status.ended or self.driver_exit_code not in NEVER_BEGAN_CODES:
            return None
        words = _RAYS_LINES.sub("", self.message or "").strip()
        return words[-_LAST_WORDS_CHARS:] or f"exit code {self.driver_exit_code}"

    @property
    def storage_problem(self) -> str | None:
        """Return why the driver ended without touching the storage, by its last lines, or None."""
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
    """By Ray's names: CPU, GPU, memory (bytes), and custom resources."""
    used: Mapping[str, float] | None = None
    """Of the resources, where Ray keeps that account; without memory."""
    load: NodeLoad | None = None


def job_of(raw: Mapping[str, Any]) -> Job:
    """Return a job from its JSON. Raises LookupError, ValueError."""
    return Job(
        submission_id=raw["submission_id"],
        status=JobStatus(raw["status"]),
        message=written_out(raw.get("message")),
        metadata=raw.get("metadata") or {},
        driver_node_id=raw.get("driver_node_id"),
        driver_exit_code=raw.get("driver_exit_code"),
    )


def jobs_of(answer: Sequence[Mapping[str, Any]]) -> list[Job]:
    """Return the submitted jobs of a list. Raises TypeError, LookupError, ValueError."""
    if not isinstance(answer, list):
        raise TypeError("no list of jobs")
    return [job_of(raw) for raw in answer if raw["submission_id"] is not None]


def node_of(raw: Mapping[str, Any]) -> RayNode:
    """Return a node from its JSON, without its hostname's and drain's summary. Raises
    LookupError."""
    return RayNode(
        node_id=raw["node_id"],
        ip=raw["node_ip"],
        hostname=raw.get("node_name") or raw["node_ip"],
        state="ALIVE" if raw["state"] == "ALIVE" else "DEAD",
        is_head=bool(raw["is_head_node"]),
        resources=raw.get("resources_total") or {},
    )


def with_summary(node: RayNode, raw: Mapping[str, Any] | None) -> RayNode:
    """Return the node with what only the dashboard's summary knows: its hostname and a drain."""
    if raw is None:
        return node
    is_draining = raw["raylet"].get("stateSnapshot", {}).get("state") == "DRAINING"
    state: NodeState = "DRAINING" if is_draining and node.state == "ALIVE" else node.state
    return replace(
        node,
        hostname=raw.get("hostname") or node.hostname,
        state=state,
        load=None if node.state == "DEAD" else _load_of(raw),
    )


def used_of(text: object) -> dict[str, float] | None:
    """Return the used amounts in Ray's account of a node, a text such as ``1.0/2.0 CPU`` with a
    line for each resource; None without one."""
    if not isinstance(text, str):
        return None
    return {found[2]: float(found[1]) for found in _USED.finditer(text)} or None


def _load_of(raw: Mapping[str, Any]) -> NodeLoad | None:
    """Return a host's load; None if Ray's agent there has not reported yet."""
    memory, load, gpus = raw.get("mem"), raw.get("loadAvg"), raw.get("gpus")
    if not isinstance(memory, list) or len(memory) < 4:
        return None
    gpus = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    busy = [share for gpu in gpus if (share := _number(gpu.get("utilizationGpu"))) is not None]
    averages = load[0] if isinstance(load, list) and load and isinstance(load[0], list) else []
    cpu = _number(raw.get("cpu"))
    return NodeLoad(
        cpu=None if cpu is None else cpu / 100,
        load_1m=_number(averages[0]) if averages else None,
        memory_used_bytes=_whole(memory[3]),
        memory_total_bytes=_whole(memory[0]),
        gpu=sum(busy) / len(busy) / 100 if busy else None,
        gpu_memory_used_bytes=_sum_of_mebibytes(gpus, "memoryUsed"),
        gpu_memory_total_bytes=_sum_of_mebibytes(gpus, "memoryTotal"),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _sum_of_mebibytes(gpus: Sequence[Mapping[str, Any]], key: str) -> int | None:
    amounts = [amount for gpu in gpus if (amount := _number(gpu.get(key))) is not None]
    return int(sum(amounts)) << 20 if amounts else None


# ---------------------------------------------------------------- ray errors

# The errors of every call to Ray.
#
# RayError
# ├── RayUnavailable   not reachable, too slow, or failed by itself; the same call may succeed later
# │   └── RayRefused   the token is missing or wrong
# ├── JobNotFound      Ray knows no job of that id
# └── JobRejected      Ray will never take this submission as it is


class RayError(Exception):
    """Base of the errors of calls to Ray."""


class RayUnavailable(RayError):
    """Ray does not answer now."""


class RayRefused(RayUnavailable):
    """Ray refuses the token."""


class JobNotFound(RayError):
    """Ray knows no such job: it was never submitted, or the cluster has lost its state."""


class JobRejected(RayError):
    """Ray refuses a submission because of its content."""
