"""Secrets of workers on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.integration.driven_run import DrivenRun, spec
from tests.integration.ray_cluster import RayCluster, ray_cluster
from train_fn.node.secrets import MASK

pytestmark = [pytest.mark.timeout(600), pytest.mark.chaos]

VALUE = "hunter2-but-longer"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2) as running:
        yield running


def test_a_rank_has_its_secret_and_nothing_that_is_kept_has_its_value(
    cluster: RayCluster, tmp_path: Path
) -> None:
    cluster.secrets_dir.mkdir()
    (cluster.secrets_dir / "hub").write_text(f"{VALUE}\n")
    tags = {"steps": "5", "step_ms": "10", "raise_at": "3", "tell": "HUB_TOKEN"}
    run = DrivenRun(cluster, tmp_path, spec(tags=tags, secrets={"HUB_TOKEN": "hub"}), small=True)
    try:
        run.start()
        assert run.wait_for_end() == 0, run.describe()
    finally:
        run.stop()
    failure = run.last(EventKind.FAILURE).data
    assert failure["verdict"] == "user_error" and f"is spoilt: {MASK}" in failure["exception"]
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert f"step 1: {MASK}".encode() in kept and VALUE.encode() not in kept
