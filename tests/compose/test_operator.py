"""What an operator does with a deployment on Docker, and fears.

Each run ends SUCCEEDED with every step and every sample once. Where a rank survives, no step is
lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compose.conftest import WORKERS
from tests.compose.deployment import Deployment
from tests.compose.engine import run
from tests.compose.steps import EPOCHS, container_of, go_on, polled
from tests.hosts.trial import Trial, spec
from tests.support.service_process import ASK_S, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]


def test_the_first_run_by_curl_by_the_sdk_and_by_the_command_line(
    deployment: Deployment, tmp_path: Path
) -> None:
    body = tmp_path / "run.json"
    body.write_text(json.dumps(spec("by-curl", 2, ranks=2)))
    answer = run(
        *("curl", "--silent", "--fail-with-body", "--cacert", deployment.certificate),
        *("--header", f"Authorization: Bearer {deployment.token}"),
        *("--json", f"@{body}", f"{deployment.url}/v1/runs"),
    )
    first = deployment.client().runs.get(json.loads(answer)["id"])
    first.wait(timeout_s=300)
    assert first.status == "SUCCEEDED"
    command = [Path(sys.executable).parent / "everstep"]
    done = subprocess.run(
        [*command, "submit", body, "--watch"],
        env=deployment.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCEEDED" in done.stdout


def test_a_worker_is_killed_and_brought_back(deployment: Deployment) -> None:
    trial = Trial.begun(deployment, "worker-killed", EPOCHS)
    run("docker", "kill", container_of(trial, 1))
    go_on(trial)
    assert trial.run.world_size == WORKERS - 1
    deployment.up(WORKERS)
    wait_for(trial.is_at_full_size, 120, "full size", every_s=ASK_S)
    record = trial.finish()
    assert (record["steps_lost"], record["submissions"]) == (0, 1)
    assert [failure["verdict"] for failure in record["failures"]] == ["node_lost"]


def test_the_head_is_killed_and_started_again(deployment: Deployment) -> None:
    trial = Trial.begun(deployment, "head-killed", EPOCHS)
    (head,) = deployment.containers("head")
    run("docker", "kill", head)
    run("docker", "start", head)
    assert trial.finish()["steps_lost"] == 0


def test_a_replica_is_killed_and_the_other_answers(deployment: Deployment) -> None:
    trial = Trial.begun(deployment, "replica-killed", EPOCHS)
    (replica,) = deployment.containers("service-a")
    run("docker", "kill", replica)
    wait_for(deployment.is_ready, 30, "an answer of the other replica", every_s=ASK_S)
    with polled(deployment, trial.run.id) as problems:
        go_on(trial)
        deployment.compose("up", "--detach", "--no-build", "--wait", "--no-recreate", "service-a")
        go_on(trial)
    assert problems == []
    record = trial.finish()
    assert (record["steps_lost"], record["failures"]) == (0, [])
