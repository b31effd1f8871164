"""Protect a training loop of your own: ``import everstep.train as es``.

>>> state = es.protect(model=model, optimizer=optimizer)          # doctest: +SKIP
>>> data = es.loader(dataset, global_batch_size=64)               # doctest: +SKIP
>>> with state:                                                   # doctest: +SKIP
...     for batch in data.batches(state, epochs=3):
...         ...
...         state.step(loss=loss)

``es.hf.Protect`` protects the Trainer of Hugging Face, ``es.lightning.Protect`` that of Lightning.

This is a door: what is behind it needs torch, and is imported when it is first used. Only
environment variables are set at once. Torch reads them when it makes the process group, and then
does not end a process that holds the state.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train_fn.protect.adapters import hugging_face as hf
    from train_fn.protect.adapters import lightning
    from train_fn.protect.door import loader, protect

__all__ = ["hf", "lightning", "loader", "protect"]

_BEHIND = "train_fn.protect.door"
"""Imported by name: this house does not import the others."""
_ADAPTERS = {
    "hf": "train_fn.protect.adapters.hugging_face",
    "lightning": "train_fn.protect.adapters.lightning",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _ADAPTERS:
        return importlib.import_module(_ADAPTERS[name])
    return getattr(importlib.import_module(_BEHIND), name)


importlib.import_module("train_fn.recovery.settings").set_nccl_defaults()
