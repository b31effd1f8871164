"""Sweeps: ``client.sweeps``, and one sweep as an object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Required, Self, TypedDict, Unpack
from urllib.parse import quote

from everstep.client.runs import RunHandle
from everstep.client.streams import Part, Patience
from everstep.client.transport import Transport, checked, idempotency_header, spec_body
from everstep.errors import NotFound, SweepFailed
from everstep.spec.run_spec import RunSpec
from everstep.spec.sweep import SweepSpec
from everstep.wire import Run
from everstep.wire.sweep import Sweep, SweepLinks, SweepProgress, SweepReason, SweepRun, SweepStatus

_PAUSES_S = 0.2, 2.0
"""Between two requests while waiting: the first, and the longest."""


class SweepFields:
    """The fields of a sweep, as of the last response, which ``sweep`` holds."""

    if TYPE_CHECKING:
        name: str
        project: str
        status: SweepStatus
        reason: SweepReason | None
        metric: str
        mode: Literal["min", "max"]
        scheduler: str
        seed: int | None
        max_parallel: int | None
        created_at: datetime
        finished_at: datetime | None
        progress: SweepProgress
        links: SweepLinks

        @property
        def sweep(self) -> Sweep: ...
    else:

        def __getattr__(self, name: str) -> Any:
            if name in Sweep.model_fields:
                return getattr(self.sweep, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """Return every name, for completion in a notebook."""
        return sorted({*super().__dir__(), *Sweep.model_fields})

    @property
    def id(self) -> str:
        return self.sweep.id


class SweepHandle(SweepFields, Part):
    """One sweep. Its fields (``sweep.status``, ``sweep.progress``, …) are those of the last
    response, which ``sweep.sweep`` holds. ``refresh()`` updates them.

    >>> sweep = client.sweeps.create(               # doctest: +SKIP
    ...     spec, metric="val_accuracy", grid={"optimizer.lr": [1e-3, 3e-3]}, scheduler="asha")
    >>> sweep.wait().best().latest_metrics          # doctest: +SKIP
    {'loss': 0.02, 'val_accuracy': 0.98}
    """

    sweep: Sweep

    def __init__(self, transport: Transport, sweep: Sweep, patience: Patience) -> None:
        super().__init__(transport, patience)
        self.sweep = sweep
        self._path = f"/v1/sweeps/{quote(sweep.id, safe='')}"

    def __repr__(self) -> str:
        done = self.sweep.progress
        return (
            f"<sweep {self.id} {self.sweep.name!r} {self.sweep.status} "
            f"{done.ended}/{done.total} runs>"
        )

    def refresh(self) -> Self:
        """Fetch the current state of the sweep; return self."""
        self.sweep = self._transport.get(self._path, Sweep)
        return self

    def spec(self) -> SweepSpec:
        """Return the sweep as submitted, with its seed.
        ``client.sweeps.create(**sweep.spec().model_dump())`` repeats it."""
        return self._transport.get(f"{self._path}/spec", SweepSpec)

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait until the sweep has ended; return self if it SUCCEEDED, also where some of its runs
        failed.

        Raises SweepFailed for FAILED and CANCELLED; WaitTimeout after ``timeout_s`` seconds;
        Unavailable if the service stays unreachable.
        """
        self._wait(
            lambda: self.sweep.status.terminal,
            lambda: self.refresh(),
            lambda: f"sweep {self.id} is still {self.sweep.status} after {timeout_s:g} s",
            timeout_s,
            *_PAUSES_S,
        )
        if self.sweep.status is not SweepStatus.SUCCEEDED:
            raise SweepFailed(self.sweep)
        return self

    def wait_for_change(self) -> Self:
        """Wait until the response differs from the last one; return self. Keep waiting while the
        service is unreachable for a while."""
        before = self.sweep
        self._wait(
            lambda: self.sweep != before,
            lambda: self.refresh(),
            lambda: f"sweep {self.id} has not changed",
            None,
            *_PAUSES_S,
        )
        return self

    def runs(self) -> list[SweepRun]:
        """Return every run by number, with the values that it sets, its status, and its best value
        of the metric. ``client.runs.get(run.run_id)`` returns the run itself."""
        return list(self._transport.pages(f"{self._path}/runs", SweepRun))

    def best(self) -> RunHandle:
        """Return the run with the best value of the metric so far; ``sweep.sweep.best`` has that
        value. Raise NotFound while no run has one."""
        self.refresh()
        if self.sweep.best is None:
            raise NotFound(f"no run of sweep {self.id} has a value of {self.sweep.metric} yet")
        run = self._transport.get(f"/v1/runs/{quote(self.sweep.best.run_id, safe='')}", Run)
        return RunHandle(self._transport, run, self._patience)

    def cancel(self) -> Self:
        """Submit no further run, and cancel those that have not ended. Raise Conflict if the sweep
        has ended."""
        self.sweep = self._transport.post(f"{self._path}/cancel", Sweep)
        return self

    def delete(self, *, runs: bool = False) -> None:
        """Delete a sweep that has ended. Its runs stay, unless ``runs`` is set: then they are
        deleted first, with their checkpoints and logs. Raise Conflict."""
        params = {"runs": "true"} if runs else None
        self._transport.send("DELETE", self._path, params=params)


