"""Groups that change their size while a run trains, on a real cluster: the hosts of ranks that join
build first, and no checkpoint is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep import Client
from everstep.client.runs import RunHandle
from tests.support.digits_run import (
    assert_every_sample_counted_once,
    assert_every_step_is_there_once,
    digits,
    wait_for_step,
)
from tests.support.service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.timeout(600)

EPOCHS = 70


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with ServiceProcess(nodes=3) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[Client]:
    with service.tidy_client() as made:
        yield made


def begun(client: Client, name: str, workers: tuple[int, int]) -> RunHandle:
    spec: dict[str, Any] = digits(name, epochs=EPOCHS, workers=workers)
    spec["checkpoint"] = {"every_steps": 1_000_000}
    spec["train"]["eval_every_epochs"] = EPOCHS  # the best state is saved, too
    run = client.runs.create(spec)
    wait_for_ranks(run, workers[1])
    return run


def wait_for_ranks(run: RunHandle, ranks: int, after: int = 0) -> int:
    """Wait until an attempt after that one has so many ranks, and has done steps. Return its
    number."""

    def trains() -> bool:
        newest = run.attempts()[-1:]
        return bool(newest) and newest[0].attempt > after and newest[0].world_size == ranks

    wait_for(trains, 120, f"{ranks} ranks of {run.id} after attempt {after}")
    wait_for_step(run, run.refresh().step + 10)
    return run.attempts()[-1].attempt


def check_end(run: RunHandle) -> None:
    run.wait(timeout_s=240)
    assert run.status == "SUCCEEDED" and run.steps_lost == 0
    assert_every_sample_counted_once(run, EPOCHS)
    assert_every_step_is_there_once(run, EPOCHS)
    events = list(run.events())
    saved = [event.data["step"] for event in events if event.kind == "checkpoint_committed"]
    assert saved == [run.step], "only the last state"
    sources = [event.data["source"] for event in events if event.kind == "restored"]
    assert sources == ["fresh", *["snapshot"] * (len(sources) - 1)]


def pids(run: RunHandle, attempt: int) -> dict[str, int]:
    """The process of each node's rank."""
    [found] = [each for each in run.attempts() if each.attempt == attempt]
    return {worker.node_id: worker.pid for worker in found.workers}


@pytest.mark.chaos
def test_a_group_shrinks_for_a_drain_and_grows_back(client: Client) -> None:
    run = begun(client, "shrinks and grows", (1, 3))
    first = run.attempts()[-1].attempt
    leaving = run.attempts()[-1].workers[1].node_id
    client.nodes.drain(leaving, deadline_s=120)
    second = wait_for_ranks(run, 2, first)
    client.nodes.uncordon(leaving)
    wait_for_ranks(run, 3, second)
    check_end(run)
    [failure] = run.failures()
    assert (failure.verdict, failure.rung, failure.steps_lost) == ("preemption", "snapshot", 0)


def test_a_rank_moves_to_a_node_where_its_successor_is_ready(client: Client) -> None:
    run = begun(client, "moves", (2, 2))
    leaving = run.attempts()[-1].workers[0].node_id
    client.nodes.drain(leaving, deadline_s=120)
    second = wait_for_ranks(run, 2, after=1)
    before, after = pids(run, 1), pids(run, second)
    assert leaving not in after and not {*before.values()} & {*after.values()}
    [joined] = after.keys() - before.keys()
    born = psutil.Process(psutil.Process(after[joined]).ppid()).create_time()
    check_end(run)
    [ended] = [e for e in run.events() if e.kind == "attempt_ended" and e.attempt == 1]
    assert born < ended.at.timestamp(), "it had built while the group before it trained"


def begun_on_two_nodes(client: Client, spec: dict[str, Any]) -> RunHandle:
    """A run of two ranks beside which a node has just become free."""
    client.nodes.cordon(free_node(client))
    try:
        run = client.runs.create(spec)
        wait_for_ranks(run, 2)
    finally:
        client.nodes.uncordon(free_node(client))
    return run


