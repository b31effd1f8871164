"""The page of a run's events: newest first, by group, with a page's worth of any history."""

from __future__ import annotations

import re
from html import unescape

import pytest

from everstep.text import events as event_words
from everstep.wire import Event
from everstep.wire.events import EventKind
from service.web.logs import PAGE_EVENTS, SHOWN
from tests.support.api_service import NOON, ApiService
from tests.support.page_text import text_of
from tests.support.web_browser import Browser


@pytest.fixture
async def browser(api: ApiService) -> Browser:
    return await Browser.logged_in(api, api.token("admin"))


def numbers(html: str) -> list[int]:
    """The numbers of the events in a page, as they stand there."""
    return [int(found) for found in re.findall(r'<td class="dim r">(\d+)</td>', html)]


async def test_events_are_newest_first_and_pages_join(api: ApiService, browser: Browser) -> None:
    run_id, journal = await api.running()
    api.apply(
        run_id,
        [
            journal.event(EventKind.EVALUATED, step=step, epoch=0, metrics={"accuracy": 0.5})
            for step in range(2, 2 * PAGE_EVENTS + 30)
        ],
    )
    seen: list[int] = []
    path = f"/runs/{run_id}/events"
    while path:
        html = await browser.page(path)
        assert len(numbers(html)) <= PAGE_EVENTS
        seen += numbers(html)
        older = re.findall(r'href="([^"]*)" rel="next"', html)
        path = unescape(older[0]) if older else ""
    told = [
        row.seq
        for row in api.events.after(run_id, 0, 1000)
        if event_words.event(_event(row.kind, row.data)) is not None
    ]
    assert seen == told[::-1] and len(seen) > 2 * PAGE_EVENTS
    assert 'data-poll="1500"' in await browser.page(f"/runs/{run_id}/events")


async def test_a_group_is_chosen(api: ApiService, browser: Browser) -> None:
    run_id, journal = await api.running()
    api.apply(
        run_id,
        [
            journal.checkpoint(10, accuracy=0.5),
            journal.event(EventKind.EVALUATED, step=10, epoch=1, metrics={"accuracy": 0.5}),
        ],
    )
    text = text_of(await browser.page(f"/runs/{run_id}/events?show=checkpoints"))
    assert "checkpoint of step 10" in text and "epoch 1" not in text
    assert "No such events" in await browser.page(f"/runs/{run_id}/events?show=failures")
    assert "epoch 1" in text_of(await browser.page(f"/runs/{run_id}/events?show=nonsense"))


def test_no_event_that_has_words_is_left_out() -> None:
    silent = set(EventKind) - SHOWN
    assert [kind for kind in silent if event_words.event(_event(kind, {})) is not None] == []


def _event(kind: str, data: dict[str, object]) -> Event:
    return Event.model_validate(
        {"seq": 1, "at": NOON, "kind": kind, "submission": 1, "attempt": 1, "data": data}
    )
