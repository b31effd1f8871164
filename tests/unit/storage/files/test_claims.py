"""Claims: of several processes one has a submission, and an attempt knows when a newer one has
begun, whoever is held up."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import claims
from storage.checkpoints.store import CheckpointStore
from storage.claims import (
    claim_attempt,
    claim_submission,
    newest_attempt,
    successor,
    supersede_submission,
)
from storage.errors import AlreadyClaimed
from storage.run_dir import Origin, RunDir
from tests.support.storage_places import MemoryObjects, memory_run_dir, record_restored, save

pytest_plugins = ["tests.support.storage_fixtures"]


def as_process(name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims, "process_nonce", lambda: name)


def test_one_process_has_a_submission(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_submission(run_dir, 1)
    as_process("another", monkeypatch)
    with pytest.raises(
        AlreadyClaimed, match="submission 1 of run run_a was already started by process"
    ):
        claim_submission(run_dir, 1)
    claim_submission(run_dir, 2)


def test_a_forked_process_claims_in_another_name() -> None:
    mine = claims.process_nonce()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(claims.process_nonce) != mine == claims.process_nonce()


def test_an_attempt_hears_of_its_successors_from_the_storage_alone(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_submission(run_dir, 1)
    claim_attempt(run_dir, (1, 1))
    assert successor(run_dir, (1, 1)) is None
    as_process("another", monkeypatch)
    claim_attempt(run_dir, (1, 3))  # the second one's group did not start
    assert successor(run_dir, (1, 1)) == "attempt 3 of run run_a has taken over from attempt 1"
    with pytest.raises(
        AlreadyClaimed,
        match="attempt 2 of run run_a no longer belongs to this process: attempt 3 has taken over",
    ):
        claim_attempt(run_dir, (1, 2))
    assert successor(run_dir, (1, 3)) is None
    claim_submission(run_dir, 2)
    assert successor(run_dir, (1, 3)) is None, "its ranks may still save and leave"
    supersede_submission(run_dir, 2)
    assert (
        successor(run_dir, (1, 3)) == "submission 2 of run run_a has taken over from submission 1"
    )


def test_what_a_process_claims_again_is_its_own_until_it_is_superseded(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        claim_submission(run_dir, 1)
        claim_attempt(run_dir, (1, 1))
    with monkeypatch.context() as patch:
        as_process("another", patch)
        with pytest.raises(
            AlreadyClaimed,
            match="attempt 1 of run run_a no longer belongs to this process: process",
        ):
            claim_attempt(run_dir, (1, 1))
        claim_attempt(run_dir, (1, 2))
    with pytest.raises(AlreadyClaimed, match="attempt 2 has taken over"):
        claim_attempt(run_dir, (1, 1))


def test_an_attempt_that_died_before_anybody_told_of_it_keeps_its_number(run_dir: RunDir) -> None:
    claim_attempt(run_dir, (1, 4))
    assert [newest_attempt(run_dir, 1, known) for known in (0, 3, 4)] == [4, 4, 4]
    assert newest_attempt(run_dir, 2, 4) == 4


class Pause:
    """Runs something else right before the ``number``-th call."""

    def __init__(self, number: int, other: Callable[[], None]) -> None:
        self.left, self.other, self.happened = number, other, False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.happened = True
                self.other()
            return call(*args, **kwargs)

        return counted


def test_whoever_is_held_up_in_its_claim_of_two_attempts_the_older_one_is_superseded() -> None:
    """One is held up before each single call, while the other one claims; then both ask."""
    for held_up, other in (((1, 1), (1, 2)), ((1, 2), (1, 1))):
        number, is_over = 0, False
        while not is_over:
            number += 1
            run_dir, _ = memory_run_dir()
            with pytest.MonkeyPatch.context() as patch:
                pause = Pause(
                    number,
                    lambda run_dir=run_dir, other=other: try_to_claim(run_dir, other, "other"),
                )  # type: ignore[misc]
                for name in ("create_new", "read", "write"):
                    patch.setattr(MemoryObjects, name, pause.wrap(getattr(MemoryObjects, name)))
                try_to_claim(run_dir, held_up, "held up")
            is_over = not pause.happened
            if not is_over:
                assert successor(run_dir, (1, 1)) is not None, (held_up, number)
                assert successor(run_dir, (1, 2)) is None, (held_up, number)
        assert number > 1


def try_to_claim(run_dir: RunDir, origin: Origin, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        as_process(f"{name} {origin}", patch)
        try:
            claim_attempt(run_dir, origin)
        except AlreadyClaimed:
            assert origin == (1, 1)


@given(order=st.permutations(range(1, 6)))
def test_in_whatever_order_attempts_claim_those_but_the_newest_know(order: list[int]) -> None:
    run_dir, _ = memory_run_dir()
    claimed = []
    for attempt in order:
        with pytest.MonkeyPatch.context() as patch:
            as_process(str(attempt), patch)
            try:
                claim_attempt(run_dir, (1, attempt))
                claimed.append(attempt)
            except AlreadyClaimed:
                assert any(newer > attempt for newer in claimed)
    for attempt in claimed:
        newer = [each for each in claimed if each > attempt and each - attempt <= claims._GAP]
        assert (successor(run_dir, (1, attempt)) is None) == (not newer)


def test_retention_of_an_older_attempt_puts_back_what_it_was_about_to_delete(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one begins while the older one is held up right before it deletes: the checkpoint
    may be the one that it reads."""
    claim_attempt(run_dir, (1, 1))
    record_restored(run_dir, 1, 0, "fresh", attempt=1)
    kept = [save(run_dir, step) for step in (10, 20)]
    delete_file = type(run_dir.files).delete_file

    def begin_first(files: Any, relpath: str) -> None:
        monkeypatch.setattr(type(run_dir.files), "delete_file", delete_file)
        with pytest.MonkeyPatch.context() as patch:
            as_process("newer", patch)
            claim_attempt(run_dir, (1, 2))
        delete_file(files, relpath)

    monkeypatch.setattr(type(run_dir.files), "delete_file", begin_first)
    store = CheckpointStore(run_dir)
    assert store.retain(1, None, (1, 1)) == []
    assert store.list() == kept
    for manifest in kept:
        store.verify(manifest.name)
    save(run_dir, 30)
    assert store.retain(1, None, (1, 1)) == []
