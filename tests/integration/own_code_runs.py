"""Runs of code of a user's own under real drivers. Test modules import ``cluster`` and ``started``
as their fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.spec.run_spec import RunSpec
from storage.code import CodeStore
from storage.filesystem import open_storage
from tests.integration.driven_run import DrivenRun
from tests.integration.ray_cluster import RayCluster


@pytest.fixture
def cluster(two_nodes: RayCluster) -> RayCluster:
    return two_nodes


@pytest.fixture
def started(cluster: RayCluster, tmp_path: Path) -> Iterator[list[DrivenRun]]:
    runs: list[DrivenRun] = []
    yield runs
    for run in runs:
        run.stop()


def begin(
    started: list[DrivenRun],
    cluster: RayCluster,
    storage: Path,
    archive: bytes,
    code: dict[str, Any],
    *,
    min_workers: int = 1,
    **sections: Any,
) -> DrivenRun:
    """Start a run of the code in ``archive`` on up to two ranks."""
    digest = CodeStore(open_storage(str(storage))).put(archive).digest
    scaling = {"min_workers": min_workers, "max_workers": 2}
    spec = RunSpec.model_validate(
        {"name": "own", "code": {"archive": digest, **code}, "scaling": scaling, **sections}
    )
    run = DrivenRun(cluster, storage, spec)
    started.append(run)
    run.start()
    return run
