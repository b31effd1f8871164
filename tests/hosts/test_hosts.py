"""Training across hosts with addresses of their own, while their network does what networks do.

Each run ends SUCCEEDED, with every step once, every sample used once, and no step lost where a rank survived.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.runs import RunHandle
from tests.digits_run import assert_every_sample_counted_once, assert_every_step_is_there_once
from tests.hosts.compose_file import REPOSITORY, is_possible
from tests.hosts.deployment import Deployment, deployed
from tests.hosts.docker import docker
from tests.service_process import wait_for

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root on Linux"),
]

NUM_WORKERS = 3
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


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

    @classmethod
    def begun(cls, hosts: Deployment, name: str, epochs: int, step: int = 12) -> Trial:
        """One whose run has all ranks, and so many steps done."""
        trial = cls(hosts, name, epochs)
        wait_for(lambda: trial.run.refresh().status == "RUNNING" and trial.run.world_size == NUM_WORKERS, 120, "full size")
        trial.reach(step)
        return trial

    def reach(self, step: int, timeout_s: float = 120) -> None:
        """Wait until so many steps are done."""
        wait_for(lambda: self.run.refresh().step >= step, timeout_s, f"step {step}")

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
        assert_every_step_is_there_once(self.run, self.epochs)
        assert_every_sample_counted_once(self.run, self.epochs)
        return record


def host_of(trial: Trial, rank: int) -> str:
    """The worker host on which a rank of the newest attempt runs."""
    ip = next(worker.node_ip for worker in trial.run.attempts()[-1].workers if worker.rank == rank)
    return next(name for name, host in trial.hosts.hosts.items() if host.cable.ip == ip)


def test_a_host_is_unplugged_and_plugged_in_again(whole: Deployment) -> None:
    trial = Trial.begun(whole, "unplugged", 45)
    host = whole.hosts[host_of(trial, 1)]
    with host.cable.unplugged():
        trial.reach(trial.run.refresh().step + 40)
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)
    assert [failure["verdict"] for failure in record["failures"]] == ["node_lost"]


def test_two_hosts_of_which_one_does_not_hear_the_other(whole: Deployment) -> None:
    """The head reaches both. The run goes on without one of them until they reach each other again."""
    trial = Trial.begun(whole, "asymmetric", 45)
    deaf, other = (whole.hosts[host_of(trial, rank)].cable for rank in (1, 2))
    deaf.stop_hearing(other)
    try:
        trial.reach(trial.run.refresh().step + 40)
        assert trial.run.world_size == 2
    finally:
        deaf.hear_again(other)
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)


def test_a_line_of_200_ms_that_loses_every_fiftieth_frame(whole: Deployment) -> None:
    """Slow is not dead: nothing fails."""
    trial = Trial.begun(whole, "slow line", 30)
    cable = whole.hosts[host_of(trial, 1)].cable
    cable.impair(0.2, 0.02)
    try:
        before = trial.run.refresh().step
        trial.reach(before + 10, 240)
    finally:
        cable.repair()
    record = trial.finish()
    assert (record["failures"], record["submissions"]) == ([], 1)


def test_the_heads_host_is_away_for_a_minute(whole: Deployment) -> None:
    """The ranks train on without it, and it finds them again."""
    trial = Trial.begun(whole, "head away", 130)
    with whole.hosts["head"].cable.unplugged():
        time.sleep(60)
        assert trial.run.refresh().status == "RUNNING"
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)


def test_the_object_stores_name_means_nothing_for_a_while(whole: Deployment) -> None:
    trial = Trial.begun(whole, "no name", 60)
    names = whole.names()
    whole.tell_names({name: ip for name, ip in names.items() if name != "object-store"})
    try:
        time.sleep(30)
    finally:
        whole.tell_names(names)
    record = trial.finish()
    assert (record["failures"], record["submissions"]) == ([], 1)


@pytest.mark.skipif(not FAKETIME.exists(), reason="Debian's faketime is not installed")
def test_a_hosts_clock_is_ahead_and_the_host_is_unplugged(whole: Deployment) -> None:
    host = whole.hosts["worker-3"]
    skew = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+90s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    host.kill()
    host.set_env(skew)
    host.start()
    try:
        wait_for(lambda: whole.live_workers().count(host.cable.ip) == 1 and host.is_healthy(), 300, "the host's coming back")
        trial = Trial.begun(whole, "clock ahead", 45)
        with host.cable.unplugged():
            trial.reach(trial.run.refresh().step + 40)
        record = trial.finish()
        assert (record["steps_lost"], record["submissions"]) == (0, 1)
    finally:
        host.unset_env(skew)
        host.kill()
        host.start()


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_the_head_is_lost(state: str, whole: Deployment) -> None:
    """With its state the nodes join the head that starts again; without it they start anew. The run goes on by itself."""
    trial = Trial.begun(whole, f"head lost - state {state}", 60, step=60)
    head = whole.hosts["head"]
    if state == "kept":
        head.kill_process("gcs_server")
    else:
        head.kill()
        volume = whole.base / "volumes/gcs"
        for entry in volume.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        head.start()
    record = trial.finish()
    assert record["submissions"] >= 2 and record["steps_lost"] <= 2 * 50


def test_workers_are_replaced_one_after_the_other(whole: Deployment) -> None:
    """What ``deploy/rolling-upgrade.sh workers`` does, by its own words: each is drained, stopped, replaced."""
    trial = Trial.begun(whole, "rolling", 120)
    with docker(whole) as env:
        done = subprocess.run(
            [REPOSITORY / "deploy/rolling-upgrade.sh", "workers"], env=env, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)
    assert {failure["verdict"] for failure in record["failures"]} == {"preemption"}
