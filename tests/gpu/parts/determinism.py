"""What ``train.deterministic`` gives and costs: two runs with it end with the same bits; the same
without it is shown, not judged."""

from __future__ import annotations

import io
import time
from pathlib import Path

import torch

from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.gpu.alone import spec_of
from tests.gpu.verdict import Shown
from train_fn.standalone.command import run_local

STEPS = {"cuda": 200, "cpu": 12}


def run(device: torch.device, directory: Path) -> Shown:
    facts = []
    for wanted in (True, False):
        begun, weights, word = time.monotonic(), [], ""
        for number in range(2):
            weights.append(_train(device, directory, f"{wanted}-{number}", wanted))
            word = _reproducibility(directory, f"{wanted}-{number}")
        differing = [
            name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])
        ]
        if wanted:
            assert word == "bitwise", f"the run reports {word!r}"
            assert not differing, f"two runs that report {word!r} differ in {differing[:3]}"
        equal = "equal" if not differing else f"{len(differing)} of {len(weights[0])} differ"
        seconds = (time.monotonic() - begun) / 2
        facts.append(f"{'on' if wanted else 'off'}: {word}, {equal}, {seconds:.1f} s a run")
    return Shown(
        "; ".join(facts), "" if device.type == "cuda" else "kernels of a GPU, NCCL's order of sums"
    )


def _spec(device: torch.device, deterministic: bool) -> RunSpec:
    return spec_of(
        device,
        deterministic=deterministic,
        global_batch_size=128,
        micro_batch_size=32,
        max_steps=STEPS[device.type],
        epochs=100,
        eval_every_epochs=1000,
    )


def _train(
    device: torch.device, directory: Path, run_id: str, deterministic: bool
) -> dict[str, torch.Tensor]:
    ended = run_local(_spec(device, deterministic), str(directory), run_id, say=lambda line: None)
    assert ended.code == 0, f"{run_id} ended with {ended.code}"
    store = CheckpointStore(RunDir(open_storage(str(directory)), run_id))
    model = store.read_file(store.list()[-1].name, "model.pt")
    weights: dict[str, torch.Tensor] = torch.load(io.BytesIO(model), weights_only=True)
    return weights


def _reproducibility(directory: Path, run_id: str) -> str:
    events = read_journal(RunDir(open_storage(str(directory)), run_id), 1, None, 5000)[0]
    [started] = [event.data for event in events if event.kind is EventKind.TRAINING_STARTED]
    return str(started["reproducible"])
