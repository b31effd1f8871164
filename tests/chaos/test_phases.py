"""Ranks killed and stopped in every phase of a run, at 2, 3 and 5 ranks: each run ends as if
nothing had happened, bit by bit.

Real processes on a real cluster under a real driver. Part of ``make chaos``; ``ARGS="-k commit"``
runs one phase.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import psutil
import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from tests.chaos.deadly_loop import Strike
from tests.integration.driven_run import DrivenRun
from tests.integration.ranks import Job, make_run_dir, train_to_end
from tests.integration.ray_cluster import REPOSITORY, RayCluster, ray_cluster
from tests.integration.test_exactness import LAST_STEP, assert_same, final_state, make_spec
from train_fn.node.node_dir import shared_memory_root

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

WORLDS = (2, 3, 5)
PATIENCE = {
    "EVERSTEP_RECOVERY_GROUP_START_S": "60",
    "EVERSTEP_RECOVERY_HANG_START_S": "20",
    "EVERSTEP_RECOVERY_HANG_FIRST_STEP_S": "20",
    "EVERSTEP_RECOVERY_HANG_EVALUATION_S": "8",
}
"""How long ranks may stand still: a stopped one is to be found soon, and processes that start on a
busy machine are not stopped."""

Strikes = Callable[[int, Signals], list[Strike]]
PLANS: dict[str, Strikes] = {
    "start": lambda world, how: [Strike("start", world - 1, 0, 1, how)],
    "all_reduce": lambda world, how: [Strike("all_reduce", world - 1, 7, 1, how)],
    "commit": lambda world, how: [Strike("commit", world - 1, 7, 1, how)],
    "evaluation": lambda world, how: [Strike("evaluation", world - 1, 15, 1, how)],
    "checkpoint": lambda world, how: [Strike("checkpoint", 0, 10, 1, how)],
    "loader": lambda world, how: [Strike("loader", world - 1, 7, 1, how)],
    "recovery": lambda world, how: [
        Strike("all_reduce", 0, 7, 1, SIGKILL),
        Strike("start", world - 1, 0, 2, how),
    ],
    "two_at_once": lambda world, how: [
        Strike("all_reduce", 0, 12, 1, how),
        Strike("all_reduce", world - 1, 12, 1, SIGKILL),
    ],
}


SECTIONS: dict[str, tuple[Callable[[int, Signals], list[Strike]], int]] = {
    "claim": (
        lambda step, how: [
            Strike("all_reduce", 1, 7, 1, SIGKILL),
            Strike(f"claim.{step}", 0, 0, 2, how),
        ],
        9,
    ),
    "save": (lambda step, how: [Strike(f"save.{step}", 0, 10, 1, how)], 8),
    "abort": (lambda step, how: [Strike(f"abort.{step}", 0, 10, 1, how)], 5),
}
"""What rank 0 does to the storage, and how many calls of the system that are at the least."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(max(WORLDS)) as running:
        yield running
        assert _placement_groups(running) == []


@pytest.fixture
def small_cluster() -> Iterator[RayCluster]:
    with ray_cluster(2) as running:
        yield running


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """The final state of the same run that nothing happens to, by world size."""
    found: dict[int, dict[str, Any]] = {}

    def final(world: int) -> dict[str, Any]:
        if world not in found:
            directory = tmp_path_factory.mktemp(f"reference-{world}")
            run_dir = make_run_dir(directory)
            train_to_end(Job(run_dir, make_spec("batch"), world), directory)
            found[world] = final_state(run_dir)
        return found[world]

    return final


