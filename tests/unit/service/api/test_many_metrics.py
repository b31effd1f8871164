"""A run that reports any number of metrics costs others no more than one with a few."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from everstep.wire.events import MAX_NAMES, MAX_STEP_NAMES, EventKind, NameLimit
from tests.support.api_service import ApiService
from tests.unit.train_fn.session.test_reporter import begin


def test_the_first_names_are_admitted_and_stay() -> None:
    limit = NameLimit()
    assert limit.refused([f"m{n}" for n in range(300)], 250) == [f"m{n}" for n in range(250, 300)]
    assert limit.refused(["m0", "new", "best"], 250, always=("best",)) == ["new"]
    assert limit.refused(["best"]) == []


async def test_a_page_of_runs_stays_small(api: ApiService) -> None:
    """200,000 names made the page 6.8 MB, and /metrics take 100 s. A journal may hold them whatever
    wrote it."""
    run_id, journal = await api.running(
        checkpoint={"best_metric": "val_quality", "best_mode": "max"}
    )
    values = {f"m{n}": float(n) for n in range(5_000)}
    api.apply(
        run_id,
        [
            journal.event(
                EventKind.METRICS,
                points=[{"step": 1, "at": journal.at, "values": {"loss": 0.5, **values}}],
            )
        ],
    )
    api.apply(
        run_id,
        [journal.event(EventKind.EVALUATED, step=1, epoch=0, metrics={**values, "quality": 0.75})],
    )
    api.apply(
        run_id,
        [
            journal.event(
                EventKind.METRICS,
                points=[{"step": 2, "at": journal.at, "values": {"loss": 0.25, **values}}],
            )
        ],
    )
    answer = await api.http.get("/v1/runs")
    assert len(answer.content) < 20_000
    [found] = answer.json()["items"]
    assert len(found["metrics"]) == MAX_NAMES + 1 and (
        found["metrics"]["loss"],
        found["metrics"]["val_quality"],
    ) == (0.25, 0.75)
    assert found["best"]["value"] == 0.75
    assert len(api.series.names(run_id)) <= MAX_NAMES + 1


async def test_values_that_are_not_finite_are_counted_too(api: ApiService) -> None:
    run_id, journal = await api.running()
    values: dict[str, Any] = {f"m{n}": None for n in range(1_000)}
    api.apply(
        run_id,
        [
            journal.event(
                EventKind.METRICS, points=[{"step": 1, "at": journal.at, "values": values}]
            )
        ],
    )
    assert len(api.series.names(run_id)) <= MAX_NAMES


def test_a_reporter_leaves_out_what_is_beyond_the_limit_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    reporter, state, journal = begin()
    for step in (1, 2):
        state.step = step
        values = {"loss": 0.5, **{f"m{n}": float(n) for n in range(1_000)}}
        reporter.step_done(values, 8)
        assert (
            len(values) == MAX_STEP_NAMES + 2
            and {"loss", "samples_per_s", "step_s"} <= values.keys()
        )
    kept = reporter.limited(
        {f"val_{n}": 1.0 for n in range(1_000)} | {"val_quality": 2.0}, "quality"
    )
    assert len(kept) == MAX_NAMES - MAX_STEP_NAMES + 1 and kept["val_quality"] == 2.0
    assert (
        len([record for record in caplog.records if "names of metrics" in record.getMessage()]) == 1
    )
    assert journal is not None
