"""A run as an object: what it is now, what happened to it, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from everstep.client.drill_handle import DrillHandle
from everstep.client.follow import Follower, wait_until
from everstep.client.notebook import Display, is_notebook
from everstep.client.profile_handle import ProfileHandle
from everstep.client.run_checkpoints import RunCheckpoints
from everstep.errors import RunFailed
from everstep.spec.run_spec import RunSpec
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
from everstep.wire.drills import Drill, DrillKind
from everstep.wire.profiles import Profile

_POLL_FIRST_S, _POLL_MOST_S = 0.1, 1.0


class RunHandle(RunCheckpoints):
    """One run. Its fields (``run.status``, ``run.step``, …) are those of the last answer of the
    service, kept whole in ``run.run``; ``refresh()`` asks again.

    >>> run = client.runs.create(spec)          # doctest: +SKIP
    >>> run.wait(timeout_s=600).run.metrics     # doctest: +SKIP
    {'loss': 0.02, 'val_accuracy': 0.98}

    Two fields share their name with what is asked for: the latest metrics are ``run.run.metrics``,
    the goodput so far ``run.run.goodput``.
    """

    def spec(self) -> RunSpec:
        """The spec as resolved, with every default filled in."""
        return self._transport.get(f"{self._path}/spec", RunSpec)

    # ------------------------------------------------------------ waiting and following

    def wait(self, timeout_s: float | None = None) -> RunHandle:
        """Wait until the run has ended; returns itself if it SUCCEEDED.

        A service that is away for a while, or a pause, does not end the waiting. Raises RunFailed
        for FAILED and CANCELLED, with the last failure and its verdict; WaitTimeout after
        ``timeout_s`` seconds; Unavailable if the service stays away. In a notebook the run, with a
        bar of its progress, is shown below the cell meanwhile.
        """
        display = Display() if is_notebook() else None

        def look() -> None:
            self.refresh()
            if display is not None:
                display.show(self.run)

        wait_until(
            lambda: self.run.status.terminal,
            look,
            lambda: (
                f"run {self.id} is still {self.run.status} at step {self.run.step} after "
                f"{timeout_s:g} s"
            ),
            self._transport.timing,
            self._patience,
            timeout_s=timeout_s,
            first_pause_s=_POLL_FIRST_S,
            most_pause_s=_POLL_MOST_S,
        )
        if self.run.status is not RunStatus.SUCCEEDED:
            raise self.failed()
        return self

    def failed(self) -> RunFailed:
        """The error that tells why a run ended FAILED or CANCELLED."""
        failures = self.failures()
        return RunFailed(self.run, failures[-1] if failures else None)

    def events(self, after: int = 0, *, follow: bool = False) -> Iterator[Event]:
        """What happened, in order, behind the event ``after``. With ``follow`` new events as they
        come, until the one that ends the run; lost connections are made again by themselves, and no
        event is lost or given twice."""
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
        """Lines that the ranks and the driver (rank None) logged over all attempts; of one ``rank``
        or ``attempt`` only, if asked. With ``follow`` new lines as they come, until the run has
        ended."""
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

    # ------------------------------------------------------------ history

    def metrics(
        self, *names: str, max_points: int = 500
    ) -> dict[str, list[tuple[int, float, float | None]]]:
        """For each name ``[(step, unix seconds, value), …]``, thinned to ``max_points`` so that
        extremes stay; a value that was not finite is None. Without names every metric of the
        run."""
        found = self._transport.get(
            f"{self._path}/metrics",
            MetricSeries,
            names=",".join(names) if names else None,
            max_points=max_points,
        )
        return found.series

    def failures(self, *, lines: int = 10) -> list[Failure]:
        """Every failure with its verdict, its evidence and what was done, oldest first; with so
        many of the first failing rank's last ``lines``."""
        return list(self._transport.pages(f"{self._path}/failures", Failure, {"lines": lines}))

    def stragglers(self) -> StragglerReport:
        """Each rank's own time in a step and its waiting for the others, and the ranks that were
        found slow."""
        return self._transport.get(f"{self._path}/stragglers", StragglerReport)

    def attempts(self) -> list[Attempt]:
        """Every worker group with its ranks, oldest first."""
        return list(self._transport.pages(f"{self._path}/attempts", Attempt))

    def samples(self) -> Samples:
        """For each epoch that ended how many samples were used once, twice or never, over the
        committed lineage."""
        return self._transport.get(f"{self._path}/samples", Samples)

    def goodput(self) -> Goodput:
        """Where the run's wall time went."""
        return self._transport.get(f"{self._path}/goodput", Goodput)

    # ------------------------------------------------------------ actions

    def cancel(self) -> RunHandle:
        """Stop for good, after a last checkpoint. Raises Conflict for a run that has ended."""
        return self._act("cancel")

    def pause(self) -> RunHandle:
        """Stop after a checkpoint and give the resources back; ``resume()`` goes on from there."""
        return self._act("pause")

    def resume(self) -> RunHandle:
        """Queue a paused run again."""
        return self._act("resume")

    def drill(self, kind: DrillKind | str, *, rank: int = 0) -> DrillHandle:
        """Break something of this run on purpose, to see that it recovers: ``kill_worker``,
        ``hang_worker``, ``kill_node``, ``drain_node`` (of ``rank``, or of its node),
        ``kill_driver``, ``corrupt_checkpoint``. Needs an admin's token and a service that was
        started with ``--drills``.

        >>> run.drill("kill_worker", rank=1).wait().report.parity.in_parity   # doctest: +SKIP
        True

        Raises AuthError, Conflict for a run that does not train now, InvalidSpec for a rank that it
        does not have.
        """
        body = {"kind": str(kind), "rank": rank}
        response = self._transport.send("POST", f"{self._path}/drills", body=body, repeatable=False)
        return DrillHandle(
            self._transport, self.id, self._transport.parse(response, Drill), self._patience
        )

    def drills(self) -> list[DrillHandle]:
        """Every drill of this run with its report, oldest first."""
        found = self._transport.pages(f"{self._path}/drills", Drill)
        return [DrillHandle(self._transport, self.id, drill, self._patience) for drill in found]

    def profile(self, *, rank: int = 0, steps: int = 10) -> ProfileHandle:
        """Have a rank of this run, which trains, record its next steps with torch's profiler; no
        result changes.

        >>> run.profile(rank=0, steps=10).wait().download("trace.json.gz")   # doctest: +SKIP
        PosixPath('trace.json.gz')

        Raises Conflict for a run that does not train now, InvalidSpec for a rank that it does not
        have.
        """
        response = self._transport.send(
            "POST", f"{self._path}/profiles", body={"rank": rank, "steps": steps}, repeatable=False
        )
        return ProfileHandle(
            self._transport, self.id, self._transport.parse(response, Profile), self._patience
        )

    def profiles(self) -> list[ProfileHandle]:
        """Every profile of this run, oldest first."""
        found = self._transport.pages(f"{self._path}/profiles", Profile)
        return [
            ProfileHandle(self._transport, self.id, profile, self._patience) for profile in found
        ]

    def delete(self) -> None:
        """Remove a run that has ended, with its checkpoints, logs and history."""
        self._transport.send("DELETE", self._path, repeatable=False)

    def _act(self, action: str) -> RunHandle:
        self.run = self._transport.parse(
            self._transport.send("POST", f"{self._path}/{action}", repeatable=False), Run
        )
        return self


def ends_run(event: Event) -> bool:
    """Whether an event is the last of its run."""
    return event.kind == "status" and event.data.get("to") in TERMINAL_STATUSES
