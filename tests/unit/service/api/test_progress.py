"""How far, how fast, how long still, and what a run has used: through failures, pauses and several
attempts."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from everstep.text import words
from everstep.wire import Run
from everstep.wire.events import EventKind
from service.db.tables import runs as runs_table
from tests.support.api_service import NOON, ApiService, Journal

HOUR = 3600.0


async def begun(api: ApiService, world_size: int = 2, **fields: Any) -> tuple[str, Journal]:
    """A run whose ranks have just started, at NOON."""
    run_id = await api.create(**fields)
    api.runs.claim_submission(run_id, 0)
    api.runs.record_job(run_id, 1, f"{run_id}-s001")
    journal = Journal(at=api.clock.now)
    api.apply(run_id, journal.start(world_size=world_size))
    return run_id, journal


async def answer(api: ApiService, run_id: str) -> Run:
    one = Run.model_validate(await api.get(f"/v1/runs/{run_id}"))
    [listed] = (await api.get("/v1/runs"))["items"]
    assert Run.model_validate(listed) == one  # one model, whoever asks
    return one


def at(api: ApiService, journal: Journal, seconds: float) -> None:
    api.clock.now = journal.at = NOON + seconds


async def test_a_run_that_trains_says_how_far_how_fast_and_how_long_still(api: ApiService) -> None:
    run_id, journal = await begun(api)
    run = await answer(api, run_id)
    assert run.progress is not None and run.usage is not None
    assert (run.progress.fraction, run.progress.steps_per_s, run.progress.eta_s) == (0, None, None)
    assert (run.usage.cpu_h, run.usage.gpu_h, run.usage.cost) == (0, 0, None)
    for step in range(1, 7):
        at(api, journal, 10 + step / 2)
        api.apply(run_id, [journal.steps(step)])
    run = await answer(api, run_id)
    assert run.progress is not None and run.usage is not None
    assert run.progress.fraction == 6 / 30
    assert run.progress.steps_per_s == pytest.approx(2.0)
    assert run.progress.eta_s == pytest.approx(12.0)
    assert run.progress.elapsed_s == 13
    assert run.usage.cpu_h == pytest.approx(2 * 13 / HOUR)
    assert words.headline(run) == (
        "20 % · 2 steps/s · 12.0 s left · loss 0.5 · 13.0 s elapsed · 0.00722 CPU-h"
    )
    assert words.time_left(run) == "12.0 s"


async def test_a_pace_falls_while_no_step_comes(api: ApiService) -> None:
    run_id, journal = await begun(api)
    for step in (1, 2):
        at(api, journal, step)
        api.apply(run_id, [journal.steps(step)])
    api.clock.now = NOON + 2 + 100
    run = await answer(api, run_id)
    assert run.progress is not None
    assert run.progress.steps_per_s == pytest.approx(1 / 100)
    assert run.progress.eta_s == pytest.approx(28 * 100)
    assert words.headline(run).startswith("6 % · 1 min 40 s/step · 46 min 40 s left")


async def test_the_pace_is_that_of_the_last_minute(api: ApiService) -> None:
    run_id, journal = await begun(api)
    for step in range(1, 11):
        at(api, journal, step * 60)
        api.apply(run_id, [journal.steps(step)])
    for step in range(11, 28):
        at(api, journal, 600 + (step - 10) * 10)
        api.apply(run_id, [journal.steps(step)])
    run = await answer(api, run_id)
    assert run.progress is not None and run.progress.steps_per_s is not None
    assert 0.08 < run.progress.steps_per_s <= 0.1  # not the mean, which is 0.035


async def test_each_attempt_counts_the_resources_it_held(api: ApiService) -> None:
    api.set(price_cpu_hour=0.5, currency="EUR")
    scaling = {"min_workers": 1, "max_workers": 3, "resources_per_worker": {"CPU": 4.0}}
    run_id, journal = await begun(api, world_size=3, scaling=scaling)
    at(api, journal, 100)
    api.apply(run_id, [journal.steps(1), journal.event(EventKind.FAILURE, verdict="node_lost")])
    api.apply(run_id, [journal.event(EventKind.ATTEMPT_ENDED, cause="node_lost", last_step=1)])
    run = await answer(api, run_id)
    assert run.status == "RECOVERING"
    assert run.progress is not None and run.usage is not None
    assert run.progress.steps_per_s is None and run.progress.eta_s is None
    held = 3 * 4 * 100
    at(api, journal, 150)  # nothing is held between attempts
    run = await answer(api, run_id)
    assert run.usage is not None and run.usage.cpu_h == pytest.approx(held / HOUR)
    journal.attempt = 2
    api.apply(run_id, journal.start(step=1, world_size=2))
    at(api, journal, 250)
    api.apply(run_id, [journal.steps(2)])
    held += 2 * 4 * 100
    run = await answer(api, run_id)
    assert run.progress is not None and run.usage is not None
    assert run.progress.steps_per_s is None  # of the new attempt, not of the gap before it
    assert run.usage.cpu_h == pytest.approx(held / HOUR)
    assert run.usage.cost == pytest.approx(0.5 * held / HOUR) and run.usage.currency == "EUR"
    await api.http.post(f"/v1/runs/{run_id}/pause")
    at(api, journal, 260)
    api.apply(run_id, [journal.event(EventKind.FINISHED, outcome="stopped", step=2)])
    held += 2 * 4 * 10
    api.clock.now += 10_000  # paused
    run = await answer(api, run_id)
    assert run.status == "PAUSED" and run.progress is not None and run.usage is not None
    assert run.usage.cpu_h == pytest.approx(held / HOUR)
    assert run.progress.elapsed_s == 10_260 and run.progress.eta_s is None
    await api.http.post(f"/v1/runs/{run_id}/cancel")
    ended = await answer(api, run_id)
    api.clock.now += 10_000
    assert await answer(api, run_id) == ended
    assert "0.29 EUR" in words.headline(ended)


async def test_gpus_are_counted_where_ranks_train_on_them(api: ApiService) -> None:
    api.set(price_gpu_hour=2.0)
    run_id, journal = await begun(api)
    event = journal.event(
        EventKind.TRAINING_STARTED, total_steps=30, steps_per_epoch=10, device="cuda"
    )
    api.apply(run_id, [event])
    at(api, journal, 1800)
    run = await answer(api, run_id)
    assert run.usage is not None
    assert run.usage.gpu_h == pytest.approx(1.0) and run.usage.cpu_h == pytest.approx(1.0)
    assert run.usage.cost == pytest.approx(2.0)
    assert words.usage_parts(run.usage) == ["1 GPU-h", "1 CPU-h", "2.00 USD"]


async def test_what_is_not_known_is_null(api: ApiService) -> None:
    run_id, journal = await begun(api)
    api.apply(
        run_id, [journal.event(EventKind.TRAINING_STARTED, total_steps=None, steps_per_epoch=None)]
    )
    for step in (1, 2):
        at(api, journal, step)
        api.apply(run_id, [journal.steps(step)])
    run = await answer(api, run_id)
    assert run.progress is not None
    assert run.progress.fraction is None and run.progress.eta_s is None
    assert run.progress.steps_per_s == pytest.approx(1.0)
    assert words.headline(run).startswith("1 steps/s · loss 0.5 · 2.0 s elapsed")
    with api.database.write() as connection:  # as an older version leaves it
        connection.execute(update(runs_table).values(work_ledger=None))
    at(api, journal, 3)
    api.apply(run_id, [journal.steps(3)])
    run = await answer(api, run_id)
    assert run.progress is not None and run.usage is not None
    assert run.progress.steps_per_s is None
    assert (run.usage.gpu_h, run.usage.cpu_h, run.usage.cost) == (None, None, None)
    assert words.usage_parts(run.usage) == []


async def test_a_step_that_is_reported_again_is_no_progress(api: ApiService) -> None:
    run_id, journal = await begun(api)
    for step, seconds in ((1, 1), (2, 2), (2, 3), (1, 4), (3, 3)):
        at(api, journal, seconds)
        api.apply(run_id, [journal.steps(step)])
    run = await answer(api, run_id)
    assert run.progress is not None and run.progress.steps_per_s == pytest.approx(1.0)
