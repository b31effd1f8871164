"""Trains, is killed, restores and goes on, again and again; ``python -m
tests.support.restore_rounds DIRECTORY ROUNDS SEED``.

Every round is a process of its own, killed at a random moment; now and then a byte of the newest
checkpoint is flipped before the next one, and now and then a new submission takes over. After each
the invariant is checked: a checkpoint that is listed verifies, and one that does not is passed over
by name. Prints where each round began, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.errors import CorruptCheckpoint
from storage.run_dir import CheckpointName, Origin, RunDir
from tests.support.saves import make_context
from tests.support.storage_places import record_restored
from train_fn.checkpoints.commit import load_checkpoint
from train_fn.checkpoints.save_slot import BoundaryCopies
from train_fn.checkpoints.saver import Saver
from train_fn.state.tensor_tree import take_apart
from train_fn.state.train_state import TrainState

MOST_SAVES = 3
"""A process is let alone until it has committed so many checkpoints, or fewer, and killed within so
many seconds after that."""
LONGEST_S = 0.01
DAMAGED_SHARE = 0.2
TAKEN_OVER_SHARE = 0.1


class Claims:
    """The journal of one process: what it says is committed goes to a file at once, and cannot be
    unsaid by a kill.

    The pipe hears of its own commits only. An attempt also reports those of older attempts that no
    journal knows: whoever counted these killed it before it had saved anything."""

    stop_requested = None

    def __init__(self, path: Path, pipe: int, origin: Origin) -> None:
        self._origin = origin
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._pipe = pipe

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind in (
            EventKind.CHECKPOINT_COMMITTED,
            EventKind.CHECKPOINT_DELETED,
            EventKind.CHECKPOINT_FAILED,
        ):
            os.write(
                self._fd,
                f"{json.dumps([kind.value, data.get('name'), data.get('error')])}\n".encode(),
            )
        if kind is EventKind.CHECKPOINT_COMMITTED:
            name = CheckpointName.parse(data["name"])
            if name is not None and name.origin == self._origin:
                os.write(self._pipe, b"c")

    def flush(self, timeout_s: float) -> bool:
        return True


def make_state() -> TrainState:
    """A state with weights and moments."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(model, optimizer, scaler, None, steps_per_epoch=9, fingerprint="data")


def tensors_of(state: TrainState) -> list[torch.Tensor]:
    return [
        *state.model.parameters(),
        *(moment for moments in state.optimizer.state.values() for moment in moments.values()),
    ]


def live(directory: Path, submission: int, attempt: int, expected: int, pipe: int) -> None:
    """One process: restore, tell that by the pipe, train and save until the end comes."""
    ctx = make_context(directory, every_steps=1, keep_latest=3)
    object.__setattr__(ctx, "submission", submission)
    object.__setattr__(ctx, "attempt", attempt)
    object.__setattr__(ctx, "journal", Claims(directory / "claims", pipe, (submission, attempt)))
    state = make_state()
    reported = told_in(directory / "claims")
    manifest, found, _ = ctx.checkpoints.read_newest(
        partial(load_checkpoint, ctx.run_dir), reported=reported
    )
    if manifest is not None:
        assert found is not None
        tensors: list[torch.Tensor] = []
        take_apart(found, tensors)
        assert tensors and all(bool((tensor == manifest.step).all()) for tensor in tensors), (
            f"{manifest.name} is torn"
        )
        state.load_state_dict(found)
    assert state.step == expected, (
        f"restored step {state.step}, but the newest sound checkpoint is of step {expected}"
    )
    record_restored(
        ctx.run_dir, submission, state.step, "checkpoint" if manifest else "fresh", attempt
    )
    saver = Saver(ctx, state, BoundaryCopies(state))
    os.write(pipe, b"r")
    while True:
        due = saver.is_due()
        with torch.no_grad():
            for tensor in tensors_of(state):
                tensor.fill_(state.step + 1)
        state.step += 1
        saver.save_if_due(due=due, is_best=False)
        time.sleep(0.001)  # a step takes a while, in which the saver writes


