"""Train controllers one after the other, and the journal's end, without a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.wire import ReasonCode
from everstep.wire.events import EventKind
from storage.filesystem import open_storage
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from train_fn.driver.fit_loop import fit_until_decided
from train_fn.driver.submission_journal import FINAL_FLUSH_S, close_journal
from train_fn.errors import Replaced
from train_fn.recovery.history import History
from train_fn.recovery.launch import ControllerOutcome
from train_fn.recovery.settings import RecoverySettings


def test_no_controller_starts_once_another_submission_has_taken_over(tmp_path: Path) -> None:
    """A driver that slept must not remove what its successor has set up."""
    run_dir = RunDir(open_storage(str(tmp_path)), "run_a")
    JournalWriter(run_dir, 2).close()
    job: Any = SimpleNamespace(run_dir=run_dir, submission=1)
    client: Any = None  # no loss is weighed
    with pytest.raises(Replaced, match="submission 2 of run run_a has taken over"):
        fit_until_decided(job, RecoverySettings(), History(), client)


class Client:
    """The driver's end of the journal."""

    def __init__(self, *, is_durable: bool) -> None:
        self._is_durable = is_durable
        self.events: list[tuple[EventKind, dict[str, Any]]] = []

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        self.events.append((kind, data))

    def close(self, timeout_s: float) -> bool:
        assert timeout_s == FINAL_FLUSH_S
        return self._is_durable


def test_a_driver_whose_last_event_is_not_durable_fails() -> None:
    reason = {"code": ReasonCode.NO_PROGRESS.value, "message": "too often"}
    client: Any = Client(is_durable=True)
    close_journal(client, ControllerOutcome(False, last_step=7), "failed", reason)
    finished = {"outcome": "failed", "reason": reason, "step": 7}
    assert client.events == [(EventKind.FINISHED, finished)]
    client = Client(is_durable=False)
    with pytest.raises(RuntimeError, match="is the storage writable"):
        close_journal(client, ControllerOutcome(True), "succeeded", None)
