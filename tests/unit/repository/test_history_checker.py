"""The soak's checker finds what it is there to find: each history here breaks one invariant."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everstep import Client
from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from storage.logs.journal import JournalEvent
from tests.chaos.history_checker import Expected, strangers, violations
from tests.support.api_service import ApiService, Journal

FAILURE: dict[str, Any] = {
    "verdict": "worker_lost",
    "first_rank": 1,
    "node_id": "node-2",
    "step": 2,
    "exception": None,
    "evidence": {"exit": "signal 9"},
    "action": "restarted",
    "budget": "system_failures",
    "steps_lost": 0,
    "detect_s": 0.2,
    "recovery_s": 1.0,
    "world_size_before": 2,
    "world_size_after": 2,
}


async def found(api: ApiService, run_id: str, *allowed: RunStatus) -> list[str]:
    """The invariants that are broken, by name."""
    expected = Expected(frozenset(allowed), total_steps=30, samples=100, epochs=3)

    def check() -> list[str]:
        with Client(api.url, api.token("admin")) as client:
            return [words[:2] for words in violations(client.runs.get(run_id), expected)]

    return await asyncio.to_thread(check)


async def ended(
    api: ApiService, outcome: str, *failures: dict[str, Any], checkpoint: int | None = None
) -> str:
    run_id, journal = await api.running()
    reason = None if outcome == "succeeded" else {"code": "user_error", "message": "broken"}
    events = [
        journal.steps(2),
        *(journal.event(EventKind.FAILURE, **failure) for failure in failures),
    ]
    if checkpoint is not None:
        events.append(journal.checkpoint(checkpoint))
    api.apply(
        run_id, [*events, journal.event(EventKind.FINISHED, outcome=outcome, reason=reason, step=2)]
    )
    return run_id


async def test_a_history_in_which_nothing_is_wrong(api: ApiService) -> None:
    assert await found(api, await ended(api, "failed", FAILURE), RunStatus.FAILED) == []


async def test_a_run_that_does_not_end_or_ends_as_it_may_not(api: ApiService) -> None:
    run_id, _ = await api.running()
    assert await found(api, run_id, RunStatus.SUCCEEDED) == ["I1"]
    assert await found(api, await ended(api, "failed"), RunStatus.SUCCEEDED) == ["I5"]


async def test_a_success_without_its_last_checkpoint_steps_and_samples(api: ApiService) -> None:
    assert await found(api, await ended(api, "succeeded"), RunStatus.SUCCEEDED) == [
        "I5",
        "I3",
        "I3",
    ]


async def test_a_checkpoint_that_is_listed_and_gone(api: ApiService) -> None:
    api.storage_gate.check()  # as a service does before it has any run
    run_id = await ended(api, "failed", FAILURE, checkpoint=2)
    assert await found(api, run_id, RunStatus.FAILED) == ["I2"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_rank_of_an_older_attempt_that_tells_once_a_newer_one_has_begun(
    api: ApiService, is_late: bool
) -> None:
    run_id, journal = await api.running()
    newer = Journal(submission=journal.submission, attempt=journal.attempt + 1, at=journal.at)
    newer.n = journal.n
    events = newer.start(0)
    journal.n = newer.n
    late = (
        [
            journal.event(
                EventKind.METRICS, points=[{"step": 1, "at": journal.at, "values": {"loss": 1.0}}]
            )
        ]
        if is_late
        else []
    )
    failed = [
        journal.event(EventKind.FAILURE, **FAILURE),
        journal.event(EventKind.FINISHED, outcome="failed", reason=None, step=0),
    ]
    api.apply(run_id, [*events, *late, *failed])
    assert await found(api, run_id, RunStatus.FAILED) == (["I1"] if is_late else [])


async def test_a_failure_that_names_nobody(api: ApiService) -> None:
    nameless = FAILURE | {"first_rank": None, "verdict": "unknown"}
    assert await found(api, await ended(api, "failed", nameless), RunStatus.FAILED) == ["I7"]


def hung(journal: Journal, detect_s: float) -> list[JournalEvent]:
    """Rank 1 is stopped after step 2; 12.8 s later it is taken for hung, and a second later step 3
    is done."""
    noon = journal.at
    seconds = [
        journal.event(
            EventKind.METRICS,
            at=noon + 2,
            points=[{"step": 2, "at": noon + 2, "values": {"loss": 1.0}}],
        )
    ]
    failed = FAILURE | {"verdict": "hang", "detect_s": detect_s}
    seconds.append(journal.event(EventKind.FAILURE, at=noon + 15, **failed))
    seconds.append(journal.event(EventKind.ATTEMPT_ENDED, at=noon + 15, cause="hang", last_step=2))
    recovery = {
        "detect_s": detect_s,
        "recovery_s": 1.0,
        "steps_lost": 0,
        "world_size_before": 2,
        "world_size_after": 2,
    }
    seconds.append(journal.event(EventKind.RECOVERED, at=noon + 15.8, phases={}, **recovery))
    seconds.append(
        journal.event(
            EventKind.METRICS,
            at=noon + 16,
            points=[{"step": 3, "at": noon + 15.8, "values": {"loss": 1.0}}],
        )
    )
    return seconds


@pytest.mark.parametrize(("detect_s", "broken"), [(12.8, []), (0.0, ["I6"]), (30.0, ["I6"])])
async def test_a_failure_that_tells_another_time_than_it_took_to_notice(
    api: ApiService, detect_s: float, broken: list[str]
) -> None:
    run_id, journal = await api.running()
    api.clock.now += 20
    events = hung(journal, detect_s)
    reason = {"code": "user_error", "message": "broken"}
    api.apply(
        run_id,
        [*events, journal.event(EventKind.FINISHED, outcome="failed", reason=reason, step=3)],
    )
    assert await found(api, run_id, RunStatus.FAILED) == broken


async def test_what_strangers_are_told(api: ApiService) -> None:
    run_id = await api.create()
    elsewhere, own = api.token("submitter", "elsewhere"), api.token("submitter", "default")
    assert await asyncio.to_thread(lambda: list(strangers(api.url, elsewhere, run_id))) == []
    assert await asyncio.to_thread(lambda: list(strangers(api.url, own, run_id))), (
        "somebody of the project is no stranger"
    )
