"""What a browser does with pages, without one: keeps the cookie, sends forms with what is in
them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Self

import httpx

from everstep.wire import RunStatus
from tests.support.api_service import ApiService


class Markup(HTMLParser):
    """What of a page is markup: its elements, and what of them the policy forbids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.forbidden: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        inline = tag == "style" or (tag == "script" and not dict(attrs).get("src"))
        if inline or any(
            name == "style" or name.startswith("on") or "javascript:" in (value or "")[:20]
            for name, value in attrs
        ):
            self.forbidden.append(self.get_starttag_text() or tag)


class Browser:
    """A log-in at the service."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    @classmethod
    async def logged_in(cls, api: ApiService, token: str) -> Self:
        http = await api.client(None)
        http.headers["Accept"] = "text/html"
        answer = await http.post("/login", data={"token": token})
        assert answer.status_code == 303, answer.text
        return cls(http)

    async def page(self, path: str, status: int = 200) -> str:
        """The page's HTML; nothing in it may be what the policy forbids."""
        answer = await self.http.get(path)
        assert answer.status_code == status, answer.text
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        markup = Markup(answer.text)
        assert markup.forbidden == [] and "img" not in markup.tags
        return answer.text

    async def send(self, page: str, action: str, **fields: str) -> httpx.Response:
        """Send the form of ``page`` whose address is ``action``, with fields set."""
        html = await self.page(page)
        [form] = re.findall(
            rf'<form[^>]*action="{re.escape(action)}"[^>]*>(.*?)</form>', html, re.DOTALL
        )
        hidden = dict(re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', form))
        return await self.http.post(action, data=hidden | fields)


def status_of(api: ApiService, run_id: str) -> RunStatus:
    run = api.runs.get(run_id)
    assert run is not None
    return run.status
