"""A state that is lent goes from the memory of one attempt's ranks to the next one's, and no bit of
the run shows it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from tests.integration.moving_buffers import SPEC
from tests.integration.ranks import Job, Outcome, lending_ranks, make_run_dir, train_to_end
from tests.integration.test_exactness_elastic import Bits, elastic
from tests.support.service_process import wait_for
from train_fn.snapshots import leaving, state_file

MOVING = "tests.integration.elastic_setups:measured_task"
"""A task whose forward passes change, replace and create buffers, and that measures its own
metric."""
STEP = 5


def lends_all() -> None:
    from tests.integration.elastic_setups import measured_task

    leaving.SNAPSHOT_BYTES = -1
    measured_task()


def lender_dies_while_read() -> None:
    """The process whose memory rank 0 reads ends when a part of it is read."""
    lends_all()
    state_file.PIECE_BYTES, state_file.SUM_THREADS = 64, 1
    copy, copied = state_file._copy_from, list[int]()

    def copy_and_kill(pid: int, sources: Any, targets: Any) -> None:
        copy(pid, sources, targets)
        copied.append(pid)
        if len(copied) == 4 and dist.get_rank() == 0:
            lender = psutil.Process(pid)
            lender.kill()
            wait_for(lambda: is_gone(lender), 20, "the end of the lender")

    state_file._copy_from = copy_and_kill  # type: ignore[assignment]


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Run:
    """A run whose ranks lend their states."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.run_dir = make_run_dir(tmp_path)
        self._tmp_path, self._stack = tmp_path, stack
        self._attempt, self.outcomes = 0, list[Outcome]()

    def _job(self, world_size: int, **facts: Any) -> Job:
        self._attempt += 1
        setup = f"{__name__}:{facts.pop('setup', 'lends_all')}"
        spec = elastic(SPEC)
        return Job(self.run_dir, spec, world_size, self._attempt, setup=setup, **facts)

    def attempt(self, world_size: int, **facts: Any) -> list[Outcome]:
        """Run the next attempt, whose processes lend as long as the test lasts."""
        job = self._job(world_size, lends=True, **facts)
        found = self._stack.enter_context(lending_ranks(job, self._tmp_path))
        self.outcomes += found
        return found

    def finish(self, world_size: int, **facts: Any) -> dict[str, Any]:
        """Run the last attempt. Return where it began."""
        last = train_to_end(self._job(world_size, **facts), self._tmp_path)
        self.outcomes.append(last)
        [restored] = last.of_kind(EventKind.RESTORED)
        return restored

    def require_as(self, whole: Bits) -> None:
        Bits(self.run_dir, *self.outcomes).require_same(whole)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    """What a run leaves that nothing disturbs."""
    tmp_path = tmp_path_factory.mktemp("whole")
    run_dir = make_run_dir(tmp_path, "whole")
    job = Job(run_dir, elastic(SPEC), 2, setup=MOVING)
    return Bits(run_dir, train_to_end(job, tmp_path))


def test_any_number_of_ranks_goes_on_from_what_survivors_lend(whole: Bits, tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.attempt(3, killed=(1, 2))
        run.attempt(2, killed=(0, 3))
        restored = run.finish(3)
    assert (restored["source"], restored["step"], restored["rejected"]) == ("snapshot", 3, [])
    run.require_as(whole)


def test_ranks_hand_over_to_more_without_a_checkpoint(whole: Bits, tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = Run(tmp_path, stack)
        first = run.attempt(2, stopped=("pause", STEP), hands_over=True)
        assert [each.stop for each in first] == ["yielded"] * 2
        assert CheckpointStore(run.run_dir).list() == []
        restored = run.finish(3)
    assert (restored["source"], restored["step"]) == ("snapshot", STEP + 1)
    run.require_as(whole)


@pytest.mark.parametrize("num_lenders", [1, 2])
def test_a_lender_that_dies_while_it_is_read_costs_nothing_if_there_is_another(
    num_lenders: int, whole: Bits, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        run = Run(tmp_path, stack)
        run.attempt(num_lenders + 1, killed=(num_lenders, STEP))
        restored = run.finish(2, setup="lender_dies_while_read")
    assert len(restored["rejected"]) == 1
    assert restored["step"] == STEP if num_lenders > 1 else restored["step"] < STEP
    run.require_as(whole)
