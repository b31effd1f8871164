"""Logging a browser in without its log-in page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from service.web.session import COOKIE

if TYPE_CHECKING:
    from playwright.async_api import SetCookieParam


async def session_of(url: str, token: str) -> str:
    """Log in at a service; the cookie's value."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        answer = await http.post("/login", data={"token": token})
    assert answer.status_code == 303, answer.text
    return answer.cookies[COOKIE]


async def session_cookie(url: str, token: str) -> SetCookieParam:
    """The same for a browser's ``add_cookies``."""
    return {"name": COOKIE, "value": await session_of(url, token), "url": url}
