"""``es.protect(accelerator=…)``: the loop around an Accelerator of Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

from train_fn.errors import BadTask
from train_fn.protect.arguments import LoopParts, check_torn, named, parts_of
from train_fn.protect.protected import Protected
from train_fn.protect.training import OnItsOwn

_KEPT = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Kinds of Accelerate's distribution that can be protected, beside FSDP2."""


class AcceleratedLoop(Protected):
    """A protected loop whose gradients are accumulated by an Accelerator: ``step`` commits only
    when the optimizer has stepped, as ``optimizer.step`` and ``scheduler.step`` do."""

    def __init__(
        self,
        accelerator: Any,
        extra: Any,
        torn: str,
        settings: OnItsOwn,
        total_steps: int | None,
    ) -> None:
        parts = parts_of_accelerator(accelerator, extra)
        super().__init__(parts, check_torn(torn, parts), settings, total_steps)
        self._accelerator = accelerator

    def step(self, **metrics: Any) -> None:
        """Commit a step, after the last of its micro-batches. Call it after each of them."""
        if self._accelerator.sync_gradients:
            super().step(**metrics)


def parts_of_accelerator(accelerator: Any, extra: Any) -> LoopParts:
    """Return the parts of what an Accelerator prepared. Raises BadTask."""
    kind = accelerator.distributed_type.name
    if kind not in _KEPT and not getattr(accelerator, "is_fsdp2", False):
        raise BadTask(
            f"es.protect(accelerator=…) is distributed by {kind}, whose state nothing can take "
            "apart. Use DDP, or FSDP2: FullyShardedDataParallelPlugin(fsdp_version=2). Or leave "
            "es.protect out and report checkpoints by ray.train.report"
        )
    models, optimizers = accelerator._models, accelerator._optimizers
    if not models or not optimizers:
        raise BadTask(
            "es.protect(accelerator=…) has no model or no optimizer yet; call "
            "accelerator.prepare(model, optimizer, …) before es.protect"
        )
    extras = {name or "given": each for name, each in named("extra", extra).items()}
    registered = {f"registered{at}": one for at, one in enumerate(accelerator._custom_objects)}
    if accelerator.scaler is not None:
        registered["scaler"] = accelerator.scaler
    if both := extras.keys() & registered.keys():
        raise BadTask(f"es.protect(extra=…) has the name {min(both)!r}; use another one")
    return parts_of(
        _one_or_all(models),
        _one_or_all(optimizers),
        _one_or_all(accelerator._schedulers),
        {**extras, **registered},
    )


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else list(found)