def told_in(claims: Path) -> set[CheckpointName]:
    """What was said to be committed, and not to be deleted since."""
    names: set[str] = set()
    for line in claims.read_text().splitlines() if claims.exists() else []:
        kind, name, _ = json.loads(line)
        if kind != EventKind.CHECKPOINT_FAILED:
            (names.add if kind == EventKind.CHECKPOINT_COMMITTED else names.discard)(name)
    return {name for name in map(CheckpointName.parse, names) if name is not None}


def check(run_dir: RunDir, damaged: set[str], claims: Path) -> int:
    """The invariant; the step of the newest sound checkpoint, 0 for none."""
    store = CheckpointStore(run_dir)
    sound: list[CheckpointName] = []
    for manifest in store.lineage():
        try:
            store.verify(manifest.name)
        except CorruptCheckpoint as exc:
            if manifest.name not in damaged:
                raise SystemExit(
                    f"{manifest.name} is listed, and nobody damaged it: {exc}"
                ) from exc
        else:
            sound.append(CheckpointName(manifest.step, manifest.submission, manifest.attempt))
    entries = (
        [json.loads(line) for line in claims.read_text().splitlines()] if claims.exists() else []
    )
    if errors := [error for kind, _, error in entries if kind == EventKind.CHECKPOINT_FAILED]:
        raise SystemExit(f"a save failed: {errors[0]}")
    deleted = {name for kind, name, _ in entries if kind == EventKind.CHECKPOINT_DELETED}
    claimed = [
        name
        for kind, name, _ in entries
        if kind == EventKind.CHECKPOINT_COMMITTED and name not in deleted | damaged
    ]
    newest = max(
        (each for each in map(CheckpointName.parse, claimed) if each is not None),
        default=CheckpointName(0, 0, 0),
    )
    if newest.step and (not sound or sound[-1].step < newest.step):
        raise SystemExit(
            f"{newest} was said to be committed, but the newest sound one is {sound[-1:]}"
        )
    return sound[-1].step if sound else 0


def damage(store: CheckpointStore, rng: random.Random, damaged: set[str]) -> None:
    """Flip a byte of the newest checkpoint that is whole."""
    whole = [manifest for manifest in store.lineage() if manifest.name not in damaged]
    if len(whole) < 2:
        return  # something is left to fall back to
    manifest = whole[-1]
    damaged.add(manifest.name)
    path = Path(store.path(manifest.name)) / rng.choice(sorted(manifest.files))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def main(directory: Path, rounds: int, seed: int) -> list[int]:
    """Steps at which the rounds began."""
    torch.set_num_threads(1)
    make_state()  # imports what every process will need
    rng = random.Random(seed)
    run_dir = make_context(directory).run_dir
    damaged: set[str] = set()
    began: list[int] = []
    submission = 0
    for number in range(rounds):
        expected = check(run_dir, damaged, directory / "claims")
        submission += number == 0 or rng.random() < TAKEN_OVER_SHARE
        receiving, telling = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receiving)
            try:
                live(directory, submission, number + 1, expected, telling)
            finally:
                os._exit(1)  # only a failed check leads here
        os.close(telling)
        wanted, heard = 1 + rng.randint(0, MOST_SAVES), b""
        while len(heard) < wanted and (more := os.read(receiving, 1)):
            heard += more
        time.sleep(rng.uniform(0, LONGEST_S))  # a random moment is the point
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(receiving)
        if len(heard) < wanted:
            raise SystemExit(f"round {number} could not go on from step {expected} (seed {seed})")
        began.append(expected)
        if rng.random() < DAMAGED_SHARE:
            damage(CheckpointStore(run_dir), rng, damaged)
    check(run_dir, damaged, directory / "claims")
    return began


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
