"""The page of alerts: create, test, look at what became of it, send again, delete."""

from __future__ import annotations

from service.annexes.alerts.sender import AlertSender
from service.annexes.alerts.store import AlertStore
from service.submission_rules.allowed import NotifyRule
from tests.support.api_service import ApiService
from tests.support.scripted_http import scripted
from tests.support.web_browser import Browser


async def send_due(api: ApiService) -> None:
    await AlertSender(api.database, api.settings.notify, clock=api.clock).work()


async def test_an_alert_is_made_tried_and_deleted(api: ApiService) -> None:
    browser = await Browser.logged_in(api, api.token("admin"))
    assert "No alerts" in await browser.page("/alerts")
    with scripted() as receiver:
        api.set(notify=NotifyRule(frozenset({receiver.url}), "s" * 16))
        url = f"{receiver.url}/s3cr3t"
        fields = {"project": "default", "name": "<b>on-call</b>", "when": "recovered"}
        fields |= {"format": "json", "url": url, "more_than": "x", "stalled_s": "", "addresses": ""}
        wrong = await browser.send("/alerts", "/alerts", **fields)
        assert wrong.status_code == 422 and "<code>more_than</code>" in wrong.text
        for no_number in ("\N{SUPERSCRIPT TWO}", "2.5"):
            told = await browser.send("/alerts", "/alerts", **fields | {"more_than": no_number})
            assert told.status_code == 422 and "<code>more_than</code>" in told.text
        assert "s3cr3t" not in wrong.text and "&lt;b&gt;on-call&lt;/b&gt;" in wrong.text
        made = await browser.send("/alerts", "/alerts", **fields | {"more_than": "2"})
        assert (made.status_code, made.headers["location"]) == (303, "/alerts")
        [alert] = AlertStore(api.database).all()
        page = await browser.page("/alerts")
        assert "N = 2" in page and "s3cr3t" not in page and "<b>" not in page
        receiver.script["/s3cr3t"] = [lambda handler: handler.send(500, b"<i>no</i> /s3cr3t")]
        assert (await browser.send("/alerts", f"/alerts/{alert.id}/test")).status_code == 303
        assert "about to be sent" in await browser.page("/alerts")
        await send_due(api)
        page = await browser.page("/alerts")
        assert "it answered 500" in page and "&lt;i&gt;no&lt;/i&gt; [secret]" in page
        [message] = AlertStore(api.database).deliveries(alert.id, 5)
        receiver.script["/s3cr3t"] = [lambda handler: handler.send(200, b"")]
        retry = f"/alerts/{alert.id}/deliveries/{message.id}/retry"
        assert (await browser.send("/alerts", retry)).status_code == 303
        await send_due(api)
        assert "Delivered" in await browser.page("/alerts")
    assert (await browser.send("/alerts", f"/alerts/{alert.id}/delete")).status_code == 303
    assert AlertStore(api.database).all() == []


async def test_only_administrators_see_it(api: ApiService) -> None:
    submitter = await Browser.logged_in(api, api.token("submitter"))
    assert "Not allowed" in await submitter.page("/alerts", 403)
    assert 'href="/alerts"' not in await submitter.page("/runs")
