"""TrainState holds everything, copies what it loads, and its digest tells any difference; snapshots
keep it whole."""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
from collections import OrderedDict, deque, namedtuple
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train_fn.errors import BadTask, DataChanged
from train_fn.samples.ledger import Count
from train_fn.snapshots.store import Label, SnapshotStore
from train_fn.state.optim import Ema
from train_fn.state.run_state import BestSoFar
from train_fn.state.tensor_tree import copy_to_cpu, digest, take_apart
from train_fn.state.train_state import TrainState

pytestmark = pytest.mark.own_process


def make_state(seed: int = 0, *, fingerprint: str = "data", num_steps: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(
        memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    state = TrainState(
        model, optimizer, scaler, Ema(model, 0.9), steps_per_epoch=4, fingerprint=fingerprint
    )
    for _ in range(num_steps):
        take_step(state)
    state.complete = True
    return state


def take_step(state: TrainState) -> None:
    torch.manual_seed(state.step)
    state.scaler.scale(state.model(torch.randn(5, 3, 6, 6)).square().mean()).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    assert state.ema is not None
    state.ema.update(state.step + 1)
    state.ledger.commit(state.step, Count(5, 0, 0, state.step))
    state.step += 1
    state.optimizer.zero_grad()


def through_a_file(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_restored_state_goes_on_as_the_original_would() -> None:
    original, restored = make_state(num_steps=3), make_state(seed=1)
    original.best = BestSoFar("val_accuracy", 0.5, 3, "step-000000003.s001.a001")
    restored.load_state_dict(through_a_file(original.state_dict()))
    assert (restored.step, restored.epoch, restored.k, restored.best) == (3, 0, 3, original.best)
    for state in (original, restored):
        take_step(state)
        take_step(state)
    assert digest(original.state_dict()) == digest(restored.state_dict())
    assert (restored.epoch, restored.k) == (1, 1)


@pytest.mark.parametrize("part", ["model", "optimizer", "ema", "ledger", "step"])
def test_the_digest_tells_one_flipped_bit(part: str) -> None:
    state = copy_to_cpu(make_state(num_steps=1).state_dict())
    before = digest(state)
    assert digest(copy.deepcopy(state)) == before
    if part == "ledger":
        state["ledger"]["chain"] = "0" * 64
    elif part == "step":
        state["step"] += 1
    else:
        tensors: list[torch.Tensor] = []
        take_apart(state[part], tensors)
        words = (
            max(tensors, key=torch.Tensor.numel).view(-1).view(torch.int32)
            if part != "model"
            else tensors[-2].view(-1).view(torch.int32)
        )
        words[-1] ^= 1
    assert digest(state) != before


def test_other_data_is_refused() -> None:
    with pytest.raises(DataChanged, match="changed since step 2"):
        make_state(fingerprint="other").load_state_dict(make_state(num_steps=2).state_dict())


def test_events_travel_with_the_state() -> None:
    state, resumed = make_state(num_steps=1), make_state()
    entries = [
        {
            "kind": "metrics",
            "at": 0.1 + step,
            "data": {"step": step, "values": {"loss": None, "lr": 1e-30}},
        }
        for step in range(70)
    ]
    other = {"kind": "epoch_completed", "at": 1.15, "data": {"epoch": 0}}
    state.recent.others.append(other)
    for entry in entries:
        state.recent.add_point(entry, lambda: inf)
    resumed.load_state_dict(through_a_file(copy_to_cpu(state.state_dict())))
    assert list(resumed.recent) == [other, *entries[-64:]], "many steps push out no end of an epoch"
    resumed.recent.add_point({**entries[-1], "data": {"step": 70, "values": {}}}, lambda: inf)
    assert len(resumed.recent.points) == 64 and resumed.recent.points[-1]["data"]["step"] == 70


def test_a_state_of_another_version_is_refused() -> None:
    state = make_state()
    with pytest.raises(ValueError, match="has version 4, and this Everstep reads version 3"):
        state.load_state_dict(state.state_dict() | {"version": 4})


class Colour(enum.IntEnum):
    RED = 3


def test_what_is_copied_loads_again_and_is_shared_with_nobody() -> None:
    """Of numbers only their value is kept, whoever's they were: a file with numpy's could not be
    loaded with weights_only."""
    pair = namedtuple("pair", "first second")(1, torch.ones(2))
    tree = {
        "numpy": [
            np.float64(0.5),
            np.float32(0.5),
            np.int64(7),
            np.bool_(True),
            np.array(2.5),
            Colour.RED,
        ],
        "plain": [
            None,
            True,
            7,
            0.5,
            1j,
            "s",
            b"b",
            torch.float32,
            torch.device("cpu"),
            torch.Size([2, 3]),
        ],
        "changed in place": [{1, 2}, bytearray(b"xy")],
        "nested": OrderedDict(pair=pair, empty=torch.zeros(0), scalar=torch.tensor(3)),
        np.int64(4): "key",
    }
    copied = copy_to_cpu(tree)
    tree["changed in place"][0].add(3)
    tree["changed in place"][1].extend(b"z")
    loaded = through_a_file(copied)
    assert loaded["numpy"] == [0.5, 0.5, 7, True, 2.5, 3] and {
        type(value) for value in loaded["numpy"]
    } == {float, int, bool}
    assert loaded["plain"] == tree["plain"] and loaded["changed in place"] == [
        {1, 2},
        bytearray(b"xy"),
    ]
    assert (
        loaded["nested"]["pair"][0] == 1
        and torch.equal(loaded["nested"]["pair"][1], torch.ones(2))
        and loaded[4] == "key"
    )


@pytest.mark.parametrize("value", [deque([1]), np.zeros(3), io.BytesIO(b"x"), len, frozenset({1})])
def test_what_could_not_be_loaded_again_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(BadTask, match="optimizer/state/0/history is a "):
        copy_to_cpu({"optimizer": {"state": {0: {"history": value}}}})


# ---------------------------------------------------------------- snapshots


def make_label(state: dict[str, Any], **changes: Any) -> Label:
    fields = {
        "submission": 1,
        "attempt": 1,
        "step": state["step"],
        "rank": 0,
        "digest": digest(state),
        "problem": None,
    }
    return Label(**{**fields, **changes})


def test_a_snapshot_that_differs_from_its_label_is_refused(tmp_path: Path) -> None:
    store, state = SnapshotStore(tmp_path, 1), copy_to_cpu(make_state(num_steps=2).state_dict())
    label = store.write(make_label(state), state)
    store.write_label(label := dataclasses.replace(label, digest="0" * 64))
    with pytest.raises(ValueError, match="does not have the digest"):
        store.read(label)


def test_all_pieces_of_the_state_before_stay(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1)
    states = [copy_to_cpu(make_state(num_steps=steps).state_dict()) for steps in (1, 2, 3)]
    for state in states[:2]:
        for rank in range(2):
            store.write(make_label(state, rank=rank, pieces=2), state)
    store.remove_older(make_label(states[2], pieces=2), keep=1)
    assert [(label.step, label.rank) for label in store.labels()] == [(2, 0), (2, 1)]


def test_newer_snapshots_replace_older_ones_also_of_older_submissions(tmp_path: Path) -> None:
    store, later = SnapshotStore(tmp_path, 1), SnapshotStore(tmp_path, 2)
    first, second = (copy_to_cpu(make_state(num_steps=steps).state_dict()) for steps in (1, 2))
    store.write(make_label(first), first)
    store.write(make_label(second), second)
    store.remove_older(make_label(second), keep=0)
    assert [label.step for label in store.labels()] == [2]
    store.remove_after(1)
    assert list(tmp_path.iterdir()) == []
    store.write(make_label(second), second)
    later.write(make_label(first, submission=2), first)
    assert [label.submission for label in later.labels()] == [1, 2]
    later.remove_older(make_label(first, submission=2), keep=1)
    assert [label.submission for label in later.labels()] == [1, 2], (
        "one is whole while another is written"
    )
    later.remove_older(make_label(first, submission=2), keep=0)
    assert [label.submission for label in later.labels()] == [2], (
        "though the older one had done more"
    )


def test_a_replaced_submission_neither_sees_nor_removes_what_its_successor_keeps(
    tmp_path: Path,
) -> None:
    node = tmp_path / "run" / "node"
    old, successor = SnapshotStore(node, 1), SnapshotStore(node, 2)
    state = copy_to_cpu(make_state(num_steps=1).state_dict())
    old.write(make_label(state), state)
    kept = make_label(state, submission=2)
    successor.write(kept, state)
    assert [label.submission for label in old.labels()] == [1]
    old.remove_after(0)
    old.remove_all()
    assert successor.labels() == [kept]
    assert successor.read(kept)["step"] == 1
