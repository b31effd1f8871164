"""The SDK in notebooks, in threads, and as its documentation shows it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from everstep import Client
from everstep.wire import RunStatus
from everstep.wire.events import EventKind
from tests.support.api_service import NOON, ApiService, Journal, spec

SDK = Path(__file__).parents[4] / "docs" / "sdk.md"
HOSTILE = "<script>alert(1)</script>"


async def test_a_notebook_shows_a_run_and_nothing_that_its_texts_bring(tmp_path: Path) -> None:
    async with ApiService(tmp_path) as api:
        run_id, journal = await api.running(name="shown")
        run = await asyncio.to_thread(Client(api.url, api.token("admin")).runs.get, run_id)
        assert '<progress value="1" max="30">' in run._repr_html_()
        reason = {"code": "user_error", "message": HOSTILE}
        last = journal.steps(30)
        ended = journal.event(EventKind.FINISHED, outcome="succeeded", reason=reason, step=30)
        api.apply(run_id, [last, ended])
        html = (await asyncio.to_thread(run.refresh))._repr_html_()
        assert '<progress value="30" max="30">' in html
        assert HOSTILE not in html and "&lt;script&gt;" in html


async def test_one_client_serves_many_threads(tmp_path: Path) -> None:
    async with ApiService(tmp_path) as api:
        client, barrier = Client(api.url, api.token("admin")), threading.Barrier(8)

        def one(number: int) -> None:
            barrier.wait(60)
            for _ in range(5):
                run = client.runs.create(spec(name=f"thread-{number}"))
                assert client.runs.get(run.id).name == f"thread-{number}"
                assert {found.name for found in client.runs.list(name=f"thread-{number}")} == {
                    f"thread-{number}"
                }

        def all_of_them() -> None:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(one, range(8)))

        await asyncio.to_thread(all_of_them)
        assert len(api.runs.live()) == 40


def examples(text: str) -> Iterator[str]:
    """Yield the blocks of Python in a page of the documentation."""
    for block in text.split("```python\n")[1:]:
        yield block.split("```")[0]


async def test_the_documentation_s_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ApiService(tmp_path) as api:
        api.announce(monkeypatch)
        names: dict[str, Any] = {}

        def read() -> None:
            for number, example in enumerate(examples(SDK.read_text())):
                exec(compile(example, f"{SDK.name}, example {number + 1}", "exec"), names)

        reading = asyncio.create_task(asyncio.to_thread(read))
        while not (api.runs.live() or reading.done()):  # noqa: ASYNC110  the other thread has no event for it
            await asyncio.sleep(0.01)
        await train(api, api.runs.live()[0].id)
        await reading
        assert names["run"].status is RunStatus.SUCCEEDED


async def train(api: ApiService, run_id: str) -> None:
    """What the reconciler and a driver would do."""
    api.runs.claim_submission(run_id, 0)
    journal = Journal(at=NOON)
    api.apply(run_id, [*journal.start(), journal.steps(*range(1, 31), at=NOON + 5)])
    api.clock.now += 10
    api.apply(
        run_id,
        [journal.event(EventKind.FINISHED, at=NOON + 9, outcome="succeeded", reason=None, step=30)],
    )
