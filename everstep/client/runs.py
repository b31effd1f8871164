"""A run as an object: its state, its history, and actions on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from everstep.client.download import RunEventFiles
from everstep.client.handles import DrillHandle, ProfileHandle
from everstep.client.streams import Follower
from everstep.errors import RunFailed, UsageError
from everstep.spec.run_spec import RunSpec
from everstep.text import words
from everstep.wire import (
    TERMINAL_STATUSES,
    Attempt,
    Event,
    Failure,
    Goodput,
    LogLine,
    MetricSeries,
    Run,
    RunStatus,
    Samples,
    StragglerReport,
)
from everstep.wire.drills import Drill, DrillKind, Profile, RunRehearsal, StackReport

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


# ---------------------------------------------------------------- run history

# The history of a run: metrics, failures, attempts, and how its time and samples were used.


class RunHistory(RunEventFiles):
    """A run and its history."""

    def metrics(
        self, *names: str, max_points: int = 500
    ) -> dict[str, list[tuple[int, float, float | None]]]:
        """Return ``[(step, unix seconds, value), …]`` for each name, down-sampled to ``max_points``
        with extremes kept. Values that were not finite are None. Without names, return every
        metric."""
        found = self._transport.get(
            f"{self._path}/metrics",
            MetricSeries,
            names=",".join(names) if names else None,
            max_points=max_points,
        )
        return found.series

    def failures(self, *, lines: int = 10) -> list[Failure]:
        """Return every failure, oldest first, with verdict, evidence and action. ``lines`` limits
        the log lines of the first failing rank."""
        return list(self._transport.pages(f"{self._path}/failures", Failure, {"lines": lines}))

    def stragglers(self) -> StragglerReport:
        """Return the step time of each rank, its wait for the others, and the ranks that were found
        slow."""
        return self._transport.get(f"{self._path}/stragglers", StragglerReport)

    def attempts(self, *, workers: bool = True) -> list[Attempt]:
        """Return every attempt, oldest first; with its ranks, unless ``workers`` is False."""
        return list(self._transport.pages(f"{self._path}/attempts", Attempt, {"workers": workers}))

    def samples(self) -> Samples:
        """Return for each finished epoch how many samples were used once, more than once or never,
        over the committed lineage."""
        return self._transport.get(f"{self._path}/samples", Samples)

    def goodput(self) -> Goodput:
        """Return how the run spent its wall time."""
        return self._transport.get(f"{self._path}/goodput", Goodput)


# ---------------------------------------------------------------- runs

_PAUSES_S = 0.1, 1.0
"""Between two requests while waiting: the first, and the longest."""
BEFORE_RUNNING = (RunStatus.QUEUED, RunStatus.STARTING, RunStatus.RECOVERING)
"""Statuses that lead to RUNNING by themselves."""


class RunHandle(RunHistory):
    """One run. Its fields (``run.status``, ``run.step``, …) are those of the last response, which
    ``run.run`` holds. ``refresh()`` updates them.

    >>> run = client.runs.create(spec)          # doctest: +SKIP
    >>> run.wait(timeout_s=600).latest_metrics  # doctest: +SKIP
    {'loss': 0.02, 'val_accuracy': 0.98}

    Two fields have the name of a method, which returns a history: their values are
    ``run.latest_metrics`` and ``run.goodput_share``.
    """

    def spec(self) -> RunSpec:
        """Return the resolved spec, with every default filled in."""
        return self._transport.get(f"{self._path}/spec", RunSpec)

    # ------------------------------------------------------------ waiting and following

    def wait(self, timeout_s: float | None = None) -> RunHandle:
        """Wait until the run has ended; return self if it SUCCEEDED.

        Waiting continues through a pause, and while the service is unreachable for a while.

        Raises RunFailed for FAILED and CANCELLED, with the last failure and its verdict;
        WaitTimeout after ``timeout_s`` seconds; Unavailable if the service stays unreachable.
        """

        def late() -> str:
            place = "" if words.has_no_steps(self.run) else f" at step {self.run.step}"
            return f"run {self.id} is still {self.run.status}{place} after {timeout_s:g} s"

        self._wait(lambda: self.run.status.terminal, self.refresh, late, timeout_s, *_PAUSES_S)
        if self.run.status is not RunStatus.SUCCEEDED:
            raise self.failed()
        return self

    def failed(self) -> RunFailed:
        """Return the error that explains why a run ended FAILED or CANCELLED."""
        failures = self.failures()
        return RunFailed(self.run, failures[-1] if failures else None)

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[Event]:
        """Yield the events after ``after``, in order. With ``follow``, also yield new ones until
        the run has ended. Lost connections are re-established; no event is lost or repeated."""
        if not follow:
            return self._transport.pages(f"{self._path}/events", Event, {"after": after})
        return iter(
            self._follower("events", Event, {}, {}, after, contiguous=True, is_last=ends_run)
        )

    def logs(
        self,
        *,
        follow: bool = False,
        rank: int | None = None,
        attempt: int | None = None,
        after: int = 0,
    ) -> Iterator[LogLine]:
        """Yield log lines of the ranks and the driver (rank None) over all attempts, or only those
        of ``rank`` or ``attempt``. With ``follow``, also yield new ones until the run has ended."""
        params = {"rank": rank, "attempt": attempt}
        if not follow:
            return self._transport.pages(f"{self._path}/logs", LogLine, {**params, "after": after})
        return iter(
            self._follower(
                "logs",
                LogLine,
                params,
                {"follow": True},
                after,
                contiguous=False,
                is_last=lambda _line: False,
            )
        )

    def _follower(
        self,
        what: str,
        item: type[Any],
        params: Mapping[str, int | None],
        stream_params: Mapping[str, bool],
        after: int,
        *,
        contiguous: bool,
        is_last: Callable[[Any], bool],
    ) -> Follower[Any]:
        return Follower(
            self._transport,
            f"{self._path}/{what}",
            item,
            params=params,
            stream_params=stream_params,
            after=after,
            contiguous=contiguous,
            is_last=is_last,
            has_ended=lambda: self.refresh().run.status.terminal,
            patience=self._patience,
        )

    # ------------------------------------------------------------ tables

    def to_pandas(self, what: Table = "metrics", *, max_points: int = 10_000) -> DataFrame:
        """Return a history as a table of pandas.

        ``metrics`` has a row for each step and a column for each metric, down-sampled to
        ``max_points`` with extremes kept; ``events`` and ``failures`` have a row for each.

        >>> run.to_pandas()["loss"].plot()   # doctest: +SKIP

        Raises UsageError if pandas is not installed, or for another table.
        """
        return to_pandas(self, what, max_points)

    # ------------------------------------------------------------ actions

    def cancel(self) -> RunHandle:
        """Stop the run for good, after a last checkpoint. Raise Conflict if it has ended."""
        return self._act("cancel")

    def pause(self) -> RunHandle:
        """Stop the run after a checkpoint and release its resources. ``resume()`` continues from
        there."""
        return self._act("pause")

    def resume(self) -> RunHandle:
        """Queue a paused run again."""
        return self._act("resume")

    def set_notes(self, notes: str | None) -> RunHandle:
        """Replace the notes of the run, at most 4000 characters; None removes them.

        >>> run.set_notes("diverges with warmup below 100").notes   # doctest: +SKIP
        'diverges with warmup below 100'
        """
        response = self._transport.send("PATCH", self._path, body={"notes": notes}, repeatable=True)
        self.run = self._transport.parse(response, Run)
        return self

    def drill(self, kind: DrillKind | str, *, rank: int = 0, wait_s: float = 0.0) -> DrillHandle:
        """Inject a failure into this run, to check that it recovers.

        ``kill_driver`` and ``corrupt_checkpoint`` hit the run, the others ``rank`` or its node.
        Needs an admin token, and a service that was started with ``--drills``. A run that is
        QUEUED, STARTING or RECOVERING is first waited for, at most ``wait_s`` seconds.

        >>> run.drill("kill_worker", rank=1).wait().report.parity.in_parity   # doctest: +SKIP
        True

        Raises AuthError, Conflict if the run is not training, InvalidSpec if it has no such rank,
        WaitTimeout.
        """
        if wait_s > 0:
            self._wait_for_ranks(wait_s)
        body = {"kind": str(kind), "rank": rank}
        begun = self._transport.post(f"{self._path}/drills", Drill, body)
        return DrillHandle(self._transport, self.id, begun, self._patience)

    def _wait_for_ranks(self, timeout_s: float) -> None:
        """Wait until the run is in none of the statuses that lead to RUNNING."""
        self._wait(
            lambda: self.run.status not in BEFORE_RUNNING,
            self.refresh,
            lambda: f"run {self.id} is still {self.run.status} after {timeout_s:g} s",
            timeout_s,
            _PAUSES_S[0],
        )

    def drills(self) -> list[DrillHandle]:
        """Return every drill of this run with its report, oldest first."""
        found = self._transport.pages(f"{self._path}/drills", Drill)
        return [DrillHandle(self._transport, self.id, drill, self._patience) for drill in found]

    def replay(self, from_step: int, to_step: int, *, workers: int | None = None) -> RunHandle:
        """Train steps of this run again, in a run of its own, and compare each with what this one
        recorded. Return the new run; its ``replay_of`` has the result once it has ended.

        >>> run.replay(400, 450).wait().replay_of.result   # doctest: +SKIP
        'equal'

        Args:
            from_step: steps done in the state to begin with: 0, or a checkpoint of this run.
            to_step: last step to train again.
            workers: number of ranks; by default as many as trained these steps.

        Raises InvalidSpec if the steps cannot be replayed, and says which can.
        """
        body = {"from_step": from_step, "to_step": to_step, "workers": workers}
        begun = self._transport.post(f"{self._path}/replays", Run, body)
        return RunHandle(self._transport, begun, self._patience)

    def replays(self) -> list[RunHandle]:
        """Return the replays of this run, newest first, at most a hundred."""
        found = self._transport.pages(f"{self._path}/replays", Run)
        return [RunHandle(self._transport, run, self._patience) for run in found]

    def profile(self, *, rank: int = 0, steps: int = 10) -> ProfileHandle:
        """Record the next steps of a rank with torch's profiler. This does not change any result.

        >>> run.profile(rank=0, steps=10).wait().download("trace.json.gz")   # doctest: +SKIP
        PosixPath('trace.json.gz')

        Raises Conflict if the run is not training, InvalidSpec if it has no such rank.
        """
        body = {"rank": rank, "steps": steps}
        begun = self._transport.post(f"{self._path}/profiles", Profile, body)
        return ProfileHandle(self._transport, self.id, begun, self._patience)

    def profiles(self) -> list[ProfileHandle]:
        """Return every profile of this run, oldest first."""
        found = self._transport.pages(f"{self._path}/profiles", Profile)
        return [
            ProfileHandle(self._transport, self.id, profile, self._patience) for profile in found
        ]

    def stacks(self, timeout_s: float = 30.0) -> StackReport:
        """Ask what the ranks do now, and return it: for each rank in words, and its Python stacks.

        >>> run.stacks().summary   # doctest: +SKIP
        'rank 0 waits in ray.train.report (train.py, line 12); rank 1 runs prepare (train.py, …)'

        Raises Conflict if the run is not training, WaitTimeout if no answer comes.
        """
        found = self._transport.post(f"{self._path}/stacks", StackReport)

        def refresh() -> None:
            nonlocal found
            found = next((each for each in self.stack_reports() if each.id == found.id), found)

        self._wait(
            lambda: found.complete,
            refresh,
            lambda: f"the driver of run {self.id} did not answer within {timeout_s:g} s",
            timeout_s,
        )
        return found

    def stack_reports(self) -> list[StackReport]:
        """Return the newest reports on what ranks did, newest first: those that somebody asked for,
        and those of times in which nothing moved."""
        return list(self._transport.pages(f"{self._path}/stacks", StackReport))

    def rehearsal(self) -> RunRehearsal:
        """Return whether a restart was rehearsed on this run's code, and what that showed."""
        return self._transport.get(f"{self._path}/rehearsal", RunRehearsal)

    def delete(self) -> None:
        """Delete a run that has ended, with its checkpoints, logs and history."""
        self._transport.send("DELETE", self._path)

    def _act(self, action: str) -> RunHandle:
        self.run = self._transport.post(f"{self._path}/{action}", Run)
        return self


