"""Nodes that are drained and cordoned under runs that train, by SDK and command line, on a real
cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep import Client
from everstep.client.runs import RunHandle
from tests.support.digits_run import assert_every_sample_counted_once, digits, wait_for_step
from tests.support.service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    """Three nodes of one CPU, which the tests mark and never kill."""
    with ServiceProcess(nodes=3, args=("--drills",)) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[Client]:
    with service.tidy_client() as made:
        yield made


def nodes_of(run: RunHandle) -> list[str]:
    """The node of each rank of the newest attempt."""
    return [
        worker.node_id
        for worker in sorted(run.attempts()[-1].workers, key=lambda worker: worker.rank)
    ]


@pytest.mark.chaos
def test_the_ranks_of_a_slow_node_move_and_lose_no_step(client: Client) -> None:
    slow_task = digits("slow", epochs=4000) | {"recovery": {"stragglers": "move"}}
    run = client.runs.create(slow_task)
    wait_for_step(run, 25)
    slow = next(worker for worker in run.attempts()[-1].workers if worker.rank == 1)
    run.drill("slow_rank", rank=1)

    def moves() -> list[Any]:
        return [each.data for each in run.events() if each.kind == "straggler_moved"]

    wait_for(lambda: len(moves()) == 2, 400, "the move, and what it has shown", every_s=1.0)
    assert [(each["node_id"], each["stays"]) for each in moves()] == [
        (slow.node_id, None),
        (slow.node_id, True),
    ]
    assert slow.node_id not in nodes_of(run) and len(nodes_of(run)) == 2
    assert (run.refresh().steps_lost, run.failures()) == (0, [])
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")


@pytest.mark.chaos
def test_a_drain_without_other_room_frees_the_node_and_the_run_goes_on_once_it_may(
    service: ServiceProcess, client: Client
) -> None:
    run = client.runs.create(digits("nowhere to go", epochs=20, workers=(3, 3)))
    wait_for_step(run, 25)
    leaving = nodes_of(run)[2]
    environment = {**os.environ, "EVERSTEP_HOME": str(service.home)}
    command = [
        str(Path(sys.executable).parent / "everstep"),
        "drain",
        leaving[:16],
        "--deadline",
        "120",
        "--wait",
        "--json",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "DRAINED"
    wait_for(lambda: run.refresh().reason is not None, 120, "a reason to wait")
    assert run.reason is not None and run.reason.code == "waiting_for_capacity"
    client.nodes.uncordon(leaving)
    run.wait(timeout_s=180)
    assert run.status == "SUCCEEDED" and run.steps_lost == 0
    assert_every_sample_counted_once(run, epochs=20)
    assert [failure.verdict for failure in run.failures()] == ["preemption"]


def test_the_only_survivor_gives_its_state_from_a_node_that_gets_no_ranks(client: Client) -> None:
    spec = digits("survivor", epochs=2000, workers=(1, 2), checkpoint={"every_steps": 100_000})
    run = client.runs.create(spec)
    wait_for_step(run, 60)
    lives, dies = sorted(run.attempts()[-1].workers, key=lambda worker: worker.rank)
    closed = [node.id for node in client.cluster().nodes if node.id != dies.node_id]
    for node_id in closed:
        client.nodes.cordon(node_id)
    wait_for_step(run, run.step + 40)  # the run knows of it
    psutil.Process(dies.pid).kill()
    wait_for(lambda: len(run.attempts()) == 2, 120, "the second attempt")
    assert nodes_of(run) == [dies.node_id] and lives.node_id in closed
    [failure] = wait_for(
        lambda: [each for each in run.failures() if each.steps_lost is not None], 60, "a step"
    )
    assert (failure.verdict, failure.steps_lost) == ("worker_lost", 0)
    run.cancel()
    wait_for(lambda: run.refresh().status == "CANCELLED", 120, "the cancel")
    steps = [step for step, _, _ in run.metrics("loss", max_points=10_000)["loss"]]
    assert steps == list(range(1, run.step + 1)), "each was made once"
