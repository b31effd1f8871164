"""Protect a training loop of your own: ``import everstep.train as es``.

>>> state = es.protect(model=model, optimizer=optimizer)          # doctest: +SKIP
>>> data = es.loader(dataset, global_batch_size=64)               # doctest: +SKIP
>>> with state:                                                   # doctest: +SKIP
...     for batch in data.batches(state, epochs=3):
...         ...
...         state.step(loss=loss)

This is a door: what is behind it needs torch, and is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train_fn.protect.door import loader, protect

__all__ = ["loader", "protect"]

_BEHIND = "train_fn.protect.door"
"""Imported by name: this house does not import the others."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_BEHIND), name)
