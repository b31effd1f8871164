"""A deployment on Docker whose memory or disk is full."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.compose.deployment import Deployment
from tests.compose.engine import run
from tests.compose.steps import DAILY, EPOCHS, assert_never_interrupted, follow
from tests.hosts.trial import Trial
from tests.support.service_process import ASK_S, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]
OUTAGE_S = 45
GREEDY = """
held = []


def train_fn(config):
    while True:
        held.append(bytearray(64 << 20))
"""


def test_a_worker_reaches_its_memory_limit(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    client = deployment.client()
    greedy: dict[str, Any] = {
        "name": "greedy",
        "code": {"train_fn": "greedy:train_fn", "archive": client.code.upload(tmp_path).digest},
        "scaling": {"min_workers": 1, "max_workers": 1},
    }
    failed = client.runs.create(greedy)
    wait_for(failed.failures, 600, "a failure", every_s=ASK_S)
    assert {failure.verdict for failure in failed.failures()} == {"out_of_memory"}
    failed.cancel()
    wait_for(lambda: failed.refresh().status == "CANCELLED", 120, "its end", every_s=ASK_S)


def test_the_object_store_s_disk_is_full(deployment: Deployment) -> None:
    """The journal cannot be written either, so nobody knows what the ranks do, for longer than a
    step may take. They train on, and tell all of it afterwards.

    SeaweedFS, which stands in MinIO's place, may keep the error of a write until it is restarted.
    """
    limits = {"recovery": {"hang_timeout_s": OUTAGE_S / 3}}
    trial = Trial.begun(deployment, "disk-full", 3 * EPOCHS, changes=limits)
    (store,) = deployment.containers("object-store")
    inside = ["docker", "exec", store, "sh", "-c"]
    try:
        run(*inside, "dd if=/dev/zero of=/data/filler bs=1M 2>/dev/null; df /data")
        wait_for(lambda: not deployment.is_ready(), 300, "a storage that is full", every_s=ASK_S)
        time.sleep(OUTAGE_S)  # the length of the outage
    finally:
        run(*inside, "rm -f /data/filler")
        follow(deployment, DAILY, "restart", PART="object-store")
    assert_never_interrupted(trial)
    assert any(event.kind == "checkpoint_failed" for event in trial.run.events())
