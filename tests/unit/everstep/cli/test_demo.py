"""The demo's parts: what it claims, and that it leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.cli import demo
from everstep.cli.demo import SPEC, DemoFailed, _conclusion, kill_all_of, run_demo
from everstep.cli.terminal import Exit, Terminal
from everstep.spec.parsing import parse_spec
from everstep.wire.run import Replay

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def test_the_spec_is_one() -> None:
    assert parse_spec(SPEC).scaling.max_workers == 3


def test_what_is_left_of_a_home_is_ended_and_nothing_else(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen(SLEEP, env={**os.environ, "EVERSTEP_HOME": str(tmp_path)}) as mine:
        other = {**os.environ, "EVERSTEP_HOME": f"{tmp_path}2"}
        with subprocess.Popen(SLEEP, env=other) as another:
            kill_all_of(tmp_path)
            assert mine.wait(60) == -9
            assert another.poll() is None and sleeper.poll() is None
            another.kill()


@pytest.mark.parametrize(
    ("result", "code", "words"),
    [
        ("equal", Exit.SUCCEEDED, "the same bits as a run on one worker"),
        ("differs", Exit.FAILED, "OTHER bits than a run on one worker"),
        ("not_proven", Exit.FAILED, "NOT PROVEN"),
        (None, Exit.FAILED, "NOT PROVEN"),
    ],
)
def test_it_claims_the_same_bits_only_if_the_replay_says_so(
    result: Any, code: Exit, words: str
) -> None:
    proof = Replay(run_id="run_1", from_step=0, to_step=240, result=result)
    found, headline, _ = _conclusion(proof)
    assert found is code and words in headline


@pytest.fixture
def homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the demo makes its home directories."""
    make = tempfile.mkdtemp
    monkeypatch.setattr(
        tempfile, "mkdtemp", lambda prefix, dir=None: make(prefix=prefix, dir=tmp_path)
    )
    return tmp_path


def test_a_service_that_does_not_start_is_told_with_its_log(
    homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = (sys.executable, "-c", "import sys; sys.exit('cannot listen: port in use')")
    monkeypatch.setattr(demo, "SERVE", failing)
    with pytest.raises(DemoFailed, match=r"(?s)exit code 1; its log ends:.*port in use"):
        run_demo(Terminal(), keep=True, out="unused")
    assert list(homes.iterdir()) == []


def test_a_service_that_never_is_ready_is_ended(
    homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SERVE", tuple(SLEEP))
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.3)
    with pytest.raises(DemoFailed, match="did not become ready"):
        run_demo(Terminal(), keep=False, out="unused")
    assert list(homes.iterdir()) == []


def test_an_interrupted_demo_ends_its_service(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], _home: Path) -> None:
        started.append(process)
        os.kill(os.getpid(), 15)  # as `kill` of the demo
        time.sleep(10)

    monkeypatch.setattr(demo, "SERVE", tuple(SLEEP))
    monkeypatch.setattr(demo, "_await_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(Terminal(), keep=True, out="unused")
    assert started[0].returncode == -15 and list(homes.iterdir()) == []
