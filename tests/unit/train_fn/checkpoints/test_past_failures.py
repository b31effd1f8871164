"""How often a run failed, by its journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal import JournalEvent
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from train_fn.checkpoints.cadence import ASSUMED_MTBF_S, ObservedFailures, observed_failures


def test_failures_are_observed_in_the_journals_of_all_submissions(tmp_path: Path) -> None:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_f")

    def tell(submission: int, *entries: tuple[float, EventKind, dict[str, Any]]) -> None:
        with JournalWriter(run_dir, submission) as journal:
            journal.append(
                [
                    JournalEvent(
                        kind=kind,
                        at=at,
                        submission=submission,
                        data=data,
                        source="driver",
                        source_n=n,
                    )
                    for n, (at, kind, data) in enumerate(entries, start=1)
                ]
            )

    assert observed_failures(run_dir, 50.0) == ObservedFailures()
    lost, moved, raised = (
        {"verdict": verdict} for verdict in ("node_lost", "preemption", "user_error")
    )
    tell(
        1,
        (100.0, EventKind.ATTEMPT_STARTED, {}),
        (160.0, EventKind.FAILURE, lost),
        (160.5, EventKind.ATTEMPT_ENDED, {"cause": "node_lost"}),
        (170.0, EventKind.ATTEMPT_STARTED, {}),
        (180.0, EventKind.FAILURE, moved),
    )
    tell(
        2,
        (200.0, EventKind.FAILURE, lost),
        (300.0, EventKind.ATTEMPT_STARTED, {}),
        (310.0, EventKind.FAILURE, raised),
    )
    assert observed_failures(run_dir, 400.0) == ObservedFailures(
        num_failures=2, trained_s=60 + 10 + 10
    )
    tell(3, (500.0, EventKind.ATTEMPT_STARTED, {}))
    seen = observed_failures(run_dir, 520.0)
    assert seen.trained_s == 100.0 and seen.mtbf_s() == (100.0 + ASSUMED_MTBF_S) / 3
