"""Start the provider of oidc_server.py, and be a person with a browser at it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
from joserfc.jwk import RSAKey

from tests.support.oidc_server import CLIENT_ID, CLIENT_SECRET, PASSWORD
from tests.support.service_process import free_port

REPOSITORY = Path(__file__).parents[2]


class OidcProvider:
    """A provider with the users ada and bob."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.issuer = f"{self.url}/o"
        self.client_id, self.client_secret = CLIENT_ID, CLIENT_SECRET

    def __enter__(self) -> Self:
        key = self._directory / "key.pem"
        key.write_bytes(RSAKey.generate_key(2048).as_pem(private=True))
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.oidc_server",
                str(self.port),
                str(self._directory / "provider.db"),
                str(key),
            ],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline()) == {"ready": self.port}
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def set(self, **wanted: Any) -> None:
        """Set ``user`` and ``groups``, or ``redirect_uri``."""
        httpx.post(
            f"{self.url}/control", json=wanted, trust_env=False, verify=False
        ).raise_for_status()

    async def callback(self, address: str, user: str) -> str:
        """Go to the provider's page, log in there; return the address to which it sends back."""
        async with httpx.AsyncClient(trust_env=False, timeout=20, verify=False) as browser:
            answer = await browser.get(address)
            while (location := answer.headers.get("location", "")).startswith("/"):
                answer = await browser.get(f"{self.url}{location}")
            if answer.status_code == 200:
                [token] = re.findall(r'name="csrfmiddlewaretoken" value="([^"]*)"', answer.text)
                form = {"username": user, "password": PASSWORD, "csrfmiddlewaretoken": token}
                answer = await browser.post(str(answer.url), data=form)
                assert answer.status_code == 302, answer.text
                answer = await browser.get(f"{self.url}{unescape(answer.headers['location'])}")
            assert answer.status_code == 302, answer.text
            return answer.headers["location"]


def path_of(url: str) -> str:
    """Return path and query of a URL."""
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"
