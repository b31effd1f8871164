"""How fast a run trains, beside samples: tokens, and floating-point operations (FLOPs), also as a
share of what its devices can do (MFU).

A task says what a sample takes, or torch counts it in a pass that is made anyway: the attempt's
first one, whose results are dropped.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.tasks.protocol import Task


def _with_tf32(half: float) -> dict[str, float]:
    """Return the FLOP/s of a device that does half as many with TF32, in fp32, as in 16 bits."""
    return {"bf16": half, "fp16": half, "fp32": half / 2}


_PEAKS: dict[str, dict[str, float]] = {
    r"A100": _with_tf32(312e12),
    r"H100 80GB": _with_tf32(989e12),
    r"H100 NVL": _with_tf32(835e12),
    r"H100 PCIe": _with_tf32(756e12),
    r"H200 NVL": _with_tf32(835e12),
    r"H200": _with_tf32(989e12),
    r"B200": _with_tf32(2250e12),
    r"L40S": _with_tf32(362e12),
    r"L4": _with_tf32(121e12),
    r"A10": _with_tf32(125e12),
    r"V100-SXM\d": {"fp16": 125e12, "fp32": 15.7e12},
    r"V100-PCIE": {"fp16": 112e12, "fp32": 14e12},
    r"T4": {"fp16": 65e12, "fp32": 8.1e12},
}
"""FLOP/s of dense products, as NVIDIA publishes them, by words of the device's name and precision.
The first that fits counts."""


@dataclass(frozen=True)
class Speed:
    """What the speed in samples means in other units; None for what is not known."""

    flops_per_sample: float | None = None
    """Of forward and backward pass."""
    tokens_per_sample: float | None = None
    peak_flops_per_s: float | None = None
    """Of all ranks' devices together."""

    def figures(self, samples_per_s: float) -> dict[str, float]:
        """Return the metrics of a step that follow from its samples per second."""
        found = {}
        if self.tokens_per_sample is not None:
            found["tokens_per_s"] = samples_per_s * self.tokens_per_sample
        if self.flops_per_sample is not None:
            flops_per_s = samples_per_s * self.flops_per_sample
            found["tflops_per_s"] = flops_per_s / 1e12
            if self.peak_flops_per_s is not None:
                found["mfu"] = flops_per_s / self.peak_flops_per_s
        return found


SAMPLES_ALONE = Speed()  # nothing else is known


def speed_of(ctx: WorkerContext, task: Task, counted: float | None) -> Speed:
    """Return what is known of a run's speed.

    Args:
        counted: FLOPs of a sample, for a task that does not say.

    Raises BadTask for a task that says something else than a positive number.
    """
    flops = declared(task, "flops_per_sample")
    peak = declared(task, "peak_flops_per_s")
    if peak is None:
        peak = peak_flops_per_s(ctx.device, ctx.spec.train.precision)
    return Speed(
        counted if flops is None else flops,
        declared(task, "tokens_per_sample"),
        None if peak is None else peak * ctx.world_size,
    )


def declared(task: Task, name: str) -> float | None:
    """Return a positive number that the task says, as an attribute or by a method without
    arguments; None if it does not."""
    said: Any = getattr(task, name, None)
    value = said() if callable(said) else said
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise BadTask(
            f"{name} of {type(task).__name__} is {value!r:.100}; set it to a positive number, or "
            "leave it out"
        )
    return float(value)


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the FLOPs of a pass that is made inside of it, as torch's FlopCounterMode does. The
    pass computes the same bits, compiled functions included."""

    _COUNTED = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp"})
    """Libraries of operators whose products torch has formulas for, or that have none,"""
    _PRODUCTS = re.compile(r"rnn|mm$|mm_|mv$|matmul|^(mkldnn_)?linear|conv|attention|linalg|fft")
    """and names of those among them that have some, if torch has no formula."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # takes long to import

        self._formulas = flop_registry
        self._total, self._is_known = 0, True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let compiled functions run as they do without this: Dynamo would leave them out."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        packet: Any = getattr(func, "_overloadpacket", func)
        formula = self._formulas.get(packet)
        if formula is not None:
            self._total += formula(*args, **named, out_val=result)
        elif getattr(func, "namespace", None) not in self._COUNTED or self._PRODUCTS.search(
            packet.__name__
        ):
            self._is_known = False
        return result

    def of_sample(self, num_samples: int) -> float | None:
        """Return the FLOPs of each of so many samples. None if the pass had operators that torch
        has no formula for, or compiled code, whose kernels are not seen."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        has_compiled = dynamo is not None and bool(dynamo.counters["frames"])
        return self._total / num_samples or None if self._is_known and not has_compiled else None


def peak_flops_per_s(device: torch.device, precision: str) -> float | None:
    """Return the FLOP/s that a device can do; None for a CPU, and where it is not known."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision)


def peak_of(device_name: str, precision: str) -> float | None:
    """Return the published FLOP/s of a GPU by its name, such as ``NVIDIA H100 80GB HBM3``. None for
    others, and for parts of one (MIG)."""
    if re.search(r"\bMIG\b", device_name):
        return None
    found = (peaks for name, peaks in _PEAKS.items() if re.search(rf"\b{name}\b", device_name))
    return next(found, {}).get(precision)
