"""The files of a checkpoint and its manifest's facts, made of a state: the same for a rank's saver
and for a run's last save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from storage.checkpoints.writer import CheckpointWriter
from train_fn.checkpoints.safetensors_file import safetensors_name, write_safetensors
from train_fn.checkpoints.torch_file import save

MODEL_FILE = "model.pt"
"""The model's plain ``state_dict`` on the CPU."""
EMA_FILE = "model_ema.pt"
"""The same with averaged weights, where the run keeps them."""
STATE_FILE = "train_state.pt"
"""Everything else of TrainState."""


def write_files(
    writer: CheckpointWriter,
    state: Mapping[str, Any],
    *,
    safetensors: bool,
    on_write: Callable[[], None] = lambda: None,
) -> None:
    """Write the files of ``state``, a whole state as ``TrainState.state_dict`` gives it, on the
    CPU.

    Args:
        on_write: called whenever the storage took bytes.
    """
    rest = dict(state)
    model, ema = rest.pop("model"), rest.pop("ema")
    files = {MODEL_FILE: model, STATE_FILE: rest}
    if ema is not None:
        files[EMA_FILE] = {**model, **ema}
    for name, content in files.items():
        with writer.write_file(name, on_write) as file:
            save(content, file)
        if name != STATE_FILE and safetensors:
            with writer.write_file(safetensors_name(name), on_write) as file:
                write_safetensors(content, file)
        on_write()


def manifest_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest says of ``state``, as arguments of ``CheckpointWriter.commit``."""
    return {
        "epoch": state["epoch"],
        "parent": state["parent"],
        "sample_digest": state["ledger"]["chain"],
        # else they are of other weights
        "metrics": state["metrics"] if state["evaluated_step"] == state["step"] else {},
    }
