"""For all tests: those marked ``own_process`` run in a process of their own, those that share a
cluster run one after the other, and ``api`` is a running API."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# before torch is imported: threads of OpenMP do not survive a fork
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.own_process import pytest_runtest_protocol
from tests.support.two_groups import ByPiece, check_marks

if TYPE_CHECKING:
    from tests.support.api_service import ApiService

__all__ = ["pytest_runtest_protocol"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPiece | None:
    return ByPiece(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    check_marks(items)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiService]:
    # here, since few tests need what this imports
    from tests.support.api_service import ApiService

    async with ApiService(tmp_path) as service:
        yield service