def ends_run(event: Event) -> bool:
    """Return whether an event is the last of its run."""
    return event.kind == "status" and event.data.get("to") in TERMINAL_STATUSES


# ---------------------------------------------------------------- tables

# Histories of a run as tables of pandas, which is imported only here, and only when asked for.

Table = Literal["metrics", "events", "failures"]


def to_pandas(run: RunHandle, what: Table, max_points: int) -> DataFrame:
    """Return a history as a table. Raises UsageError."""
    try:
        import pandas
    except ImportError as exc:
        raise UsageError(
            "to_pandas needs pandas, which is not installed; pip install pandas"
        ) from exc
    if what == "metrics":
        return _metrics(pandas, run, max_points)
    if what == "events":
        return _rows(pandas, [event.model_dump() for event in run.events()], "seq")
    if what == "failures":
        return _rows(pandas, [failure.model_dump() for failure in run.failures()], None)
    raise UsageError(f"{what!r} is not a table of a run; use one of {', '.join(get_args(Table))}")


def _metrics(pandas: Any, run: RunHandle, max_points: int) -> DataFrame:
    """Return a row for each step; of a step that was repeated, the value that counts."""
    series = run.metrics(max_points=max_points)
    columns = {
        name: pandas.Series({step: value for step, _, value in points}, dtype="float64")
        for name, points in sorted(series.items())
    }
    at = {step: seconds for points in series.values() for step, seconds, _ in points}
    table = pandas.DataFrame(columns)
    table.insert(
        0, "at", pandas.to_datetime(pandas.Series(at, dtype="float64"), unit="s", utc=True)
    )
    table.index.name = "step"
    return table.sort_index()


def _rows(pandas: Any, rows: list[dict[str, Any]], index: str | None) -> DataFrame:
    table = pandas.DataFrame.from_records(rows)
    return table.set_index(index) if index is not None and len(rows) else table
