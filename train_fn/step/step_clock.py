"""Measure a rank's own work in a step, without the time that it waits for peers. This adds no
collective."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Measure one rank's own time: from the last step's gate, which all ranks pass together, to its
    last gradient in this step.

    The rest until the next gate is the all-reduce: moving gradients, or waiting for slower ranks.
    The first step finds the parameter that gets the last gradient. Only that parameter keeps its
    hook. On CUDA, events on the stream give the times, without waiting for it.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._began: float | torch.cuda.Event | None = None
        self._last_gradient: float | torch.cuda.Event | None = None
        self._newest: torch.Tensor | None = None
        self._hooks: dict[int, Any] = {
            id(parameter): parameter.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]
            for parameter in parameters
        }

    def restart(self) -> None:
        """Discard the time until the next gate, because work outside of steps came between."""
        self._began = None

    def gate(self) -> float:
        """Mark the gate that this rank has just passed. Return the seconds of its own work in that
        step; 0 if unknown."""
        own_s = (
            self._elapsed_s()
            if self._began is not None and self._last_gradient is not None
            else 0.0
        )
        if self._newest is not None and len(self._hooks) > 1:
            self._keep_hook_of(self._newest)
        self._began, self._last_gradient = self._now(), None
        return own_s

    def close(self) -> None:
        """Measure nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    def _keep_hook_of(self, last: torch.Tensor) -> None:
        kept = self._hooks.pop(id(last))
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {id(last): kept}

    def _mark(self, parameter: torch.Tensor) -> None:
        self._last_gradient, self._newest = self._now(), parameter

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed_s(self) -> float:
        began, ended = self._began, self._last_gradient
        if isinstance(began, float) and isinstance(ended, float):
            return ended - began
        assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
        return began.elapsed_time(ended) / 1000 if ended.query() else 0.0  # type: ignore[no-untyped-call]
