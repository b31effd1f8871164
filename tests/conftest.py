"""For all tests: those marked ``own_process`` run in a process of their own."""

import os

# before torch is imported: threads of OpenMP do not survive a fork
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.own_process import pytest_runtest_protocol

__all__ = ["pytest_runtest_protocol"]
