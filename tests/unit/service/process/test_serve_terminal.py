"""What a person sees who starts the service at a terminal: what it waits for, and a way in."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from service.api.callers import VALID_S, LogInCodes
from tests.support.api_service import ManualClock
from tests.support.fake_ray import FakeRay, serving
from tests.support.narrow_terminal import NarrowTerminal


def test_a_start_shows_progress_and_a_link_that_logs_in_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(FakeRay()) as ray:
        monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("RAY_AUTH_TOKEN", ray.token)
        terminal = NarrowTerminal("serve", "--port", "0", "--ray-address", ray.url)
        try:
            terminal.read_until("Admin token")
            lines = terminal.lines
            assert any(line == "Starting:          storage and database …" for line in lines)
            [link] = re.findall(r"Log in \(once\): +(\S+)", "\n".join(lines))
            with httpx.Client(trust_env=False, timeout=60) as browser:
                entered = browser.get(link)
                assert entered.headers["location"] == "/runs"
                base = link.partition("/login")[0]
                assert browser.get(f"{base}/runs").status_code == 200
            with httpx.Client(trust_env=False, timeout=60) as another:
                refused = another.get(link)
                assert "used already" in refused.text and not another.cookies
        finally:
            code = terminal.stop()
    assert code == 0


def test_a_code_works_once_and_for_minutes() -> None:
    clock = ManualClock()
    codes = LogInCodes(clock)
    first, second = codes.make("tok_a"), codes.make("tok_b")
    assert codes.take("another") is None
    assert codes.take(first) == "tok_a" and codes.take(first) is None
    clock.now += VALID_S
    assert codes.take(second) is None
