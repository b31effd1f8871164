"""Several runs of the list at once: compared, cancelled, deleted by the buttons below it."""

from __future__ import annotations

import re

import httpx

from everstep.wire import RunStatus
from tests.support.api_service import ApiService
from tests.support.command_line import finish
from tests.support.web_browser import Browser, status_of


async def send(browser: Browser, action: str, *ids: str, csrf: str | None = None) -> httpx.Response:
    """Press a button of the list with these runs ticked."""
    html = await browser.page("/runs")
    [found] = re.findall(r'name="csrf" value="([^"]*)"><input type="hidden" name="back"', html)
    fields = {"csrf": csrf or found, "back": "/runs?status=active", "action": action}
    return await browser.http.post("/runs/selected", data={**fields, "run": list(ids)})


async def test_selected_runs_are_compared_at_a_link(api: ApiService) -> None:
    first, second = await api.create(name="a"), await api.create(name="b")
    viewer = await Browser.logged_in(api, api.token("viewer"))
    answer = await send(viewer, "compare", first, second)
    assert answer.headers["location"] == f"/compare?run={first}&run={second}"
    assert (await send(viewer, "compare")).headers["location"] == "/compare"


async def test_selected_runs_are_cancelled_and_each_is_in_the_audit_log(api: ApiService) -> None:
    ids = [await api.create(name=name) for name in "abc"]
    browser = await Browser.logged_in(api, api.token("submitter"))
    answer = await send(browser, "cancel", *ids[:2])
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?status=active")
    assert [status_of(api, run_id) for run_id in ids] == [
        RunStatus.CANCELLED,
        RunStatus.CANCELLED,
        RunStatus.QUEUED,
    ]
    audited = (await api.get("/v1/audit"))["items"]
    targets = {entry["target"] for entry in audited if entry["path"] == "/runs/selected"}
    assert set(ids[:2]) <= targets and ids[2] not in targets


async def test_what_cannot_be_deleted_is_told_and_the_rest_is_deleted(api: ApiService) -> None:
    ended, live = await finish(api), await api.create(name="live")
    browser = await Browser.logged_in(api, api.token("submitter"))
    answer = await send(browser, "delete", ended, live, "run_000000000000")
    assert answer.status_code == 409 and "Not possible for 2 runs" in answer.text
    assert "cancel it first" in answer.text and "does not exist" in answer.text
    assert "1 other done: delete" in answer.text
    assert api.runs.get(ended) is None and status_of(api, live) == RunStatus.QUEUED


async def test_who_may_not_and_what_came_from_elsewhere_changes_nothing(api: ApiService) -> None:
    run_id = await api.create()
    viewer = await Browser.logged_in(api, api.token("viewer"))
    assert "Cancel selected" not in await viewer.page("/runs")
    assert (await send(viewer, "cancel", run_id)).status_code == 403
    other = await Browser.logged_in(api, api.token("submitter", "elsewhere"))
    await api.create(project="elsewhere")
    assert "does not exist" in (await send(other, "cancel", run_id)).text
    mine = await Browser.logged_in(api, api.token("submitter"))
    assert (await send(mine, "cancel", run_id, csrf="00.forged")).status_code == 403
    assert (await send(mine, "explode", run_id)).status_code == 422
    assert status_of(api, run_id) == RunStatus.QUEUED