def deadly_spec(world: int, strikes: list[Strike]) -> RunSpec:
    spec = make_spec("batch").model_dump(mode="json")
    changes = {
        "train": {**spec["train"], "loader": {"num_workers": int(strikes[0].place == "loader")}},
        "scaling": {"min_workers": world, "max_workers": world},
        "recovery": {"hang_timeout_s": 4},
        "tags": {"strikes": " ".join(map(str, strikes))},
    }
    return RunSpec.model_validate({**spec, **changes})


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", [SIGKILL, SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("section", SECTIONS)
def test_rank_0_struck_in_every_step_of_what_it_does_to_the_storage(
    section: str,
    how: Signals,
    small_cluster: RayCluster,
    reference: Callable[[int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """A run for each call of the system, up to the first number at which nothing was struck.

    First in this file, before the large cluster is up: every run leaves idle processes on its
    cluster, and two clusters of them are more than two cores bear.
    """
    strikes_at, at_least = SECTIONS[section]
    for step in count():
        run = DrivenRun(
            small_cluster,
            tmp_path / str(step),
            deadly_spec(2, strikes_at(step, how)),
            module="tests.chaos.deadly_driver",
        )
        try:
            run.start(**PATIENCE)
            assert run.wait_for_end() == 0, run.describe()
            expected = _blamed(section, 2, how)
            was_struck = len(run.of(EventKind.FAILURE)) == len(expected)
            print(json.dumps({"section": section, "step": step, "failures": _failures(run)}))
            _check(run, expected if was_struck else expected[:-1], expect_recovery=was_struck)
            assert_same(final_state(run.run_dir), reference(2))
        finally:
            run.stop()
        if not was_struck:
            break
    assert step >= at_least, f"only {step} steps were found"


@pytest.mark.parametrize("how", [SIGKILL, SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("phase", [*PLANS, "rendezvous"])
def test_a_rank_struck_in_any_phase(
    phase: str,
    world: int,
    how: Signals,
    cluster: RayCluster,
    reference: Callable[[int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    run = strike_and_check(phase, world, how, cluster, reference(world), tmp_path)
    if phase in ("all_reduce", "commit", "evaluation", "checkpoint"):
        assert [event.data["rung"] for event in run.of(EventKind.RECOVERED)] == ["snapshot"]
        [before, after] = [
            {worker["pid"] for worker in event.data["workers"]}
            for event in run.of(EventKind.ATTEMPT_STARTED)
        ]
        assert not before & after, "no process trains in two attempts"


def strike_and_check(
    phase: str,
    world: int,
    how: Signals,
    cluster: RayCluster,
    expected_state: dict[str, Any],
    directory: Path,
) -> DrivenRun:
    """Train on ``cluster``, strike a rank in ``phase``, and hold the run against one that nothing
    happened to."""
    at = {"device": Strike("device", world - 1, 7, 1, how)}
    never = Strike("start", 0, 0, -1, how)
    strikes = PLANS[phase](world, how) if phase in PLANS else [at.get(phase, never)]
    run = DrivenRun(
        cluster,
        directory,
        deadly_spec(world, strikes),
        module="tests.chaos.deadly_driver",
    )
    try:
        run.start(**PATIENCE)
        # told of as soon as the processes are there, before they have met
        if phase == "rendezvous":
            run.wait_for(lambda: run.of(EventKind.ATTEMPT_STARTED), "the ranks' processes")
            os.kill(run.worker(world - 1)["pid"], how)
        assert run.wait_for_end() == 0, run.describe()
        print(
            json.dumps(
                {"phase": phase, "world": world, "how": how.name, "failures": _failures(run)}
            )
        )
        # of two at once nobody survives a group of two
        somebody_survives = phase != "two_at_once" or world > 2 or how is SIGSTOP
        blamed = _blamed(phase, world, how)
        _check(run, blamed, expect_recovery=somebody_survives)
        assert_same(final_state(run.run_dir), expected_state)
        return run
    finally:
        run.stop()


def _failures(run: DrivenRun) -> list[tuple[Any, ...]]:
    """Verdict, rank, steps lost and seconds of each failure, for the record."""
    failures = [
        (event.data["verdict"], event.data["first_rank"]) for event in run.of(EventKind.FAILURE)
    ]
    recovered = [
        (event.data["steps_lost"], event.data["recovery_s"])
        for event in run.of(EventKind.RECOVERED)
    ]
    return [(*failure, *after) for failure, after in zip_longest(failures, recovered, fillvalue=())]


def _blamed(phase: str, world: int, how: Signals) -> list[set[tuple[str, int]]]:
    """What each failure may be called, and which rank named."""
    verdict, victim = "worker_lost" if how is SIGKILL else "hang", world - 1
    if phase == "device":
        return [{("hardware", victim)}]
    if phase == "loader":  # its rank waits for it, and torch notices after 5 s
        return [{("hang", victim), (verdict, victim)}]
    if phase == "recovery":
        return [{("worker_lost", 0)}, {(verdict, victim)}]
    if phase == "claim":
        return [{("worker_lost", victim)}, {(verdict, 0)}]
    if phase == "two_at_once":
        return [{("worker_lost", victim), *([("worker_lost", 0)] if how is SIGKILL else [])}]
    return [{(verdict, 0 if phase in ("checkpoint", "save", "abort") else victim)}]


def _check(run: DrivenRun, expected: list[set[tuple[str, int]]], *, expect_recovery: bool) -> None:
    """Hold what must hold of a run that has ended; ``expected`` is what each failure may be
    called."""
    run.check_sequence()
    assert run.last(EventKind.FINISHED).data["outcome"] == "succeeded", run.describe()
    assert {step for step, _ in run.steps()} == set(range(1, LAST_STEP + 1))
    blamed = [
        (event.data["verdict"], event.data["first_rank"]) for event in run.of(EventKind.FAILURE)
    ]
    assert len(blamed) == len(expected) and all(map(set.__contains__, expected, blamed)), (
        run.describe()
    )
    if expect_recovery:
        # none of an attempt that fails before a step
        lost = [event.data["steps_lost"] for event in run.of(EventKind.RECOVERED)]
        assert lost and set(lost) == {0}, run.describe()
    used = [event.data for event in run.of(EventKind.EPOCH_COMPLETED)]
    assert {
        (data["epoch"], data["samples"], data["used_once"], data["missing"]) for data in used
    } == {(epoch, 1437, 1437, 0) for epoch in (0, 1)}
    assert not (shared_memory_root() / run.run_dir.run_id).exists()
    deadline = time.monotonic() + 20
    while left := _left(run):
        assert time.monotonic() < deadline, f"processes of the run are left: {left}"
        time.sleep(0.1)


def _left(run: DrivenRun) -> list[str]:
    """Processes of a run that has ended: actors of the cluster but for idle ones, and the driver's
    own."""
    assert run.driver is not None
    titles = [title for pid, title in run.cluster_actors() if pid != run.driver.pid]
    return titles + [str(run.driver.pid)] * psutil.pid_exists(run.driver.pid) * (
        run.driver.poll() is None
    )


def _placement_groups(cluster: RayCluster) -> list[str]:
    """States of placement groups that were not removed."""
    code = (
        "import ray; from ray.util import placement_group_table as table; "
        "ray.init(log_to_driver=False, configure_logging=False);"
        "print('states', *[group['state'] for group in table().values() if group['state'] != "
        "'REMOVED'])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=cluster.env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    [line] = [line for line in answer.stdout.splitlines() if line.startswith("states")]
    return line.split()[1:]
