"""The deadline is the driver's to keep: it passes while the service is away, and the run ends with
its last checkpoint."""

from __future__ import annotations

import pytest

from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent, read_journal
from storage.run_dir import RunDir
from tests.support.digits_run import digits, wait_for_step
from tests.support.service_process import ServiceProcess, wait_for

DEADLINE_S = 60.0


@pytest.mark.chaos
def test_a_deadline_passes_while_the_service_is_away(own_service: ServiceProcess) -> None:
    run = own_service.client().runs.create(
        digits("late", epochs=2000, recovery={"deadline_s": DEADLINE_S})
    )
    wait_for_step(run, 15, timeout_s=DEADLINE_S - 5)
    own_service.kill()
    run_dir = RunDir(open_storage(str(own_service.home / "storage")), run.id)

    def finished() -> JournalEvent | None:
        return next(
            (
                event
                for event in read_journal(run_dir, 1, None, 1_000_000)[0]
                if event.kind is EventKind.FINISHED
            ),
            None,
        )

    finished_data = wait_for(finished, DEADLINE_S + 60, "the driver's last word").data
    assert (finished_data["outcome"], finished_data["reason"]["code"]) == (
        "failed",
        "deadline_exceeded",
    )
    own_service.start()
    wait_for(lambda: run.refresh().status == "FAILED", 120, "the end in the service's history")
    assert run.reason is not None and run.reason.code == "deadline_exceeded"
    assert run.latest_checkpoint is not None and run.latest_checkpoint.step == run.step >= 15
    assert run.restarts == 0 and run.submission == 1
