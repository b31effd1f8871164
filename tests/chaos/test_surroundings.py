"""What surrounds a run goes wrong: clocks jump, and the nodes' memory is full."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from everstep.client.runs import RunHandle
from everstep.wire import RunStatus
from tests.chaos.faults import Fault, strike
from tests.hosts import clock
from tests.support.digits_run import STEPS_PER_EPOCH
from tests.support.raw_specs import TASK
from tests.support.service_process import ServiceProcess, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def spec(name: str, epochs: int, ranks: int = 2, **sections: Any) -> dict[str, Any]:
    return {
        "name": name,
        "task": TASK,
        "train": {"epochs": epochs, "global_batch_size": 128, "micro_batch_size": 64},
        "scaling": {"min_workers": 1, "max_workers": ranks},
        "checkpoint": {"every_steps": 30},
        **sections,
    }


def reach(run: RunHandle, step: int) -> None:
    wait_for(lambda: run.refresh().step >= step, 240, f"step {step} of {run.id}", every_s=0.2)


def require_whole(run: RunHandle, epochs: int) -> None:
    """It ended well, and every sample of every epoch counted once."""
    assert (run.status, run.step) == (RunStatus.SUCCEEDED, epochs * STEPS_PER_EPOCH), run.reason
    counted = [(each.used_once, each.duplicates, each.missing) for each in run.samples().epochs]
    assert counted == [(1437, 0, 0)] * epochs


def kill_a_rank(service: ServiceProcess, run: RunHandle) -> None:
    assert strike(Fault("rank_killed", run.refresh().step, 0.0, 0.9), service, run)


# ---------------------------------------------------------------- clocks


@pytest.mark.skipif(not clock.is_possible(), reason="no C compiler for the library of the clock")
def test_clocks_that_jump_lose_no_step_and_blame_nobody(tmp_path: Path) -> None:
    """The time of day of the service and the whole cluster, Ray's own processes as well, jumps an
    hour on, and two back."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    with (
        clock.clock_library() as library,
        ServiceProcess(nodes=2, env=clock.jumping_clock(library, offset)) as service,
    ):
        run = service.client().runs.create(spec("clocks", 40))
        for number, jump in enumerate(("3600", "-7200", "0"), 1):
            reach(run, 60 * number)
            offset.write_text(jump)
        reach(run, 200)
        offset.write_text("-7200")
        kill_a_rank(service, run)
        reach(run, 260)
        assert list(run.events())[-1].at.timestamp() < time.time() - 6000, "it did jump"
        offset.write_text("3600")
        run.wait(timeout_s=240)
        require_whole(run, 40)
        [failure] = run.failures()
        assert (failure.verdict, failure.steps_lost, run.submission) == ("worker_lost", 0, 1)
        assert [node.mark for node in service.client().cluster().nodes] == [None] * 3
        goodput = run.goodput()
        assert all(seconds >= 0 for seconds in goodput.buckets.model_dump().values()), goodput
        sequence = [event.seq for event in run.events()]
        assert sequence == list(range(1, len(sequence) + 1))


# ---------------------------------------------------------------- memory


def test_full_shared_memory_costs_at_most_the_steps_since_the_checkpoint() -> None:
    """/dev/shm has Docker's 64 MB, and is full from the middle of the run on."""
    small = 'mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm && exec "$@"'
    service = ServiceProcess(nodes=2, prefix=("unshare", "--mount", "sh", "-c", small, "sh"))
    with service:
        run = service.client().runs.create(spec("memory", 40))
        reach(run, 70)
        assert service.process is not None
        full = Path(f"/proc/{service.process.pid}/root/dev/shm/full")
        with full.open("wb") as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        kill_a_rank(service, run)
        reach(run, 140)
        kill_a_rank(service, run)
        run.wait(timeout_s=300)
        require_whole(run, 40)
        failures = run.failures()
        assert {failure.verdict for failure in failures} == {"worker_lost"}
        assert all((failure.steps_lost or 0) <= 35 for failure in failures)
