"""For all tests: those marked ``own_process`` run in a process of their own."""

from tests.support.own_process import pytest_runtest_protocol

__all__ = ["pytest_runtest_protocol"]
