"""What is wrong with a deployment, in words: facts in, findings out; and the command over a service
whose cluster is a stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from everstep.cli.main import app
from everstep.doctor.findings import (
    check_findings,
    cluster_findings,
    identity_findings,
    service_findings,
)
from everstep.doctor.nodes import Finding
from everstep.wire import ClusterInfo, Readiness
from everstep.wire.cluster import RunBehind, StorageStatus
from everstep.wire.deployment import (
    AllReduceFacts,
    DeploymentCheck,
    DeploymentReport,
    NodeFacts,
    ServiceFacts,
    StorageFacts,
)
from service.cluster.ray_jobs import RayEndpoint, RayJobs
from storage.cluster import write_report
from tests.support.api_service import ApiService, OneNodeCluster
from tests.support.fake_ray import FakeRay, serving

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
VERSIONS: dict[str, str | None] = {
    "python": "3.11.2",
    "everstep": "0.1.0",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "torchvision": "0.28.0",
}
SERVICE = ServiceFacts(
    hostname="front",
    versions=VERSIONS,
    source="abc",
    at=NOON + timedelta(seconds=10),
    storage="/mnt/everstep",
)


def node(name: str, **fields: Any) -> NodeFacts:
    """A node with which nothing is wrong."""
    facts: dict[str, Any] = {
        "id": name,
        "hostname": f"host-{name}",
        "ip": f"10.0.0.{ord(name[0]) % 250}",
        "is_head": name == "head",
        "gpus": 0,
        "versions": VERSIONS,
        "source": "abc",
        "clock_offset_s": 0.01,
        "clock_error_s": 0.002,
        "storage": StorageFacts(write_mb_per_s=200.0),
        "interface": "eth0",
        "interfaces": ("eth0", "lo"),
        "shared_memory_bytes": 8 << 30,
        "shared_memory_free_bytes": 8 << 30,
        "temporary_free_bytes": 80 << 30,
    }
    return NodeFacts.model_validate(facts | fields)


def findings(
    *nodes: NodeFacts,
    at: datetime = NOON + timedelta(seconds=5),
    storage: str = SERVICE.storage,
    **all_reduce: Any,
) -> list[Finding]:
    """What a check of these nodes means."""
    summed = AllReduceFacts.model_validate(
        {
            "backend": "gloo",
            "nodes": [each.id for each in nodes],
            "size_bytes": 4 << 20,
            "rounds": 9,
            "round_s": 0.01,
        }
        | all_reduce
    )
    report = DeploymentReport(at=at, nodes=nodes, all_reduce=summed)
    service = SERVICE.model_copy(update={"storage": storage})
    return check_findings(
        DeploymentCheck(id="check_x", state="done", service=service, report=report), NOON
    )


def wrong(found: list[Finding]) -> list[tuple[str, str]]:
    assert all(finding.remedy for finding in found if finding.level != "ok"), (
        "what is wrong comes with what to do"
    )
    return [(finding.check, finding.message) for finding in found if finding.level != "ok"]


def test_a_deployment_with_which_nothing_is_wrong() -> None:
    found = findings(node("head"), node("a"), node("b"))
    assert wrong(found) == []
    assert {finding.check for finding in found} >= {
        "nodes",
        "versions",
        "clocks",
        "ports",
        "network",
        "storage",
        "memory",
        "all_reduce",
    }


@pytest.mark.parametrize(
    ("fields", "check", "words"),
    [
        (
            {"problem": "ModuleNotFoundError: No module named 'train_fn'"},
            "nodes",
            "host-b (b) did not respond: ModuleNotFoundError",
        ),
        (
            {"versions": VERSIONS | {"torch": "2.14.0"}},
            "versions",
            "versions of torch differ: most have 2.13.0, host-b (b) has 2.14",
        ),
        (
            {"versions": VERSIONS | {"torch": "2.12.0"}},
            "versions",
            "host-b (b) has torch 2.12.0, and Everstep needs torch 2.13 to 2.15",
        ),
        (
            {"source": "abd"},
            "versions",
            "Everstep's modules differ from the service's on host-b (b)",
        ),
        (
            {"clock_offset_s": -45.0},
            "clocks",
            "the clock of host-b (b) is 45.0 s behind the head's",
        ),
        (
            {"unreachable": ("a",)},
            "ports",
            "host-b (b) cannot connect to host-a (a) on a free port",
        ),
        (
            {"unreachable": ("a",), "raylets_unreachable": ("a",)},
            "ports",
            "host-b (b) cannot connect to host-a (a) at all",
        ),
        ({"interface": None}, "network", "no interface of host-b (b) has its address"),
        (
            {"interface": "lo", "ip": "127.0.1.1"},
            "network",
            "host-b (b) is registered with its loopback address",
        ),
        (
            {"interface_variables": {"NCCL_SOCKET_IFNAME": "ib0"}},
            "network",
            "NCCL_SOCKET_IFNAME=ib0 matches no interface of host-b (b)",
        ),
        (
            {"storage": StorageFacts(problem="disk full")},
            "storage",
            "host-b (b) cannot use /mnt/everstep: disk full",
        ),
        (
            {"storage": StorageFacts(unseen=("head", "a"))},
            "storage",
            "does not see the file of host-head (head) and host-a (a)",
        ),
        (
            {"storage": StorageFacts(differs=("a",))},
            "storage",
            "reads different bytes than were written to the file of host-a (a)",
        ),
        ({"shared_memory_bytes": 64 << 20}, "memory", "host-b (b) has 67 MB of shared memory"),
        (
            {"temporary_free_bytes": 5 << 20},
            "memory",
            "host-b (b) has 5 MB left for temporary files",
        ),
        (
            {"gpus": 8, "cuda": False},
            "gpus",
            "Ray offers 8 GPUs on host-b (b), but torch cannot use them",
        ),
        ({"gpus": 8, "cuda": None}, "gpus", "no GPU of host-b (b) was free"),
    ],
)
def test_each_fault_is_named_with_its_node(fields: dict[str, Any], check: str, words: str) -> None:
    [(found, message)] = wrong(findings(node("head"), node("a"), node("b", **fields)))
    assert found == check and words in message


def test_a_head_without_gpus_may_have_the_cpu_build() -> None:
    assert (
        wrong(
            findings(
                node("head", versions=VERSIONS | {"torch": "2.13.0+cpu"}), node("a"), node("b")
            )
        )
        == []
    )


def test_a_clock_is_only_blamed_beyond_what_the_measurement_can_say() -> None:
    assert wrong(findings(node("head"), node("b", clock_offset_s=1.4, clock_error_s=0.6))) == []


def test_the_head_s_clock_is_held_against_the_service_s() -> None:
    [(check, message)] = wrong(findings(node("head"), node("a"), at=NOON - timedelta(seconds=90)))
    assert (
        check == "clocks" and "the head's clock is at least 90.0 s behind the service's" in message
    )


def test_a_sum_that_did_not_come_about_names_the_variable_to_set() -> None:
    found = findings(
        node("head"), node("a"), problem="RuntimeError: connect timed out", rounds=0, round_s=None
    )
    [bad] = [finding for finding in found if finding.level == "problem"]
    assert (
        "connect timed out" in bad.message
        and bad.remedy is not None
        and "GLOO_SOCKET_IFNAME" in bad.remedy
    )


def test_an_interface_may_be_excluded_or_named_exactly() -> None:
    well = [{"NCCL_SOCKET_IFNAME": value} for value in ("^docker", "=eth0", "eth", "ib0,eth0")]
    assert [
        wrong(findings(node("a", interface_variables=variables), node("b"))) for variables in well
    ] == [[]] * 4
    for wanted in ({"NCCL_SOCKET_IFNAME": "=eth"}, {"GLOO_SOCKET_IFNAME": "eth"}):
        assert wrong(findings(node("a", interface_variables=wanted), node("b"))), (
            "an exact name, and gloo takes no other"
        )


def test_a_store_that_cannot_create_exclusively_is_warned_of() -> None:
    nodes = node("head"), node("a")
    assert wrong(findings(*nodes, storage="s3://bucket/runs")) == []
    [(check, words)] = wrong(findings(*nodes, storage="gs://bucket/runs"))
    assert check == "storage" and "gs://bucket/runs has no conditional create" in words
    assert "storage" in {
        finding.check
        for finding in findings(*nodes, storage="gs://bucket/runs")
        if finding.level == "ok"
    }


def test_what_the_service_itself_lacks() -> None:
    down = Readiness(
        status="unavailable", database="down", storage="down", ray="down", reconciler_lag_s=None
    )
    assert len(wrong(service_findings(down))) == 4
    behind = RunBehind(run_id="run_a", database_submission=3, storage_submission=5)
    mixed = StorageStatus(
        uri="/s",
        known_id="a",
        found_id="b",
        problem="it has id b",
        behind=(behind,),
        unknown_runs=("run_b",),
    )
    found = identity_findings(mixed)
    assert [one.level for one in found] == [
        "problem",
        "problem",
        "warning",
    ] and "everstep storage --adopt" in str(found[1].remedy)
    assert (
        identity_findings(
            mixed.model_copy(update={"problem": None, "behind": (), "unknown_runs": ()})
        )
        == []
    )
    assert (
        wrong(
            service_findings(
                Readiness(
                    status="ready", database="up", storage="up", ray="up", reconciler_lag_s=0.2
                )
            )
        )
        == []
    )


def test_a_cluster_that_can_train_nothing_and_nodes_that_take_nothing() -> None:
    info = ClusterInfo(
        available=True, address=None, dashboard_url=None, ray_version="2.60.0", nodes=()
    )
    assert "no live node offers" in wrong(cluster_findings(info))[0][1]
    old = info.model_copy(update={"ray_version": "2.57.1"})
    assert "the cluster has ray 2.57.1" in wrong(cluster_findings(old))[0][1]
    cordoned = info.model_copy(
        update={"nodes": (OneNodeCluster.node("n1"), OneNodeCluster.node("n2", "CORDONED"))}
    )
    assert ["is CORDONED" in message for _, message in wrong(cluster_findings(cordoned))] == [True]


# ---------------------------------------------------------------- service and command


@pytest.fixture
async def api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ApiService, FakeRay]]:
    with serving(FakeRay()) as ray:
        endpoint = RayEndpoint(ray.url, ray.token)
        async with ApiService(tmp_path) as service, RayJobs(lambda: endpoint) as jobs:
            service.parts.add(jobs)
            service.announce(monkeypatch)
            yield service, ray


async def everstep(*arguments: str) -> Result:
    return await asyncio.to_thread(
        lambda: CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    )


async def finish(
    api: ApiService,
    ray: FakeRay,
    report: DeploymentReport | None,
    status: str = "SUCCEEDED",
    code: int = 0,
) -> None:
    """Do what the check's job would, once it is there."""
    async with asyncio.timeout(60):
        while not ray.submissions:  # noqa: ASYNC110  another process's queue would be no different
            await asyncio.sleep(0.01)
    [check_id] = ray.submissions
    assert f"--check-id {check_id}" in ray.jobs[check_id]["entrypoint"]
    if report is not None:
        write_report(api.storage, check_id, report.model_dump_json().encode())
    ray.jobs[check_id] |= {"status": status, "driver_exit_code": code, "message": "its words"}


