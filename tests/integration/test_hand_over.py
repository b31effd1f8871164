"""Groups that change their size while a run trains, with ``recovery.in_process``, on a real
cluster: ranks that stay keep their processes, those that join are built first, and no checkpoint is
written."""

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
    spec["recovery"] = {"in_process": True}
    spec["checkpoint"] = {"every_steps": 1_000_000}
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
    assert sources == ["fresh", *["process"] * (len(sources) - 1)]
    assert [event for event in events if event.kind == "fell_back"] == []


def pids(run: RunHandle, attempt: int) -> dict[str, int]:
    """The process of each node's rank."""
    [found] = [each for each in run.attempts() if each.attempt == attempt]
    return {worker.node_id: worker.pid for worker in found.workers}


def test_a_group_shrinks_for_a_drain_and_grows_back(client: Client) -> None:
    run = begun(client, "shrinks and grows", (1, 3))
    first = run.attempts()[-1].attempt
    leaving = run.attempts()[-1].workers[1].node_id
    client.nodes.drain(leaving, deadline_s=120)
    second = wait_for_ranks(run, 2, first)
    client.nodes.uncordon(leaving)
    third = wait_for_ranks(run, 3, second)
    whole, smaller, grown = (pids(run, attempt) for attempt in (first, second, third))
    del whole[leaving]
    assert whole == smaller and smaller.items() < grown.items()
    check_end(run)
    [failure] = run.failures()
    assert (failure.verdict, failure.rung, failure.steps_lost) == ("preemption", "in_process", 0)


def test_a_rank_moves_to_a_node_where_its_successor_is_ready(client: Client) -> None:
    run = begun(client, "moves", (2, 2))
    leaving = run.attempts()[-1].workers[0].node_id
    client.nodes.drain(leaving, deadline_s=120)
    second = wait_for_ranks(run, 2, after=1)
    before, after = pids(run, 1), pids(run, second)
    assert leaving not in after and len(set(before.items()) & set(after.items())) == 1
    [joined] = set(after.values()) - set(before.values())
    born = psutil.Process(joined).create_time()
    check_end(run)
    [ended] = [e for e in run.events() if e.kind == "attempt_ended" and e.attempt == 1]
    assert born < ended.at.timestamp(), "it was made while the group before it trained"


ASKS = """
import functools, torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F

@functools.lru_cache
def world():
    return dist.group.WORLD

class Task:
    def build_model(self):
        if dist.is_initialized():
            dist.barrier()  # rank 0 prepares, and the others wait
        self.group = dist.new_group(backend="gloo")
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    def build_datasets(self):
        x = torch.randn(640, 8, generator=torch.Generator().manual_seed(1))
        return {"train": torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), "val": None}
    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])
    def on_epoch_end(self, model, epoch, metrics):
        for group in (world(), self.group):
            found = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, epoch, group=group)
            assert found == [epoch] * len(found)
"""
"""It holds groups, and its build has a guarded collective."""


def test_a_task_that_holds_groups_survives_a_kill_a_drain_and_a_node_that_joins(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(ASKS)
    spec = digits("holds groups", epochs=2000, workers=(1, 3), checkpoint={"every_steps": 1000})
    del spec["task"]
    spec["code"] = {"archive": client.code.upload(tmp_path).digest, "task": "task:Task"}
    run = client.runs.create(spec)
    wait_for_ranks(run, 3)
    psutil.Process(run.attempts()[-1].workers[1].pid).kill()
    second = wait_for_ranks(run, 3, run.attempts()[-1].attempt)
    before, after = pids(run, 1), pids(run, second)
    assert not set(before.values()) & set(after.values()), "all are fresh"
    leaving = run.attempts()[-1].workers[1].node_id
    client.nodes.drain(leaving, deadline_s=120)
    third = wait_for_ranks(run, 2, second)
    client.nodes.uncordon(leaving)
    wait_for_ranks(run, 3, third)
    assert [failure.verdict for failure in run.failures()] == ["worker_lost", "preemption"]
    assert [failure.rung for failure in run.failures()] == ["snapshot", "checkpoint"]
    assert run.steps_lost == 0
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")
