"""Refuse to resume a state on other training data than it was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from train_fn.errors import DataChanged
from train_fn.state.contents import DRAW_ALIKE, Contents, few


def require_same_data(
    state: Mapping[str, Any],
    data_name: str,
    *,
    fingerprint: str,
    steps_per_epoch: int,
    contents: Contents | None,
) -> None:
    """Raise DataChanged if a saved state was trained on data with another fingerprint, length or
    samples.

    Args:
        state: The saved state.
        data_name: Name of the data in errors.
        fingerprint: Of the data that are there now, as their number of steps and their contents.
        contents: Sketches of a few samples; None if they are not compared.
    """
    if state["fingerprint"] != fingerprint:
        raise DataChanged(
            f"{data_name} changed since step {state['step']}: "
            f"it was {state['fingerprint']}, now it is {fingerprint}. "
            "Put the data back as it was, or start a new run"
        )
    if divmod(state["step"], steps_per_epoch) != (state["epoch"], state["k"]):
        raise DataChanged(
            f"{data_name} has another length since step {state['step']}, though it calls "
            f"itself {fingerprint} as "
            "before. Put the data back as it was, or start a new run"
        )
    if contents is not None and state.get("contents"):
        require_same_contents(state["contents"], state["step"], data_name, contents)


def require_same_contents(saved: str, step: int, data_name: str, contents: Contents) -> None:
    """Raise DataChanged if samples have changed since they were saved at this step. States of older
    versions hold no samples to compare."""
    changed = contents.differing(json.loads(saved))
    unstable = contents.unstable(changed)
    contents.forget(unstable)
    changed = [name for name in changed if name not in unstable]
    if changed:
        raise DataChanged(
            f"{data_name} changed since step {step}: not the same: "
            f"{few(changed)}. Put the data back as it was, "
            "or start a new run. If nothing was changed, each process builds other data: "
            f"{DRAW_ALIKE}"
        )
