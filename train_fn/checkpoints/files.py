"""Write a state as the files of a checkpoint, and return its facts for the manifest. Both a rank's
saver and a run's last save use this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from storage.checkpoints.writer import CheckpointWriter
from train_fn.checkpoints.safetensors_file import safetensors_name, write_safetensors
from train_fn.checkpoints.torch_file import save

MODEL_FILE = "model.pt"
"""The model's plain ``state_dict`` on the CPU, without the frozen parameters that the run leaves
out."""
EMA_FILE = "model_ema.pt"
"""The same with averaged weights, if the run keeps them."""
STATE_FILE = "train_state.pt"
"""Everything else of TrainState."""


def write_files(
    writer: CheckpointWriter,
    state: Mapping[str, Any],
    *,
    safetensors: bool,
    on_write: Callable[[], None] = lambda: None,
) -> None:
    """Write the files of ``state``, a complete ``TrainState.state_dict`` on the CPU.

    Args:
        on_write: called whenever the storage has taken bytes.
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
    """Return the facts about ``state`` for the manifest, as arguments of
    ``CheckpointWriter.commit``."""
    return {
        "epoch": state["epoch"],
        "parent": state["parent"],
        "sample_digest": state["ledger"]["chain"],
        "chain": state.get("chain"),
        "parameters": "trainable" if state.get("frozen") else None,
        # otherwise the metrics belong to other weights
        "metrics": state["metrics"] if state["evaluated_step"] == state["step"] else {},
    }
