"""One deployment on a Docker engine for all tests, whole again before each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.deployment import Deployment, deployed
from tests.compose.engine import engine, why_not
from tests.support.service_process import ASK_S, wait_for

WORKERS = 3


@pytest.fixture(scope="session")
def _deployment() -> Iterator[Deployment]:
    if reason := why_not():
        pytest.skip(reason)
    with engine(), deployed(WORKERS) as deployment:
        yield deployment


@pytest.fixture
def deployment(_deployment: Deployment) -> Iterator[Deployment]:
    _deployment.up(WORKERS)
    yield _deployment
    wait_for(
        lambda: not _deployment.states_in_memory(), 60, "shared memory without runs", every_s=ASK_S
    )
