"""The demo's parts: which node it kills, what it sees, and that it leaves nothing behind, however
it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep import Event, UsageError
from everstep.cli import demo_service
from everstep.cli.demo import SPEC, DemoStory, _conclusion, run_demo
from everstep.cli.demo_service import (
    DemoFailed,
    Victim,
    choose_victim,
    is_process,
    kill,
    kill_all_of,
)
from everstep.cli.terminal import Exit, Terminal
from everstep.spec.parsing import parse_spec
from everstep.wire import WorkerInfo
from everstep.wire.run import Replay
from tests.support.scripted_http import event

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def cluster_file(directory: Path, *nodes: dict[str, Any]) -> Path:
    path = directory / "cluster.json"
    path.write_text(json.dumps({"keeper_pid": 1, "nodes": list(nodes)}))
    return path


def node(node_id: str, pid: int, started_at: float, *, is_head: bool = False) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "is_head": is_head,
        "raylet_pid": pid,
        "raylet_started_at": started_at,
    }


def workers(*node_ids: str) -> list[WorkerInfo]:
    return [
        WorkerInfo(rank=rank, node_id=node_id, node_ip="127.0.0.1", pid=900 + rank)
        for rank, node_id in enumerate(node_ids)
    ]


def test_the_spec_is_one() -> None:
    assert parse_spec(SPEC).scaling.max_workers == 3


def test_the_node_of_the_highest_rank_is_chosen_and_never_the_head(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    began = psutil.Process(sleeper.pid).create_time()
    file = cluster_file(
        tmp_path, node("head", sleeper.pid, began, is_head=True), node("a", sleeper.pid, began)
    )
    assert choose_victim(file, workers("a", "head")) == Victim("a", 0, sleeper.pid, 900)
    with pytest.raises(UsageError, match="no rank of the run"):
        choose_victim(file, workers("head", "elsewhere"))


def test_a_process_that_took_over_a_dead_raylet_s_number_is_spared(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    earlier = psutil.Process(sleeper.pid).create_time() - 60
    assert not is_process(sleeper.pid, earlier)
    with pytest.raises(UsageError):
        choose_victim(cluster_file(tmp_path, node("a", sleeper.pid, earlier)), workers("a"))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"nodes": [{"node_id": 1}]}', None])
def test_a_cluster_that_is_not_embedded_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "cluster.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=r"cluster\.json"):
        choose_victim(file, workers("a"))


def test_killing_takes_the_raylet_and_the_rank(sleeper: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(SLEEP) as rank:
        kill(Victim("a", 0, sleeper.pid, rank.pid))
        assert (sleeper.wait(60), rank.wait(60)) == (-9, -9)
        kill(Victim("a", 0, sleeper.pid, rank.pid))  # both gone: no error


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


def take(story: DemoStory, kind: str, attempt: int = 1, **data: Any) -> None:
    story.take(Event.model_validate({**event(1, kind, **data), "attempt": attempt}))


def test_the_kill_is_due_at_its_share_of_the_steps_and_the_next_step_is_of_the_next_attempt() -> (
    None
):
    story = DemoStory()
    take(story, "metrics", points=[{"step": 50, "at": 1.0, "values": {}}])
    assert not story.is_due  # nobody knows of how many
    take(story, "training_started", total_steps=100)
    assert story.is_due
    story.killed_at = 10.0
    assert not story.is_due
    # was on its way when the node died
    take(story, "metrics", points=[{"step": 51, "at": 10.2, "values": {}}])
    assert story.next_step_at is None
    take(story, "attempt_started", attempt=2, world_size=2)
    take(story, "restored", attempt=2, step=51)
    late, first, second = (
        {"step": step, "at": at, "values": {}} for step, at in ((51, 10.2), (52, 12.5), (53, 13.0))
    )
    take(story, "metrics", attempt=2, points=[late])
    assert story.next_step_at is None
    take(story, "metrics", attempt=2, points=[late, first, second])
    take(story, "metrics", attempt=3, points=[{"step": 54, "at": 20.0, "values": {}}])
    assert (story.next_step_at, story.world_size_after, story.killed_step) == (12.5, 2, 50)


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
    monkeypatch.setattr(demo_service, "SERVE", failing)
    with pytest.raises(DemoFailed, match=r"(?s)exit code 1; its log ends:.*port in use"):
        run_demo(Terminal(), url=None, keep=True, out="unused")
    assert list(homes.iterdir()) == []


def test_a_service_that_never_is_ready_is_ended(
    homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_service, "SERVE", tuple(SLEEP))
    monkeypatch.setattr(demo_service, "START_TIMEOUT_S", 0.3)
    with pytest.raises(DemoFailed, match="did not become ready"):
        run_demo(Terminal(), url=None, keep=False, out="unused")
    assert list(homes.iterdir()) == []


def test_an_interrupted_demo_ends_its_service(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], _home: Path) -> None:
        started.append(process)
        os.kill(os.getpid(), 15)  # as `kill` of the demo
        time.sleep(10)

    monkeypatch.setattr(demo_service, "SERVE", tuple(SLEEP))
    monkeypatch.setattr(demo_service, "_await_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(Terminal(), url=None, keep=True, out="unused")
    assert started[0].returncode == -15 and list(homes.iterdir()) == []


def test_another_service_must_have_a_cluster_of_its_own_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="EVERSTEP_HOME"):
        run_demo(Terminal(), url="http://127.0.0.1:1", keep=False, out="unused")
