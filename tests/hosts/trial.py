"""A run on the hosts of a deployment, and what must hold of it at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from everstep import Client
from everstep.client.runs import RunHandle
from tests.hosts.deployment import Deployment
from tests.support.digits_run import (
    assert_every_sample_counted_once,
    assert_every_step_is_there_once,
)
from tests.support.raw_specs import TASK
from tests.support.service_process import ASK_S, wait_for

NUM_WORKERS = 3
"""Worker hosts, and ranks of a run that uses all of them."""


def spec(
    name: str, epochs: int, ranks: int = NUM_WORKERS, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "task": TASK,
        "train": {"epochs": epochs, "global_batch_size": 128, "micro_batch_size": 32, "seed": 5},
        "scaling": {"min_workers": 1, "max_workers": ranks},
        "checkpoint": {"every_steps": 50},
        **(changes or {}),
    }


class Reachable(Protocol):
    """A deployment that answers."""

    def client(self) -> Client: ...


D = TypeVar("D", bound=Reachable)


class Trial(Generic[D]):
    """One run of a deployment and what befalls it."""

    def __init__(
        self,
        hosts: D,
        name: str,
        epochs: int,
        ranks: int = NUM_WORKERS,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """``changes`` take the place of parts of the spec."""
        self.hosts = hosts
        self.epochs = epochs
        self.ranks = ranks
        self.run: RunHandle = hosts.client().runs.create(spec(name, epochs, ranks, changes))
        self.began = time.monotonic()

    @classmethod
    def begun(
        cls,
        hosts: D,
        name: str,
        epochs: int,
        ranks: int = NUM_WORKERS,
        changes: Mapping[str, Any] | None = None,
        *,
        step: int = 12,
    ) -> Trial[D]:
        """One whose run has all ranks, and so many steps done."""
        trial = cls(hosts, name, epochs, ranks, changes)
        wait_for(trial.is_at_full_size, 300, "full size", every_s=ASK_S)
        trial.reach(step)
        return trial

    def is_at_full_size(self) -> bool:
        return self.run.refresh().status == "RUNNING" and self.run.world_size == self.ranks

    def reach(self, step: int) -> None:
        """Wait until so many steps are done."""
        wait_for(lambda: self.run.refresh().step >= step, 300, f"step {step}", every_s=ASK_S)

    def finish(self, timeout_s: float = 600) -> dict[str, Any]:
        """Wait for the end, hold what must hold of it, and say what it cost."""
        self.run.wait(timeout_s=timeout_s)
        failures = [
            {
                "verdict": f.verdict,
                "lost": f.steps_lost,
                "detect_s": f.detect_s,
                "recovery_s": f.recovery_s,
                "step": f.step,
            }
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
        assert_every_step_is_there_once(self.run, self.epochs)
        assert_every_sample_counted_once(self.run, self.epochs)
        return record


def host_of(trial: Trial[Deployment], rank: int) -> str:
    """The worker host on which a rank of the newest attempt runs."""
    ip = next(worker.node_ip for worker in trial.run.attempts()[-1].workers if worker.rank == rank)
    return next(name for name, host in trial.hosts.hosts.items() if host.cable.ip == ip)
