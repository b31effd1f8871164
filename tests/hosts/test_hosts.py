"""Training across hosts with addresses of their own, while their network does what networks do.

Each run ends SUCCEEDED, with every step once, every sample used once, and no step lost where a rank survived.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everstep.runs import RunHandle
from tests.hosts.compose_file import is_possible
from tests.hosts.deployment import Deployment, deployed
from tests.service_process import wait_for

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root on Linux"),
]

NUM_WORKERS = 3
STEPS_PER_EPOCH = 12


def spec(name: str, epochs: int, ranks: int = NUM_WORKERS) -> dict[str, Any]:
    return {
        "name": name,
        "task": {"name": "image_classification", "model": {"name": "mini_resnet"}, "data": {"name": "digits"}},
        "train": {"epochs": epochs, "global_batch_size": 128, "micro_batch_size": 32, "seed": 5},
        "scaling": {"min_workers": 1, "max_workers": ranks},
        "checkpoint": {"every_steps": 50},
    }


@pytest.fixture(scope="module")
def hosts() -> Iterator[Deployment]:
    with deployed(NUM_WORKERS) as deployment:
        yield deployment


@pytest.fixture
def whole(hosts: Deployment) -> Deployment:
    wait_for(lambda: len(hosts.live_workers()) == NUM_WORKERS, 180, "a whole cluster")
    return hosts


class Trial:
    """One run and what befalls it."""

    def __init__(self, hosts: Deployment, name: str, epochs: int) -> None:
        self.hosts = hosts
        self.epochs = epochs
        self.run: RunHandle = hosts.client().runs.create(spec(name, epochs))
        self.began = time.monotonic()

    def reach(self, step: int, timeout_s: float = 120) -> None:
        """Wait until so many steps are done."""
        wait_for(lambda: self.run.refresh().step >= step, timeout_s, f"step {step}")

    def reach_full_size(self, timeout_s: float = 120) -> None:
        wait_for(lambda: self.run.refresh().status == "RUNNING" and self.run.world_size == NUM_WORKERS, timeout_s, "full size")

    def finish(self, timeout_s: float = 300) -> dict[str, Any]:
        """Wait for the end, hold what must hold of it, and say what it cost."""
        self.run.wait(timeout_s=timeout_s)
        failures = [
            {"verdict": f.verdict, "lost": f.steps_lost, "detect_s": f.detect_s, "recovery_s": f.recovery_s, "step": f.step}
            for f in self.run.failures()
        ]
        record = {
            "name": self.run.name,
            "status": self.run.status,
            "seconds": round(time.monotonic() - self.began, 1),
            "submissions": self.run.submission,
            "steps_lost": self.run.steps_lost,
            "failures": failures,
        }
        print(json.dumps(record), flush=True)
        assert self.run.status == "SUCCEEDED"
        steps = [step for step, _, _ in self.run.metrics("loss", max_points=10_000)["loss"]]
        assert steps == list(range(1, self.epochs * STEPS_PER_EPOCH + 1))
        counted = [(e.epoch, e.samples, e.used_once, e.duplicates, e.missing) for e in self.run.samples().epochs]
        assert counted == [(epoch, 1437, 1437, 0, 0) for epoch in range(self.epochs)]
        return record


def host_of(trial: Trial, rank: int) -> str:
    """The worker host on which a rank of the newest attempt runs."""
    ip = next(worker.node_ip for worker in trial.run.attempts()[-1].workers if worker.rank == rank)
    return next(name for name, host in trial.hosts.hosts.items() if host.cable.ip == ip)


def test_a_host_is_unplugged_and_plugged_in_again(whole: Deployment) -> None:
    trial = Trial(whole, "unplugged", 80)
    trial.reach(60)
    trial.reach_full_size()
    host = whole.hosts[host_of(trial, 1)]
    host.cable.unplug()
    step = trial.run.refresh().step
    trial.reach(step + 40)
    host.cable.plug_in()
    record = trial.finish()
    assert record["steps_lost"] == 0 and record["submissions"] == 1
