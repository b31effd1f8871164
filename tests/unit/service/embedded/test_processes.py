"""The processes of an embedded cluster are found by their environment, also while they start."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from service.embedded import processes
from service.embedded.processes import CLUSTER_DIR_VARIABLE, belongs, members

OURS = {CLUSTER_DIR_VARIABLE: "/tmp/es-ours"}


class Starting:
    """A process as Linux shows it: for ``checks`` looks in the middle of its ``execve``."""

    def __init__(
        self,
        pid: int,
        checks: int,
        environ: dict[str, str],
        exe: str = "/bin/python",
        arguments: tuple[str, ...] = (),
        age_s: float = 0.0,
    ) -> None:
        self.pid, self._checks, self._environ, self._exe = pid, checks, environ, exe
        self._arguments, self._born = arguments, time.time() - age_s

    def create_time(self) -> float:
        return self._born

    def status(self) -> str:
        self._checks -= 1
        return psutil.STATUS_DISK_SLEEP

    def environ(self) -> dict[str, str]:
        return {} if self._checks >= 0 else self._environ

    def cmdline(self) -> list[str]:
        return [*self._arguments] if self._checks >= 0 else ["python", "worker.py"]

    def exe(self) -> str:
        return self._exe


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Starting]]:
    processes_there: list[Starting] = []
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(processes_there))
    yield processes_there


def pids(**without: list[int]) -> list[int]:
    return [process.pid for process in members("/tmp/es-ours", **without)]


def test_a_process_in_the_middle_of_its_exec_is_waited_for(found: list[Starting]) -> None:
    other = {CLUSTER_DIR_VARIABLE: "/tmp/es-other"}
    found += [Starting(1, 0, OURS), Starting(2, 3, OURS), Starting(3, 3, other)]
    found += [Starting(4, 3, {}, age_s=60)]
    assert pids() == [1, 2]


def test_arguments_may_be_those_before_or_after_an_exec(found: list[Starting]) -> None:
    raylet = ("raylet", "--node")
    found += [Starting(1, 3, OURS, arguments=raylet)]
    found += [Starting(2, 1_000_000, {}, arguments=("env", "-i"), age_s=60)]
    assert pids() == [1]
    assert found[1]._checks == 999_999, "one look is enough"


def test_one_that_is_left_out_is_not_waited_for(found: list[Starting]) -> None:
    found += [Starting(1, 1_000_000, OURS)]
    began = time.monotonic()
    assert pids(without=[1]) == []
    assert time.monotonic() - began < processes._EXEC_S


def test_a_kernel_thread_has_no_program_and_is_not_waited_for(found: list[Starting]) -> None:
    thread = Starting(1, 1_000_000, {}, exe="")
    found += [thread]
    assert pids() == []
    assert thread._checks == 999_999, "one look is enough"


def test_the_search_ends_though_a_process_never_shows_itself(
    found: list[Starting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_EXEC_S", 0.05)
    found += [Starting(1, 1_000_000, OURS), Starting(2, 0, OURS)]
    assert pids() == [2]


def test_what_nobody_can_tell_yet_does_not_belong() -> None:
    assert not belongs(Starting(1, 1, OURS), "/tmp/es-ours")  # type: ignore[arg-type]
    assert belongs(Starting(1, 0, OURS), "/tmp/es-ours")  # type: ignore[arg-type]
