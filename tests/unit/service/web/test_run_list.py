"""The list of runs: chosen columns and an order, both in its URL."""

from __future__ import annotations

import re
from html import unescape

from tests.support.api_service import ApiService
from tests.support.page_text import HOSTILE
from tests.support.web_browser import Browser


def names(html: str) -> list[str]:
    return re.findall(r'<a class="name" href="[^"]*">([^<]*)</a>', html)


async def test_a_list_is_sorted_over_its_pages_by_a_field_of_the_spec(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    for number in range(60):
        await api.create(
            name=f"n{number}", optimizer={"name": "adamw", "lr": (number * 7 % 60 + 1) / 1e3}
        )
    first = await browser.page("/runs?columns=spec.optimizer.lr,owner&sort=spec.optimizer.lr")
    [address] = re.findall(r'href="([^"]*)" rel="next"', first)
    second = await browser.page(unescape(address))
    found = [
        float(each) for each in re.findall(r'data-title="optimizer.lr">([\d.e-]+)<', first + second)
    ]
    assert found == sorted(found) and len(found) == 60
    assert 'data-title="Owner">admin of None</td>' in first and "sort=-goodput" not in first
    assert 'aria-sort="ascending"><a href="/runs?sort=-spec.optimizer.lr&amp;columns=' in first
    down = await browser.page("/runs?sort=-spec.optimizer.lr")
    assert names(down)[:1] == [names(second)[-1]]


async def test_wrong_columns_and_orders_are_told(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("viewer"))
    assert "is not a column" in await browser.page("/runs?columns=colour", 422)
    assert "cannot sort by this" in await browser.page("/runs?sort=colour", 422)
    many = ",".join(f"metrics.m{number}" for number in range(25))
    assert "at most 24 columns" in await browser.page(f"/runs?columns={many}", 422)
    for _ in range(51):
        await api.create()
    page = await browser.page("/runs?sort=name")
    [address] = re.findall(r'href="([^"]*)" rel="next"', page)
    await browser.page(unescape(address).replace("sort=name", "sort=-name"), 422)


async def test_notes_are_written_by_those_who_may_and_are_text(api: ApiService) -> None:
    run_id = await api.create()
    path = f"/runs/{run_id}"
    browser = await Browser.logged_in(api, api.token("submitter", "default"))
    assert (
        await browser.send(path, f"{path}/notes", notes=f"{HOSTILE}\r\nline")
    ).status_code == 303
    assert unescape(await browser.page("/runs?columns=notes")).count(HOSTILE) == 1
    assert f"{HOSTILE}\nline" in unescape(await browser.page(path))
    assert (await browser.send(path, f"{path}/notes", notes="x" * 4001)).status_code == 422
    assert (await browser.send(path, f"{path}/notes", notes="a\0b")).status_code == 422
    viewer = await Browser.logged_in(api, api.token("viewer"))
    html = await viewer.page(path)
    assert "/notes" not in html and HOSTILE in unescape(html)
    stranger = await Browser.logged_in(api, api.token("submitter", "elsewhere"))
    assert (await stranger.http.post(f"{path}/notes")).status_code == 404
    assert (await browser.send(path, f"{path}/notes", notes=" ")).status_code == 303
    assert (await api.get(f"/v1{path}"))["notes"] is None