MORTAL = """
import os, signal, time
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F

class Task:
    def __init__(self, joins, place, marker):
        self.joins, self.place, self.marker = joins, place, Path(marker)
        self.claim = self.marker.with_suffix(".built")

    def build_model(self):
        joins = self.claim.exists()
        self.claim.touch()
        if self.place == "has no data":
            if self.marker.exists():
                raise FileNotFoundError("the data is not mounted here")
        elif self.joins == joins:
            self.plant()
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def plant(self):
        from train_fn.ranks import rank
        from train_fn.snapshots import whole

        if self.place == "is built":
            self.die_once()
            return
        owner, name = {
            "has its peers": (rank, "prove_storage"),
            "receives the state": (whole, "broadcast"),
        }[self.place]
        call = getattr(owner, name)

        def first(*arguments):
            self.die_once()
            return call(*arguments)

        setattr(owner, name, first)

    def die_once(self):
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def build_datasets(self):
        x = torch.randn(1280, 8, generator=torch.Generator().manual_seed(1))
        return {"train": torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), "val": None}

    def loss(self, model, batch):
        time.sleep(0.02)
        if self.place == "has no data":
            self.marker.touch()  # all ranks that train have built
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
"""
"""Kills a process once, one that joins or one that trains, on its way to the next attempt."""

CHAOS = pytest.mark.chaos


def begun_mortal(client: Client, tmp_path: Path, **args: Any) -> tuple[RunHandle, Path]:
    """A run that is about to grow, and the file that says that a process is there."""
    code, marker = tmp_path / "code", tmp_path / "there"
    code.mkdir()
    (code / "task.py").write_text(MORTAL)
    spec = digits("mortal", epochs=2000, workers=(1, 3), checkpoint={"every_steps": 100_000})
    del spec["task"]
    spec["recovery"] = {"hang_timeout_s": 40}
    spec["code"] = {
        "archive": client.code.upload(code).digest,
        "task": "task:Task",
        "args": args | {"marker": str(marker)},
    }
    return begun_on_two_nodes(client, spec), marker


def check_steps(run: RunHandle) -> None:
    """End the run: no step was lost, and each was made once."""
    assert run.refresh().steps_lost == 0
    if not run.status.terminal:
        run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")
    steps = [step for step, _, _ in run.metrics("loss", max_points=10_000)["loss"]]
    assert steps == list(range(1, run.step + 1)), "each was made once"


@CHAOS
@pytest.mark.parametrize(
    ("joins", "place", "deaths"),
    [(True, "is built", 0), (True, "receives the state", 1), (False, "has its peers", 1)],
)
def test_a_death_on_the_way_to_a_larger_group_costs_no_step(
    joins: bool, place: str, deaths: int, client: Client, tmp_path: Path
) -> None:
    run, marker = begun_mortal(client, tmp_path, joins=joins, place=place)
    wait_for(marker.exists, 60, "the death")
    grown = wait_for_ranks(run, 3, after=1)
    assert run.status == "RUNNING" and run.steps_lost == 0
    assert [failure.verdict for failure in run.failures()] == ["worker_lost"] * deaths
    check_steps(run)
    restored = [event.data["source"] for event in run.events() if event.kind == "restored"]
    assert restored[0] == "fresh" and set(restored[1:]) == {"snapshot"}, grown


def free_node(client: Client) -> str:
    return client.cluster().nodes[-1].id


def test_a_node_that_cannot_build_a_task_gets_no_rank_and_disturbs_nobody(
    client: Client, tmp_path: Path
) -> None:
    """A second error of that kind at one step would end the run."""
    run, marker = begun_mortal(client, tmp_path, joins=True, place="has no data")
    words = "FileNotFoundError: the data is not mounted here"
    wait_for(lambda: any(words in line.message for line in run.logs()), 60, words)
    wait_for_step(run, run.refresh().step + 200)
    assert [attempt.attempt for attempt in run.attempts()] == [1] and marker.exists()
    check_steps(run)
    assert run.failures() == []
