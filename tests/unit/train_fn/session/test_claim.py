"""Before its first step an attempt makes its beginning durable, and only then looks whether it was
replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from storage import claims
from storage.claims import claim_attempt
from storage.errors import StorageUnavailable
from storage.filesystem import open_storage
from storage.logs.journal_writer import JournalWriter
from storage.run_dir import RunDir
from train_fn.errors import Replaced
from train_fn.session.session import claim


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(open_storage(str(tmp_path)), "run_c")


def context(run_dir: RunDir, flush: Callable[[float], bool]) -> Any:
    return SimpleNamespace(
        run_dir=run_dir, submission=1, attempt=1, journal=SimpleNamespace(flush=flush)
    )


def test_an_attempt_whose_beginning_is_not_durable_takes_no_step(run_dir: RunDir) -> None:
    with pytest.raises(StorageUnavailable, match="did not take the attempt's beginning"):
        claim(context(run_dir, lambda timeout_s: False))


def test_a_submission_that_begins_while_the_beginning_becomes_durable_is_seen(
    run_dir: RunDir,
) -> None:
    """The newer one began its journal, and may have read this one's before the beginning was in
    it."""
    JournalWriter(run_dir, 1).close()

    def flush(timeout_s: float) -> bool:
        JournalWriter(run_dir, 2).close()
        return True

    claim(context(run_dir, lambda timeout_s: True))
    with pytest.raises(
        Replaced, match="submission 2 of run run_c has taken over from submission 1"
    ):
        claim(context(run_dir, flush))


def test_an_attempt_that_begins_while_the_beginning_becomes_durable_is_seen(
    run_dir: RunDir,
) -> None:
    """It claimed the run, and may have looked for checkpoints before this one's beginning was
    durable."""
    claim_attempt(run_dir, (1, 1))

    def flush(timeout_s: float) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(claims, "process_nonce", lambda: "another")
            claim_attempt(run_dir, (1, 2))
        return True

    claim(context(run_dir, lambda timeout_s: True))
    with pytest.raises(Replaced, match="attempt 2 of run run_c has taken over from attempt 1"):
        claim(context(run_dir, flush))
