"""A service of its own process over a database that is given, with a stand-in for Ray: one of
several, or one alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx

from tests.support.fake_ray import FakeRay
from tests.support.service_process import free_port, wait_until_ready

ANSWER_S = 20.0
"""Longest wait for an answer of a replica that is asked whether it is there: one that is asked by
many may be slow to say so."""


class Replica:
    """``everstep serve`` with a home of its own, which is made; nothing limits how
    often it is asked."""

    def __init__(
        self,
        home: Path,
        storage: Path,
        database_url: str,
        ray_url: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home, self.port = home, free_port()
        self._command = [sys.executable, "-m", "everstep.cli.main", "serve"]
        self._command += ["--port", str(self.port), "--ray-address", ray_url]
        self._command += ["--database", database_url, "--storage", str(storage)]
        own = {
            "EVERSTEP_HOME": str(home),
            "RAY_AUTH_TOKEN": FakeRay.token,
            "EVERSTEP_RATE_PER_S": "0",
        }
        self._env = {**os.environ, **own, **(env or {})}
        home.mkdir(exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Of a request by an administrator."""
        return {"Authorization": f"Bearer {(self.home / 'token').read_text().strip()}"}

    def start(self) -> None:
        with (self.home / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)

    def wait_until_ready(self, timeout_s: float, what: str = "its /readyz") -> None:
        """As ``wait_until_ready`` of ``service_process``."""
        wait_until_ready(self.process, self.url, self._log, timeout_s, what, answer_s=ANSWER_S)

    def is_listening(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/healthz", timeout=ANSWER_S, trust_env=False).is_success
        return False

    def _log(self) -> str:
        return (self.home / "serve.log").read_text()

    def errors(self) -> str:
        """Its first traceback, with what the log says around it."""
        at = self._log().find("Traceback")
        return self._log()[max(0, at - 500) :][:6000] if at >= 0 else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> None:
        """The graceful way."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
