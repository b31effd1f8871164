"""The client of the service: runs, code, nodes, projects, tokens, cluster, catalog, health."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from everstep.client.address import find_address
from everstep.client.admin import Audit, Projects, Storage, Tokens
from everstep.client.code_uploads import Code
from everstep.client.follow import Patience, wait_until
from everstep.client.nodes import Nodes
from everstep.client.runs import RunHandle
from everstep.client.timing import Timing
from everstep.client.transport import Transport
from everstep.errors import InvalidSpec
from everstep.spec.catalog import Catalog
from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.wire import ClusterInfo, ProjectGoodput, Readiness, Run
from everstep.wire.deployment import DeploymentCheck


class Client:
    """A connection to one Everstep service.

    >>> client = Client()                                  # doctest: +SKIP
    >>> run = client.runs.create({"name": "digits", ...})  # doctest: +SKIP
    >>> run.wait(timeout_s=600)                            # doctest: +SKIP

    Args:
        url: base URL; without one EVERSTEP_URL, else the service on this machine.
        token: without one EVERSTEP_TOKEN, else the token file of the service on this machine.
        timeout_s: longest wait for one answer.
        max_tries: how often a request is tried that may safely be tried again.
        patience: when a followed stream counts as dead, and how long the service may be away.
        timing: the clock; tests put in their own.
        transport: an httpx transport; tests put in their own.

    Raises UsageError for a URL or token that cannot be one. Safe to use from several threads.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        max_tries: int = 6,
        patience: Patience | None = None,
        timing: Timing | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._transport = Transport(
            find_address(url, token),
            timeout_s=timeout_s,
            max_tries=max_tries,
            timing=timing or Timing(),
            base=transport,
        )
        patience = self._patience = patience or Patience()
        self.runs = Runs(self._transport, patience)
        self.nodes = Nodes(self._transport, patience)
        self.code = Code(self._transport)
        self.projects = Projects(self._transport)
        self.tokens = Tokens(self._transport)
        self.audit = Audit(self._transport)
        self.storage = Storage(self._transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return self._transport.address.url

    def close(self) -> None:
        """Close its connections."""
        self._transport.close()

    def cluster(self) -> ClusterInfo:
        """The Ray cluster's nodes, their states and resources, and the runs on them;
        ``client.nodes`` cordons and drains them."""
        return self._transport.get("/v1/cluster", ClusterInfo)

    def catalog(self) -> Catalog:
        """What a spec may name: tasks, models, data sets, optimizers, schedules, each with its
        arguments' JSON schema."""
        return self._transport.get("/v1/catalog", Catalog)

    def goodput(self, project: str | None = None) -> list[ProjectGoodput]:
        """Where the time of all runs went, by project."""
        return list(self._transport.pages("/v1/goodput", ProjectGoodput, {"project": project}))

    def start_deployment_check(self, *, all_reduce_s: float = 5.0) -> DeploymentCheck:
        """Have every node of the cluster look at itself and at the others; returns at once.

        ``all_reduce_s`` is for how many seconds nodes add up tensors. Raises AuthError, Unavailable
        where Ray does not answer.
        """
        body = {"all_reduce_s": all_reduce_s}
        return self._transport.parse(
            self._transport.send("POST", "/v1/cluster/checks", body=body), DeploymentCheck
        )

    def wait_deployment_check(
        self, check_id: str, timeout_s: float | None = None
    ) -> DeploymentCheck:
        """Wait until a check is over. Raises WaitTimeout after ``timeout_s`` seconds, NotFound."""
        check: DeploymentCheck | None = None

        def look() -> None:
            nonlocal check
            check = self._transport.get(
                f"/v1/cluster/checks/{quote(check_id, safe='')}", DeploymentCheck
            )

        wait_until(
            lambda: check is not None and check.state != "running",
            look,
            lambda: f"check {check_id} is not over after {timeout_s:g} s",
            self._transport.timing,
            self._patience,
            timeout_s=timeout_s,
        )
        assert check is not None
        return check

    def health(self) -> bool:
        """Whether the service lives. Raises Unavailable where nothing answers."""
        return self._transport.send("GET", "/healthz").is_success

    def ready(self) -> Readiness:
        """Whether the service can work; an ``unavailable`` one is an answer too. Needs no token."""
        return self._transport.parse(
            self._transport.send("GET", "/readyz", answers=frozenset({503})), Readiness
        )


class Runs:
    """The service's runs, as ``client.runs``."""

    def __init__(self, transport: Transport, patience: Patience) -> None:
        self._transport = transport
        self._patience = patience

    def create(
        self,
        spec: RunSpec | Mapping[str, Any],
        idempotency_key: str | None = None,
        *,
        create_project: bool = False,
    ) -> RunHandle:
        """Submit a run. It is tried again where that is needed, and makes one run however often: by
        an idempotency key of its own, or by ``idempotency_key``, with which the same call gives the
        same run at any time. A project that does not exist is a fault of the spec unless
        ``create_project`` makes it.

        Raises InvalidSpec with every fault of the spec, AuthError, Unavailable.
        """
        body = spec.model_dump(mode="json") if isinstance(spec, RunSpec) else _jsonable(dict(spec))
        key = uuid.uuid4().hex if idempotency_key is None else idempotency_key
        params = {"create_project": "true"} if create_project else None
        headers = {"Idempotency-Key": key}
        response = self._transport.send(
            "POST", "/v1/runs", params=params, body=body, headers=headers, repeatable=True
        )
        return self._handle(self._transport.parse(response, Run))

    def get(self, run_id: str) -> RunHandle:
        """One run. Raises NotFound."""
        return self._handle(self._transport.get(f"/v1/runs/{quote(run_id, safe='')}", Run))

    def list(
        self,
        *,
        status: str | list[str] | None = None,
        project: str | None = None,
        name: str | None = None,
        tag: str | list[str] | Mapping[str, str] | None = None,
    ) -> Iterator[RunHandle]:
        """Runs, newest first, fetched page by page as they are iterated over.

        Args:
            status: one status or several, for example ``"RUNNING"``.
            tag: ``"key=value"`` or ``"key"``, or several as a list or mapping; runs that have every
                one.
        """
        tags = [f"{key}={value}" for key, value in tag.items()] if isinstance(tag, Mapping) else tag
        params = {"status": status, "project": project, "name": name, "tag": tags}
        return (self._handle(run) for run in self._transport.pages("/v1/runs", Run, params))

    def _handle(self, run: Run) -> RunHandle:
        return RunHandle(self._transport, run, self._patience)


def _jsonable(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec as it is: the service judges it. Raises InvalidSpec for what JSON cannot say: NaN,
    infinity, an object."""
    try:
        json.dumps(spec, allow_nan=False)
    except (TypeError, ValueError) as exc:
        parse_spec(spec)  # names the field, where the fault is one of the spec
        raise InvalidSpec((), f"the spec cannot be written as JSON: {exc}") from exc
    return spec
