"""The client of the service: runs, code, nodes, projects, tokens, catalog, health."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from everstep.client.address import find_address
from everstep.client.admin import Alerts, Audit, Nodes, Projects, ServiceStorage, Sessions, Tokens
from everstep.client.download import Code
from everstep.client.runs import RunHandle
from everstep.client.streams import Part, Patience
from everstep.client.transport import Timing, Transport, idempotency_header, spec_body
from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import Catalog
from everstep.wire import ClusterInfo, ProjectGoodput, Readiness, Run
from everstep.wire.deployment import DeploymentCheck
from everstep.wire.drills import Rehearsal


class Client(Part):
    """A connection to one Everstep service. Thread-safe.

    >>> client = Client()                                  # doctest: +SKIP
    >>> run = client.runs.create({"name": "digits", ...})  # doctest: +SKIP
    >>> run.wait(timeout_s=600)                            # doctest: +SKIP

    Args:
        url: base URL; default is EVERSTEP_URL, else the service on this machine.
        token: default is EVERSTEP_TOKEN, else the token file of the service on this machine.
        timeout_s: timeout of one request.
        max_tries: maximum attempts of a request that is safe to retry.
        patience: timeouts of streams, and of a service that is unreachable.
        timing: the clock; for tests.
        transport: an httpx transport; for tests.

    Raises UsageError for an invalid URL or token.
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
        self._use(
            Transport(
                find_address(url, token),
                timeout_s=timeout_s,
                max_tries=max_tries,
                timing=timing or Timing(),
                base=transport,
            ),
            patience or Patience(),
        )

    @classmethod
    def over(cls, transport: Transport, patience: Patience) -> Self:
        """Return a client that sends its requests by ``transport``; for ``AsyncClient``."""
        client = cls.__new__(cls)
        client._use(transport, patience)
        return client

    def _use(self, transport: Transport, patience: Patience) -> None:
        super().__init__(transport, patience)
        self.runs = Runs(transport, patience)
        self.nodes = Nodes(transport, patience)
        self.code = Code(transport, patience)
        self.projects = Projects(transport, patience)
        self.tokens = Tokens(transport, patience)
        self.sessions = Sessions(transport, patience)
        self.alerts = Alerts(transport, patience)
        self.audit = Audit(transport, patience)
        self.storage = ServiceStorage(transport, patience)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    @property
    def url(self) -> str:
        """Return the base URL of the service."""
        return self._transport.address.url

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def cluster(self) -> ClusterInfo:
        """Return the Ray cluster's nodes with their states, resources and runs. ``client.nodes``
        cordons and drains them."""
        return self._transport.get("/v1/cluster", ClusterInfo)

    def catalog(self) -> Catalog:
        """Return what a spec can name: tasks, models, data sets, optimizers and schedules, with the
        JSON schemas of their arguments."""
        return self._transport.get("/v1/catalog", Catalog)

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a spec."""
        found: dict[str, Any] = self._transport.send("GET", "/v1/schema").json()
        return found

    def goodput(self, project: str | None = None) -> list[ProjectGoodput]:
        """Return how all runs spent their time, by project."""
        return list(self._transport.pages("/v1/goodput", ProjectGoodput, {"project": project}))

    def start_deployment_check(self, *, all_reduce_s: float = 5.0) -> DeploymentCheck:
        """Start a check of every node and of the connections between them; return at once.

        Args:
            all_reduce_s: duration of the all-reduce test in seconds.

        Raises AuthError; Unavailable if Ray does not respond.
        """
        body = {"all_reduce_s": all_reduce_s}
        return self._transport.post("/v1/cluster/checks", DeploymentCheck, body)

    def wait_deployment_check(
        self, check_id: str, timeout_s: float | None = None
    ) -> DeploymentCheck:
        """Wait until a check is finished. Raise WaitTimeout after ``timeout_s`` seconds, or
        NotFound."""
        check: DeploymentCheck | None = None

        def fetch() -> None:
            nonlocal check
            check = self._transport.get(
                f"/v1/cluster/checks/{quote(check_id, safe='')}", DeploymentCheck
            )

        self._wait(
            lambda: check is not None and check.state != "running",
            fetch,
            lambda: f"check {check_id} is not finished after {timeout_s:g} s",
            timeout_s,
        )
        assert check is not None
        return check

    def rehearse(self, code: str | Path, /, *argv: str, **options: str | int) -> Rehearsal:
        """Rehearse a restart on the code in a directory of this machine, as ``everstep rehearse``
        does, in a process of its own and without the service. ``argv`` are arguments of a script,
        ``options`` those of the command (``all=True``). Raises UsageError if nothing can be done.
        """
        named = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
        given = [name if value is True else f"{name}={value}" for name, value in named]
        command = [sys.executable, "-P", "-m", "everstep.cli.main", "rehearse", "--json", *given]
        command += [f"--code={code}", *(["--", *argv] if argv else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            return Rehearsal.model_validate_json(done.stdout)
        except ValidationError:
            raise UsageError(f"everstep rehearse: {done.stderr.strip()}") from None

    def health(self) -> bool:
        """Return whether the service is alive. Raise Unavailable if nothing responds."""
        return self._transport.send("GET", "/healthz").is_success

    def ready(self) -> Readiness:
        """Return whether the service can work; ``unavailable`` is a result, not an error. Needs no
        token."""
        return self._transport.parse(
            self._transport.send("GET", "/readyz", answers=frozenset({503})), Readiness
        )


class Runs(Part):
    """The runs of the service, as ``client.runs``."""

    def create(
        self,
        spec: RunSpec | Mapping[str, Any],
        idempotency_key: str | None = None,
        *,
        create_project: bool = False,
    ) -> RunHandle:
        """Submit a run. Retries are safe: each call creates exactly one run.

        Args:
            spec: the training request.
            idempotency_key: calls with the same key return the same run; by default each call makes
                its own key.
            create_project: create the project if it does not exist. By default a missing project is
                a fault of the spec.

        Raises InvalidSpec with every fault of the spec, AuthError, Unavailable.
        """
        body = spec_body(spec)
        params = {"create_project": create_project or None}
        headers = idempotency_header(idempotency_key)
        return self._handle(
            self._transport.post(
                "/v1/runs", Run, body, params=params, headers=headers, repeatable=True
            )
        )

    def validate(
        self, spec: RunSpec | Mapping[str, Any], *, create_project: bool = False
    ) -> RunSpec:
        """Let the service check a spec as if it was submitted; return it with every default.

        Raises InvalidSpec with every fault of the spec, AuthError, Unavailable.
        """
        params = {"create_project": create_project or None}
        return self._transport.post(
            "/v1/validate", RunSpec, spec_body(spec), params=params, repeatable=True
        )

    def get(self, run_id: str) -> RunHandle:
        """Return one run. Raise NotFound."""
        return self._handle(self._transport.get(f"/v1/runs/{quote(run_id, safe='')}", Run))

    def list(
        self,
        *,
        status: str | list[str] | None = None,
        project: str | None = None,
        name: str | None = None,
        tag: str | list[str] | Mapping[str, str] | None = None,
        sort: str | None = None,
    ) -> Iterator[RunHandle]:
        """Yield runs, newest first or by ``sort``. Pages are fetched while you iterate.

        Args:
            status: one status or several, for example ``"RUNNING"``.
            tag: ``"key=value"`` or ``"key"``, or several as a list or mapping. A run must have all
                of them.
            sort: a field, a metric or a field of the spec, with a minus the largest first, for
                example ``"-metrics.val_accuracy"`` or ``"spec.optimizer.lr"``.
        """
        tags = [f"{key}={value}" for key, value in tag.items()] if isinstance(tag, Mapping) else tag
        params = {"status": status, "project": project, "name": name, "tag": tags, "sort": sort}
        return (self._handle(run) for run in self._transport.pages("/v1/runs", Run, params))

    def _handle(self, run: Run) -> RunHandle:
        return RunHandle(self._transport, run, self._patience)
