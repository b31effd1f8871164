"""The history of a run: metrics, failures, attempts, and how its time and samples were used."""

from __future__ import annotations

from everstep.client.event_files import RunEventFiles
from everstep.wire import Attempt, Failure, Goodput, MetricSeries, Samples, StragglerReport


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

    def attempts(self) -> list[Attempt]:
        """Return every attempt with its ranks, oldest first."""
        return list(self._transport.pages(f"{self._path}/attempts", Attempt))

    def samples(self) -> Samples:
        """Return for each finished epoch how many samples were used once, more than once or never,
        over the committed lineage."""
        return self._transport.get(f"{self._path}/samples", Samples)

    def goodput(self) -> Goodput:
        """Return how the run spent its wall time."""
        return self._transport.get(f"{self._path}/goodput", Goodput)
