"""What a rank keeps whose training thread waits for peers that are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from storage.run_dir import RunDir
from tests.unit.train_fn.loop.test_departure import (
    break_the_device,
    fail,
    labels,
    run_dir,
    small_task,
)
from train_fn.errors import StateNotWhole
from train_fn.loop import leave as rescue
from train_fn.loop.leave import Rescue
from train_fn.loop.training import RankProgress
from train_fn.snapshots.state_file import state_digest
from train_fn.state.tensor_tree import take_apart
from train_fn.state.train_state import TrainState

__all__ = ["run_dir", "small_task"]

pytestmark = pytest.mark.own_process


def test_what_was_kept_before_the_device_broke_is_what_the_rank_leaves(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_meanwhile(self: Rescue) -> int | None:
        thread = threading.Thread(target=self.keep)
        thread.start()
        thread.join()
        return leave(self)

    leave = Rescue.leave
    break_the_device(monkeypatch)
    monkeypatch.setattr(Rescue, "leave", keep_meanwhile)
    failed = fail(run_dir, 1)
    assert (failed.error.step, failed.error.snapshot_step) == (3, 3)
    assert failed.snapshot_problem is None
    [label] = labels(run_dir)
    assert (label.step, label.problem) == (3, None)


def test_a_copy_beside_a_device_that_hangs_takes_no_new_memory(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To pin memory may wait for the device. A new optimizer has its tensors after one step."""
    taken: list[tuple[set[int], set[int]]] = []

    def keep(self: Rescue) -> None:
        ahead: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        memory = self._memory.take()
        take_apart(memory, ahead)
        self._memory.put(memory)
        take_apart(self._copied(), copied)
        taken.append(
            ({each.data_ptr() for each in ahead}, {each.data_ptr() for each in copied}),
        )

    with monkeypatch.context() as patch:
        patch.setattr(rescue.nccl, "fails_by_itself", lambda: False)
        kept_by(run_dir, patch, keep)
    [(ahead, copied)] = taken
    assert copied and copied <= ahead


def test_a_copy_beside_a_device_that_hangs_has_the_digest_of_the_others(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[tuple[str, str]] = []

    def keep(self: Rescue) -> None:
        copied = self._copied()
        assert copied is not None
        digests.append((state_digest(copied), state_digest(self._replica.state.state_dict())))

    kept_by(run_dir, monkeypatch, keep)
    [(copied, live)] = digests
    assert copied == live


def kept_by(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Rescue], None]
) -> int | None:
    """Break the device after step 3, and call ``meanwhile`` from another thread before the rank
    leaves. Return the step that it says was kept."""

    def keep_meanwhile(self: Rescue) -> int | None:
        thread = threading.Thread(target=meanwhile, args=(self,))
        thread.start()
        thread.join()
        return leave(self)

    leave = Rescue.leave
    with monkeypatch.context() as patch:
        break_the_device(patch)
        patch.setattr(Rescue, "leave", keep_meanwhile)
        return fail(run_dir, 1).error.snapshot_step


def test_nothing_is_kept_of_a_model_that_may_hold_an_average(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation puts it in the place of the weights, and may wait for its peers meanwhile."""
    replica_of: list[RankProgress] = []
    init = Rescue.__init__

    def remember(self: Rescue, ctx: Any, progress: RankProgress) -> None:
        init(self, ctx, progress)
        replica_of.append(progress)

    def keep(self: Rescue) -> None:
        replica_of[0].phase = "evaluation"
        monkeypatch.setattr(rescue, "PATIENCE_S", 0.1)
        self.keep()
        steps.append(self.kept_step)

    steps: list[int | None] = []
    monkeypatch.setattr(Rescue, "__init__", remember)
    assert kept_by(run_dir, monkeypatch, keep) is None
    assert steps == [None]
    assert labels(run_dir) == []


@pytest.mark.parametrize(
    ("moves_at", "num_copies"), [(1, 0), (2, 1)], ids=["before the copy", "while it is copied"]
)
def test_nothing_is_kept_of_a_thread_that_moves(
    moves_at: int, num_copies: int, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread is looked at before, after a moment, and after the copy."""
    looks: list[int] = []
    copies: list[int] = []

    def place(self: Rescue) -> Any:
        looks.append(len(looks))
        if len(looks) > 3:
            return None  # it has ended
        return "frame", len(looks) > moves_at, 3

    def keep(self: Rescue) -> None:
        copy = self._copy
        monkeypatch.setattr(self, "_copy", lambda: copies.append(1) or copy())
        monkeypatch.setattr(Rescue, "_place", place)
        self.keep()
        steps.append(self.kept_step)

    steps: list[int | None] = []
    assert kept_by(run_dir, monkeypatch, keep) is None
    assert steps == [None]
    assert labels(run_dir) == [] and len(copies) == num_copies


def test_a_state_that_found_no_room_is_not_said_to_be_kept(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "leave_snapshot", lambda ctx, state: "no room")
    assert kept_by(run_dir, monkeypatch, Rescue.keep) is None


def test_a_state_that_does_not_add_up_is_not_kept(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(self: Rescue) -> None:
        with pytest.raises(StateNotWhole):
            self.keep()

    def refuse(self: Any, state: Any) -> None:
        raise StateNotWhole(3, "as if its ledger lacked samples")

    monkeypatch.setattr(TrainState, "require_sound", refuse)
    assert kept_by(run_dir, monkeypatch, keep) is None
    assert labels(run_dir) == []


def test_nothing_is_kept_any_more_once_the_rank_leaves_by_itself(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_late(self: Rescue) -> None:
        self._is_leaving = True
        self.keep()

    assert kept_by(run_dir, monkeypatch, keep_late) is None
    assert labels(run_dir) == []
