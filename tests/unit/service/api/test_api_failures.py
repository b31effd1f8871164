"""Failures over HTTP and on the command line: the evidence with the last lines, and what the kernel
said afterwards."""

from __future__ import annotations

from typing import Any

from everstep.text import events as event_words
from everstep.text import failure as failure_words
from everstep.wire import Failure
from everstep.wire.events import EventKind
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService

LOST = {
    "verdict": "worker_lost",
    "first_rank": 1,
    "node_id": "node-2-long-name",
    "step": 7,
    "exception": None,
    "action": "restart",
    "budget": "system_failures",
    "detect_s": 0.2,
    "world_size_before": 2,
    "evidence": {
        "pid": 101,
        "node_alive": True,
        "death": (
            "The actor died.\nWorker exit type: SYSTEM_ERROR, worker exit detail: connection "
            "error code 2.\nSome causes: …"
        ),
        "ranks": [{"rank": 0, "state": "collateral"}, {"rank": 1, "state": "died"}],
    },
}
RECOVERED = {
    **{"recovery_s": 1.4, "steps_lost": 0, "world_size_before": 2, "world_size_after": 2},
    "phases": {"leave": 0.1, "decide": 0.1, "start": 1.0, "restore": 0.1, "first_step": 0.1},
}


def log(
    api: ApiService, run_id: str, rank: int | None, *messages: str, submission: int = 1
) -> None:
    with RankLogWriter(RunDir(api.storage, run_id), submission, 1, rank) as writer:
        writer.write([LogRecord(NOON + at, "INFO", message) for at, message in enumerate(messages)])


async def failures(api: ApiService, run_id: str, query: str = "") -> list[Failure]:
    return [
        Failure.model_validate(item)
        for item in (await api.get(f"/v1/runs/{run_id}/failures{query}"))["items"]
    ]


async def test_the_last_lines_of_the_rank_that_failed_first(api: ApiService) -> None:
    run_id, journal = await api.running()
    log(api, run_id, 0, "of another rank")
    log(api, run_id, 1, *(f"line {number}" for number in range(30)))
    lost = journal.event(EventKind.FAILURE, **LOST)
    journal.attempt += 1
    api.apply(run_id, [lost, journal.event(EventKind.RECOVERED, **RECOVERED)])
    [found] = await failures(api, run_id)
    assert [line.message for line in found.last_lines] == [
        f"line {number}" for number in range(20, 30)
    ]
    assert (found.last_lines[0].rank, found.submission, found.recovery_s) == (1, 1, 1.4)
    assert [line.message for line in (await failures(api, run_id, "?lines=2"))[0].last_lines] == [
        "line 28",
        "line 29",
    ]
    assert (await failures(api, run_id, "?lines=0"))[0].last_lines == ()
    text = "\n".join([failure_words.headline(found), *failure_words.story(found)])
    for words in (
        "rank 1 on node node-2-l died at step 7",
        "evidence: Worker exit type: SYSTEM_ERROR, worker exit detail: connection error code 2.",
        "node: still answers",
        "other ranks: 0 failed only because their peer did",
        "INFO line 29",
        "training again after 1.4 s (most of it: start, 1.0 s)",
    ):
        assert words in text


async def test_a_driver_that_was_lost_speaks_by_its_last_lines(api: ApiService) -> None:
    run_id, journal = await api.running()
    log(api, run_id, None, "driver says", "good-bye")
    api.runs.claim_submission(run_id, 1)
    log(api, run_id, None, *[""] * 10, "long after", submission=2)
    journal.submission, journal.n = 2, 0
    lost: dict[str, Any] = {
        **LOST,
        "verdict": "control_plane",
        "first_rank": None,
        "node_id": None,
        "evidence": {},
    }
    api.apply(run_id, [journal.event(EventKind.FAILURE, at=NOON + 5, **lost)])
    [found] = await failures(api, run_id, "?lines=3")
    assert [line.message for line in found.last_lines if line.message] == []
    [found] = await failures(api, run_id, "?lines=8")
    assert [line.message for line in found.last_lines if line.message] == [
        "driver says",
        "good-bye",
    ]


async def test_what_the_kernel_says_afterwards_changes_the_verdict(api: ApiService) -> None:
    run_id, journal = await api.running()
    line = "Out of memory: Killed process 101 (ray::train)"
    evidence = {
        "rank": 1,
        "node_id": "node-2-long-name",
        "pid": 101,
        "oom_line": line,
        "oom_kills": None,
    }
    api.apply(
        run_id,
        [
            journal.event(EventKind.FAILURE, **LOST),
            journal.event(EventKind.RECOVERED, **RECOVERED),
            journal.event(EventKind.EVIDENCE, **evidence),
            journal.event(EventKind.FAILURE, **{**LOST, "first_rank": 0}),
        ],
    )
    first, second = await failures(api, run_id)
    assert (first.verdict, first.evidence["oom_line"], first.evidence["pid"]) == (
        "out_of_memory",
        line,
        101,
    )
    assert second.verdict == "worker_lost"
    text = "\n".join([failure_words.headline(first), *failure_words.story(first)])
    assert (
        "rank 1 on node node-2-l ran out of memory at step 7" in text and f"kernel: {line}" in text
    )
    assert "the OOM killer ended rank" in (event_words.event(_newest(api, run_id)) or "")


def _newest(api: ApiService, run_id: str) -> Any:
    from service.api.answers import event_answer

    row = next(iter(api.events.newest(run_id, EventKind.EVIDENCE)), None)
    assert row is not None
    return event_answer(row)