class SweepArguments(TypedDict, total=False):
    """The arguments of ``client.sweeps.create`` that make up a sweep, beside its spec."""

    metric: Required[str]
    grid: Mapping[str, Sequence[Any]] | None
    random: Mapping[str, Mapping[str, Any]] | None
    max_runs: int | None
    max_parallel: int | None
    mode: Literal["min", "max"] | None
    scheduler: Literal["none", "asha"] | Mapping[str, Any]
    seed: int | None
    name: str | None


class Sweeps(Part):
    """The sweeps of the service, as ``client.sweeps``."""

    def create(
        self,
        spec: RunSpec | Mapping[str, Any],
        *,
        metric: str,
        grid: Mapping[str, Sequence[Any]] | None = None,
        random: Mapping[str, Mapping[str, Any]] | None = None,
        max_runs: int | None = None,
        max_parallel: int | None = None,
        mode: Literal["min", "max"] | None = None,
        scheduler: Literal["none", "asha"] | Mapping[str, Any] = "none",
        seed: int | None = None,
        name: str | None = None,
        idempotency_key: str | None = None,
        create_project: bool = False,
    ) -> SweepHandle:
        """Submit a sweep. Retries are safe: each call creates exactly one.

        Args:
            spec: the spec of every run, but for the fields that vary.
            metric: metric by which runs are compared, for example ``"val_accuracy"``.
            grid: field -> values; every combination is tried.
            random: field -> distribution, for example
                ``{"optimizer.lr": {"name": "log", "low": 1e-4, "high": 1e-1}}``.
            max_runs: number of runs with ``random``; limit on the size of a grid.
            max_parallel: most runs at a time; by default the service's queue decides.
            mode: whether the smallest or the largest value is best; by default by the metric's
                name.
            scheduler: ``"asha"`` lets only the best runs train to the end; a mapping sets its
                fields.
            seed: seed of ``random``; by default the service draws one.
            name: name of the sweep; by default the spec's.
            idempotency_key: calls with the same key return the same sweep.
            create_project: create the project if it does not exist.

        Raises InvalidSpec with the faults of every run, AuthError, Unavailable.
        """
        body = _body(
            spec,
            metric=metric,
            grid=grid,
            random=random,
            max_runs=max_runs,
            max_parallel=max_parallel,
            mode=mode,
            scheduler=scheduler,
            seed=seed,
            name=name,
        )
        made = self._transport.post(
            "/v1/sweeps",
            Sweep,
            body,
            params={"create_project": create_project or None},
            headers=idempotency_header(idempotency_key),
            repeatable=True,
        )
        return self._handle(made)

    def validate(
        self,
        spec: RunSpec | Mapping[str, Any],
        *,
        create_project: bool = False,
        **sweep: Unpack[SweepArguments],
    ) -> SweepSpec:
        """Let the service check a sweep and all of its runs as if it was submitted. Return it with
        every default and its seed: ``create(**found.model_dump())`` submits the runs that were
        checked.

        The arguments are those of ``create``. Raises InvalidSpec with the faults of every run,
        AuthError, Unavailable.
        """
        params = {"create_project": create_project or None}
        return self._transport.post(
            "/v1/sweeps/validate", SweepSpec, _body(spec, **sweep), params=params, repeatable=True
        )

    def get(self, sweep_id: str) -> SweepHandle:
        """Return one sweep. Raise NotFound."""
        return self._handle(self._transport.get(f"/v1/sweeps/{quote(sweep_id, safe='')}", Sweep))

    def list(
        self, *, status: str | list[str] | None = None, project: str | None = None
    ) -> Iterator[SweepHandle]:
        """Yield sweeps, newest first. Pages are fetched while you iterate."""
        params = {"status": status, "project": project}
        return (self._handle(sweep) for sweep in self._transport.pages("/v1/sweeps", Sweep, params))

    def _handle(self, sweep: Sweep) -> SweepHandle:
        return SweepHandle(self._transport, sweep, self._patience)


def _body(spec: RunSpec | Mapping[str, Any], **sweep: Unpack[SweepArguments]) -> dict[str, Any]:
    """Return a sweep as the body of a request; the service validates it."""
    scheduler = sweep.get("scheduler", "none")
    varied: dict[str, Any] = {
        "grid": {path: list(values) for path, values in (sweep.get("grid") or {}).items()},
        "random": {path: dict(values) for path, values in (sweep.get("random") or {}).items()},
        "scheduler": {"name": scheduler} if isinstance(scheduler, str) else dict(scheduler),
    }
    return checked({**sweep, "spec": spec_body(spec), **varied}, "sweep")
