"""The page of a run's logs: in the order of time over driver, attempts and ranks."""

from __future__ import annotations

import re
from html import unescape

import pytest

from everstep.wire import LogLine
from service.api import streams
from service.web.logs import _all_lines
from storage.errors import StorageUnreadable
from storage.logs.rank_logs import LogRecord, RankLogWriter
from storage.run_dir import RunDir
from tests.support.api_service import NOON, ApiService
from tests.support.web_browser import Browser


@pytest.fixture
async def browser(api: ApiService) -> Browser:
    return await Browser.logged_in(api, api.token("admin"))


def write(api: ApiService, run_id: str, rank: int | None, attempt: int, *seconds: float) -> None:
    """Log a line at each of these seconds, which says when."""
    with RankLogWriter(RunDir(api.storage, run_id), 1, attempt, rank) as writer:
        writer.write([LogRecord(NOON + at, "INFO", f"at {at:08.2f}") for at in seconds])


async def shown(browser: Browser, path: str) -> tuple[list[str], str]:
    """The lines of a page, and the address of older ones."""
    html = await browser.page(path)
    older = re.findall(r'href="([^"]*before=\d+)">Older lines', html)
    return re.findall(r">(at [0-9.]+)<", html), unescape(older[0]) if older else ""


async def test_a_line_that_is_read_late_takes_its_place(api: ApiService, browser: Browser) -> None:
    run_id, _ = await api.running()
    path = f"/runs/{run_id}/logs"
    write(api, run_id, 0, 1, 10, 30)
    view = api.logs.view(run_id, None, None)
    await view.read(0, 10)
    write(api, run_id, 1, 1, 20)  # that rank's lines come from a slower node
    await view.read(0, 10)
    assert (await shown(browser, path))[0] == ["at 00010.00", "at 00020.00", "at 00030.00"]


async def test_all_lines_are_downloaded_without_colours(api: ApiService, browser: Browser) -> None:
    run_id, _ = await api.running()
    write(api, run_id, 0, 1, *range(1500))
    with RankLogWriter(RunDir(api.storage, run_id), 1, 1, 1) as writer:
        writer.write([LogRecord(NOON, "warning", "\x1b[31mred\x1b[0m")])
    text = (await browser.http.get(f"/runs/{run_id}/logs.txt")).text
    assert len(text.splitlines()) == 1501 and "attempt 1 rank 1 WARNING red\n" in text
    assert (await browser.http.get(f"/runs/{run_id}/logs.txt?rank=1")).text.count("\n") == 1
    assert "\x1b" not in await browser.page(f"/runs/{run_id}/logs")


async def test_a_download_has_the_limits_of_streams(
    api: ApiService, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, _ = await api.running()
    with RankLogWriter(RunDir(api.storage, run_id), 1, 1, 0) as writer:
        writer.write([LogRecord(NOON + at, "INFO", f"{at:05}" * 4000) for at in range(30)])
    path = f"/runs/{run_id}/logs.txt"
    answer = await browser.http.get(path)
    assert answer.text.count("\n") == 30 and "00029" in answer.text
    view = api.logs.view(run_id, None, None)
    sizes = [len(piece) async for piece in _all_lines(view, await view.read(0, 500))]
    assert sum(sizes) == len(answer.content) and max(sizes) < streams.PIECE_BYTES + 21_000

    async def unread(*_: object, **__: object) -> list[LogLine]:
        raise StorageUnreadable("the storage is away")

    with monkeypatch.context() as away:
        away.setattr(type(view), "read", unread)
        assert (await browser.http.get(path)).status_code == 503, "and no file that is cut"
    monkeypatch.setattr(streams, "MOST_OF_CALLER", 0)
    for each in (path, f"/curves.csv?run={run_id}&name=loss"):
        assert (await browser.http.get(each)).status_code == 429


async def test_pages_of_many_ranks_join(api: ApiService, browser: Browser) -> None:
    run_id, _ = await api.running()
    write(api, run_id, None, 0, *(at * 7.0 for at in range(400)))
    for rank in range(3):
        write(api, run_id, rank, 1, *(at * 1.5 + rank / 4 for at in range(2200)))
    seen: list[str] = []
    path = f"/runs/{run_id}/logs"
    while path:
        lines, path = await shown(browser, path)
        seen = [*lines, *seen]
    assert len(seen) == 400 + 3 * 2200 and seen == sorted(seen)
