"""A checkpoint's files from a state on the CPU: the part of a save that needs nothing but the state and the storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from storage.checkpoints import CheckpointStore
from storage.manifest import Manifest
from train_fn import torch_file
from train_fn.safetensors_file import safetensors_name, write_safetensors

MODEL_FILE = "model.pt"
"""The model's plain ``state_dict`` on the CPU."""
EMA_FILE = "model_ema.pt"
"""The same with averaged weights, where the run keeps them."""
STATE_FILE = "train_state.pt"
"""Everything else of TrainState."""


@dataclass(frozen=True)
class CheckpointJob:
    """A checkpoint that is to be written, but for its state."""

    submission: int
    attempt: int
    world_size: int
    step: int
    epoch: int
    safetensors: bool


class Progress(Protocol):
    """Who hears how far a checkpoint is."""

    def moved(self) -> None:
        """The storage took bytes."""

    def committing(self, name: str) -> None:
        """All is written but the manifest: from here on the checkpoint may be there, whatever is heard of it."""


def write_checkpoint(store: CheckpointStore, job: CheckpointJob, state: Mapping[str, Any], progress: Progress) -> Manifest:
    """Write and commit. Raises CheckpointExists, CheckpointReplaced, StorageError as the storage's writer does."""
    rest = dict(state)
    model, ema = rest.pop("model"), rest.pop("ema")
    with store.begin(job.step, job.submission) as writer:
        files = {MODEL_FILE: model, STATE_FILE: rest}
        if ema is not None:
            files[EMA_FILE] = {**model, **ema}
        for name, content in files.items():
            with writer.write_file(name, progress.moved) as file:
                torch_file.save(content, file)
            if name != STATE_FILE and job.safetensors:
                with writer.write_file(safetensors_name(name), progress.moved) as file:
                    write_safetensors(content, file)
            progress.moved()
        progress.committing(writer.name)
        return writer.commit(
            epoch=job.epoch,
            attempt=job.attempt,
            parent=rest["parent"],
            world_size=job.world_size,
            sample_digest=rest["ledger"]["chain"],
            metrics=rest["metrics"],
        )
