"""For all tests: those marked ``own_process`` run in a process of their own, and those that share a
cluster run one after the other."""

from __future__ import annotations

import os
from typing import Any

import pytest

# before torch is imported: threads of OpenMP do not survive a fork
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.own_process import pytest_runtest_protocol
from tests.support.two_groups import ByPiece, check_marks

__all__ = ["pytest_runtest_protocol"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByPiece | None:
    return ByPiece(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    check_marks(items)
