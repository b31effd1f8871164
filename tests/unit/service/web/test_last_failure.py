"""The last failure and its cost at the head of a run's page; told apart when a drill did it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path

import pytest

from everstep.text import failure as failure_words
from everstep.wire import Failure
from everstep.wire.events import EventKind
from tests.support.api_service import ApiService, Journal
from tests.support.page_text import fail, text_of
from tests.support.web_browser import Browser

DIGEST = "ab" * 32
TRACEBACK = f"""Traceback (most recent call last):
  File "/tmp/everstep-0/cache/code/{DIGEST}/tasks/train.py", line 7, in loss
    raise KeyError("label")
  File "/mnt/storage/runs/run_0/workdir/data.py", line 3, in read
KeyError: 'label'"""
DEATH = (
    "The actor died unexpectedly before finishing this task.\n"
    "Worker unexpectedly exits with a connection error code 2. End of file. There are some "
    "potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory "
    "usage. (2) ray stop --force is called.\n\tpid: 101"
)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path, drills=True) as service:
        yield service


async def failures(api: ApiService, run_id: str) -> list[Failure]:
    return [
        Failure.model_validate(item)
        for item in (await api.get(f"/v1/runs/{run_id}/failures"))["items"]
    ]


async def drilled(api: ApiService, run_id: str) -> str:
    answer = await api.http.post(
        f"/v1/runs/{run_id}/drills", json={"kind": "kill_worker", "rank": 1}
    )
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def recover(journal: Journal) -> list[object]:
    journal.attempt += 1
    return [
        *journal.start(step=5),
        journal.event(EventKind.RECOVERED, recovery_s=3.1, steps_lost=0),
    ]


async def test_a_drill_is_told_apart_from_what_nobody_ordered(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    run_id, journal = await api.running()
    assert "Last failure" not in await browser.page(f"/runs/{run_id}")
    api.apply(run_id, [fail(journal, verdict="worker_lost"), *recover(journal)])
    [first] = await failures(api, run_id)
    assert first.drill is None
    drill_id = await drilled(api, run_id)
    drill = journal.event(EventKind.DRILL_STARTED, id=drill_id, kind="kill_worker", rank=1)
    api.apply(run_id, [drill, fail(journal, verdict="worker_lost"), *recover(journal)])
    first, second = await failures(api, run_id)
    assert first.drill is None and second.drill is not None
    assert (second.drill.id, second.drill.kind) == (drill_id, "kill_worker")
    assert second.drill.by == "admin of None"
    sentence = (
        "Rank 1 on node node-2 died at step 5, by drill kill_worker by admin of None (attempt 2, "
        "verdict worker_lost): 0 steps lost, training again after 3.1 s."
    )
    assert failure_words.sentence(second) == sentence
    page = await browser.page(f"/runs/{run_id}")
    head = page[page.index('id="top"') : page.index('class="tabs"')]
    assert sentence in text_of(head)
    # the next failure has nothing to do with that drill
    api.apply(run_id, [fail(journal, verdict="worker_lost")])
    assert (await failures(api, run_id))[-1].drill is None
    page = await browser.page(f"/runs/{run_id}")
    head = page[page.index('id="top"') : page.index('class="tabs"')]
    assert "drill" not in text_of(head)


async def test_a_drill_of_another_attempt_is_not_the_cause(api: ApiService) -> None:
    run_id, journal = await api.running()
    drill_id = await drilled(api, run_id)
    drill = journal.event(EventKind.DRILL_STARTED, id=drill_id, kind="kill_worker", rank=1)
    journal.attempt = 2
    api.apply(run_id, [drill, *journal.start(step=1), fail(journal, verdict="worker_lost")])
    [failure] = await failures(api, run_id)
    assert failure.drill is None


async def test_tracebacks_keep_their_indentation_and_the_users_own_paths(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    run_id, journal = await api.running()
    evidence = {"stack": TRACEBACK, "death": DEATH}
    api.apply(run_id, [fail(journal, verdict="user_error", exception=TRACEBACK, evidence=evidence)])
    page = unescape(await browser.page(f"/runs/{run_id}"))
    traceback = (
        '  File "tasks/train.py", line 7, in loss\n    raise KeyError("label")\n'
        "  File \"data.py\", line 3, in read\nKeyError: 'label'</pre>"
    )
    assert page.count(traceback) == 3  # the stack in the story, the exception, the evidence
    assert DIGEST not in page and "workdir" not in page
    assert "connection error code 2" in page and "potential root causes" not in page
    [failure] = await failures(api, run_id)
    story = "\n".join(failure_words.story(failure))
    assert DIGEST not in story and "potential root causes" not in story
    assert failure.exception == TRACEBACK  # the API has what the rank reported
