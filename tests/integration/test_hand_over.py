"""Groups that change their size while a run trains, with ``recovery.in_process``, on a real
cluster: ranks that stay keep their processes, those that join are built first, and no checkpoint is
written."""

from __future__ import annotations

from collections.abc import Iterator
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