async def test_doctor_starts_a_check_waits_and_says_what_is_wrong(
    api: tuple[ApiService, FakeRay],
) -> None:
    service, ray = api
    at = datetime.fromtimestamp(service.clock.now, UTC)
    report = DeploymentReport(
        at=at, nodes=(node("head"), node("b", interface=None)), all_reduce=None
    )
    result, _ = await asyncio.gather(everstep("doctor", "--json"), finish(service, ray, report))
    printed = json.loads(result.stdout)
    assert (result.exit_code, printed["ok"]) == (1, False), result.output
    assert ("network", "problem") in {
        (finding["check"], finding["level"]) for finding in printed["findings"]
    }
    assert {entry.name for entry in service.storage.files.list("cluster/checks")} == set(
        ray.submissions
    )


async def test_a_check_that_left_no_report_says_why(api: tuple[ApiService, FakeRay]) -> None:
    service, ray = api
    result, _ = await asyncio.gather(everstep("doctor"), finish(service, ray, None))
    assert result.exit_code == 1
    assert "do not use the same storage" in result.stdout
    ray.submissions.clear()
    result, _ = await asyncio.gather(everstep("doctor"), finish(service, ray, None, "FAILED", 1))
    assert "its words" in result.stdout


async def test_a_service_that_is_away_and_a_token_that_may_not(
    api: tuple[ApiService, FakeRay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_TOKEN", api[0].token("viewer", "default"))
    result = await everstep("doctor")
    assert result.exit_code == 1 and "everstep token create" in result.stdout
    assert (await api[0].http.get("/v1/cluster/checks/check_none")).status_code == 404
    monkeypatch.setenv("EVERSTEP_URL", "http://127.0.0.1:9")
    result = await everstep("doctor", "--json")
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (3, False)
