"""Handles of what was ordered for a run: a drill, a profile."""

from __future__ import annotations

from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar
from urllib.parse import quote

from everstep.client.streams import Part, Patience
from everstep.client.transport import Transport
from everstep.text import failure, words
from everstep.wire import (
    Best,
    ForkedFrom,
    LatestCheckpoint,
    Links,
    Progress,
    Protection,
    Reason,
    Run,
    RunStatus,
    Transition,
    Usage,
)
from everstep.wire.drills import (
    AllReduce,
    Drill,
    DrillKind,
    DrillReport,
    DrillState,
    Profile,
    ProfileState,
)
from everstep.wire.run import Replay

Order = TypeVar("Order", Drill, Profile)


class OrderHandle(Part, Generic[Order]):
    """One request to a run's ranks. The fields of the last response are its attributes."""

    _noun: ClassVar[str]
    _fields: ClassVar[frozenset[str]]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in self._fields:
                return getattr(self._order, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __init__(self, transport: Transport, run_id: str, order: Order, patience: Patience) -> None:
        super().__init__(transport, patience)
        self.run_id = run_id
        self._order: Order = order
        self._path = f"/v1/runs/{quote(run_id, safe='')}/{self._noun}s/{quote(order.id, safe='')}"

    @property
    def id(self) -> str:
        return self._order.id

    def refresh(self) -> Self:
        """Fetch the current state; return self."""
        self._order = self._transport.get(self._path, type(self._order))
        return self

    def wait(self, timeout_s: float = 600.0) -> Self:
        """Wait until the request is complete. Return self, whatever the outcome; see ``state``.

        Keep waiting while the service is unreachable for a while. Raises WaitTimeout after
        ``timeout_s`` seconds; Unavailable if the service stays unreachable.
        """
        self._wait(
            lambda: self._order.complete,
            self.refresh,
            lambda: (
                f"{self._noun} {self.id} of run {self.run_id} is still {self._order.state} after "
                f"{timeout_s:g} s"
            ),
            timeout_s,
        )
        return self


# ---------------------------------------------------------------- drill handle

# A drill: wait for it and read its report.


class DrillFields:
    """The fields of a drill, for type checkers."""

    if TYPE_CHECKING:
        kind: DrillKind
        rank: int
        state: DrillState
        problem: str | None
        report: DrillReport | None


class DrillHandle(DrillFields, OrderHandle[Drill]):
    """One drill. Its fields (``drill.state``, ``drill.report``, …) are those of the last response,
    which ``drill.drill`` holds.

    ``wait`` returns when the report is complete: the run has trained ten more steps, has ended, or
    the drill was not carried out. ``report.parity`` compares the run before and after.

    >>> run.drill("kill_worker", rank=1).wait().report.recovery_s   # doctest: +SKIP
    1.1
    """

    _noun = "drill"
    _fields = frozenset(Drill.model_fields)

    def __repr__(self) -> str:
        return f"<drill {self.id} {self.drill.kind} of rank {self.drill.rank}, {self.drill.state}>"

    @property
    def drill(self) -> Drill:
        return self._order


# ---------------------------------------------------------------- profile handle

# A profile of a rank: wait for it and download its trace.


class ProfileFields:
    """The fields of a profile, for type checkers."""

    if TYPE_CHECKING:
        rank: int
        steps: int
        state: ProfileState
        problem: str | None
        first_step: int | None
        all_reduces: tuple[AllReduce, ...]


class ProfileHandle(ProfileFields, OrderHandle[Profile]):
    """One profile. Its fields (``profile.state``, ``profile.all_reduces``, …) are those of the last
    response, which ``profile.profile`` holds. ``wait`` returns when the trace is ready, or will
    never be.

    >>> run.profile(rank=0, steps=10).wait().download("trace.json.gz")   # doctest: +SKIP
    PosixPath('trace.json.gz')
    """

    _noun = "profile"
    _fields = frozenset(Profile.model_fields)

    def __repr__(self) -> str:
        return f"<profile {self.id} of rank {self.profile.rank}, {self.profile.state}>"

    @property
    def profile(self) -> Profile:
        return self._order

    def download(self, path: str | Path) -> Path:
        """Download the trace: gzipped JSON, which https://ui.perfetto.dev opens. Return the path.
        Raise NotFound if there is no trace, OSError if it cannot be written."""
        answer = self._transport.send("GET", f"{self._path}/trace", repeatable=True)
        Path(path).write_bytes(answer.content)
        return Path(path)


# ---------------------------------------------------------------- fields of a run

# The fields of a run, as of the last response of the service.


class RunFields:
    """A run as of the last response of the service, which ``run`` holds unchanged."""

    if TYPE_CHECKING:
        name: str
        project: str
        status: RunStatus
        reason: Reason | None
        priority: int
        tags: dict[str, str]
        attempt: int
        submission: int
        created_at: datetime
        started_at: datetime | None
        finished_at: datetime | None
        epoch: int
        step: int
        total_steps: int | None
        world_size: int | None
        best: Best | None
        latest_checkpoint: LatestCheckpoint | None
        restarts: int
        steps_lost: int
        redone_s: float | None
        protection: Protection
        links: Links
        transitions: tuple[Transition, ...]
        forked_from: ForkedFrom | None
        progress: Progress | None
        usage: Usage | None
        replay_of: Replay | None
        chain: str | None
        exactness: Literal["world_size", "elastic"]
        audit_fraction: float
        guarantee: str | None
        owner: str | None
        notes: str | None

        @property
        def run(self) -> Run: ...
    else:

        def __getattr__(self, name: str) -> Any:
            if name in Run.model_fields:
                return getattr(self.run, name)
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """Return every name, for completion in a notebook."""
        return sorted({*super().__dir__(), *Run.model_fields})

    @property
    def latest_metrics(self) -> dict[str, float]:
        """Return the latest value of every metric; ``metrics()`` returns their history."""
        return self.run.metrics

    @property
    def goodput_share(self) -> float | None:
        """Return the share of time spent training, 0 to 1; ``goodput()`` returns where the rest
        went."""
        return self.run.goodput

    def __repr__(self) -> str:
        return (
            f"<run {self.run.id} {self.run.name!r} {self.run.status} step "
            f"{self.run.step}/{self.run.total_steps or '?'}>"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return run_html(self.run)

    @property
    def id(self) -> str:
        return self.run.id


# ---------------------------------------------------------------- notebook

# How a run shows itself in a notebook.

_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"


def run_html(run: Run) -> str:
    """Return the run as HTML. Text from users is escaped."""
    name, page = escape(run.name), run.links.dashboard or ""
    title = (
        f'<a href="{escape(page, quote=True)}">{name}</a>'
        if page.startswith(("http://", "https://"))
        else name
    )
    rows = [
        ("run", f"{title} <code>{escape(run.id)}</code>"),
        ("status", _status(run)),
        ("steps", _progress(run)),
    ]
    if run.world_size is not None:
        rows.append(("ranks", str(run.world_size)))
    if run.metrics:
        shown = ", ".join(
            f"{escape(metric)} {value:.5g}" for metric, value in sorted(run.metrics.items())[:8]
        )
        rows.append(("metrics", shown))
    if run.restarts:
        rows.append(("restarts", f"{run.restarts}, {failure.of_run(run)}"))
    cells = "".join(
        f'<tr><th style="{_CELL}">{what}</th><td style="{_CELL}">{text}</td></tr>'
        for what, text in rows
    )
    return f"<table>{cells}</table>"


def _status(run: Run) -> str:
    return f"<b>{run.status.value}</b>" + (f" {escape(run.reason.message)}" if run.reason else "")


def _progress(run: Run) -> str:
    if not run.total_steps:
        return words.progress(run)
    return (
        f'<progress value="{run.step}" max="{run.total_steps}"></progress> {run.step} of '
        f"{run.total_steps}"
    )
