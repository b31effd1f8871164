"""One service with an embedded cluster of three one-CPU nodes for the tests that leave it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.service_process import ServiceProcess


@pytest.fixture(scope="session")
def service() -> Iterator[ServiceProcess]:
    """Shared: tests may kill ranks, never nodes or the service."""
    with ServiceProcess(nodes=3) as process:
        yield process


@pytest.fixture
def own_service() -> Iterator[ServiceProcess]:
    """A service of the test's own, to be broken."""
    with ServiceProcess(nodes=3) as process:
        yield process
