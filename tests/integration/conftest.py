"""Clusters that tests share. Each ends with the last test of its piece (support/two_groups.py)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Generic, TypeVar

import pytest

from tests.integration.ray_cluster import RayCluster, ray_cluster
from tests.support.service_process import ServiceProcess
from tests.support.two_groups import keep_pieces_together, piece_of

T = TypeVar("T")


class Shared(Generic[T]):
    """A cluster that is started when a test first asks for it."""

    def __init__(self, start: Callable[[], AbstractContextManager[T]]) -> None:
        self._start = start
        self._running: T | None = None
        self._stack = ExitStack()

    def get(self) -> T:
        if self._running is None:
            self._running = self._stack.enter_context(self._start())
        return self._running

    def end(self) -> None:
        self._running = None
        self._stack.close()


SERVICE: Shared[ServiceProcess] = Shared(lambda: ServiceProcess(nodes=3))
TWO_NODES: Shared[RayCluster] = Shared(lambda: ray_cluster(2))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    keep_pieces_together(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    try:
        yield
    finally:
        if nextitem is None or piece_of(nextitem.nodeid) != piece_of(item.nodeid):
            SERVICE.end()
            TWO_NODES.end()


@pytest.fixture
def service() -> ServiceProcess:
    """A service with an embedded cluster of three one-CPU nodes. Tests may kill ranks."""
    return SERVICE.get()


@pytest.fixture
def mended(service: ServiceProcess) -> Iterator[ServiceProcess]:
    """The same, for tests that kill a node or the service: all is there again afterwards."""
    yield service
    service.mend()


@pytest.fixture
def own_service() -> Iterator[ServiceProcess]:
    """A service of the test's own, to be broken."""
    with ServiceProcess(nodes=3) as process:
        yield process


@pytest.fixture
def two_nodes() -> RayCluster:
    """A Ray cluster of two one-CPU nodes. A test that kills one puts another in its place."""
    return TWO_NODES.get()
