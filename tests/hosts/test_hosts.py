"""Training across hosts with addresses of their own, while their network does what networks do.

Each run ends SUCCEEDED, with every step once, every sample used once, and no step lost where a rank
survived.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterable

import pytest
import yaml

from tests.hosts import clock
from tests.hosts.compose_file import REPOSITORY, is_possible
from tests.hosts.deployment import Deployment
from tests.hosts.host import Host
from tests.hosts.trial import NUM_WORKERS, Trial, host_of
from tests.support.service_process import ASK_S, wait_for

RAY_CLUSTER = REPOSITORY / "deploy/kuberay/raycluster.yaml"

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root on Linux"),
]


def pre_stop_command() -> list[str]:
    """What a worker's pod runs before it ends."""
    [cluster] = [
        each for each in yaml.safe_load_all(RAY_CLUSTER.read_text()) if each["kind"] == "RayCluster"
    ]
    [worker] = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    command: list[str] = worker["lifecycle"]["preStop"]["exec"]["command"]
    return command


def start_again(hosts: Deployment, names: Iterable[str], change: Callable[[Host], None]) -> None:
    """Shut worker hosts down, change them, start them, and wait until new nodes stand in the place
    of the old ones."""
    old = set(hosts.live_nodes())

    def has_new_node(host: Host) -> bool:
        return host.cable.ip in {
            ip for node_id, ip in hosts.live_nodes().items() if node_id not in old
        }

    for host in (hosts.hosts[name] for name in names):
        host.stop(60)
        change(host)
        host.start()
        wait_for(
            functools.partial(has_new_node, host), 300, f"a new node on {host.name}", every_s=ASK_S
        )
    wait_for(lambda: len(hosts.live_nodes()) == NUM_WORKERS, 300, "a whole cluster", every_s=ASK_S)


def test_the_doctor_finds_nothing_wrong(whole: Deployment) -> None:
    done = whole.hosts["service-a"].run(["everstep", "doctor", "--all-reduce", "2"], timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_hosts_of_which_one_does_not_hear_the_other(whole: Deployment) -> None:
    """The head reaches both. The run goes on without one of them until they reach each other
    again."""
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
        trial.reach(before + 10)
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
    many = {"checkpoint": {"every_steps": 50, "max_failed_saves": 100}}
    trial = Trial.begun(whole, "no name", 60, changes=many)
    names = whole.names()
    whole.tell_names({name: ip for name, ip in names.items() if name != "object-store"})
    try:
        time.sleep(30)
    finally:
        whole.tell_names(names)
    record = trial.finish()
    assert (record["failures"], record["submissions"]) == ([], 1)


@pytest.mark.skipif(
    not clock.is_possible(),
    reason="no C compiler for the library that tells processes another time",
)
def test_hosts_whose_clocks_are_twenty_minutes_apart_and_one_is_unplugged(
    whole: Deployment,
) -> None:
    """What is told of it is told by the head's clock, wherever rank 0 was."""
    wrong = {"worker-2": -600, "worker-3": 600}
    with clock.clock_library() as library:
        environments = {
            name: clock.wrong_clock(library, ahead_s) for name, ahead_s in wrong.items()
        }
        start_again(whole, wrong, lambda host: host.set_env(environments[host.name]))
        try:
            assert all(
                clock.is_ahead(whole.hosts[name], ahead_s) for name, ahead_s in wrong.items()
            )
            trial = Trial.begun(whole, "clocks apart", 45)
            with whole.hosts["worker-3"].cable.unplugged():
                trial.reach(trial.run.refresh().step + 40)
            record = trial.finish()
        finally:
            start_again(whole, wrong, lambda host: host.unset_env(environments[host.name]))
    assert (record["steps_lost"], record["submissions"]) == (0, 1)
    assert [failure["verdict"] for failure in record["failures"]] == ["node_lost"]
    assert 0 <= record["failures"][0]["recovery_s"] <= record["seconds"]


@pytest.mark.parametrize("state", ["kept", "lost"])
def test_the_head_is_lost(state: str, whole: Deployment) -> None:
    """With its state the nodes join the head that starts again; without it they start anew. The run
    goes on by itself."""
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


def test_the_hook_of_a_pod_hands_its_ranks_over_before_the_pod_ends(whole: Deployment) -> None:
    """By the command of the manifests, in a worker's host. SIGTERM follows, as Kubernetes sends it,
    when Ray's node is gone already."""
    trial = Trial.begun(whole, "hook", 90)
    host = whole.hosts[host_of(trial, 1)]
    done = host.run(pre_stop_command(), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: len(trial.run.attempts()) > 1, 60, "the second attempt", every_s=ASK_S)
    assert host.cable.ip not in {each.node_ip for each in trial.run.attempts()[1].workers}
    host.stop(60)
    host.start()
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)
    assert record["failures"][0]["verdict"] == "preemption"
