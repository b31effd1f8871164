"""One deployment on a Docker engine for all tests, whole again before each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compose.deployment import Deployment, deployed
from tests.compose.engine import engine, why_not

WORKERS = 3


@pytest.fixture(scope="session")
def _deployment() -> Iterator[Deployment]:
    if reason := why_not():
        pytest.skip(reason)
    with engine(), deployed(WORKERS) as deployment:
        yield deployment


@pytest.fixture
def deployment(_deployment: Deployment) -> Deployment:
    _deployment.up(WORKERS)
    return _deployment
