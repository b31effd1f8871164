"""Sample how busy and how full a rank's GPU is, on a thread, and report it now and then."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from everstep.wire.events import EventKind

LOOK_S = 2.0
"""Between two looks. NVML's own figure is a mean over at most a second."""
FIRST_REPORT_S = 10.0
REPORT_EVERY_S = 60.0

logger = logging.getLogger(__name__)

Emit = Callable[[EventKind, dict[str, Any]], None]


@dataclass(frozen=True)
class Look:
    """One sample of a GPU."""

    busy: float | None
    """Share of the last moment in which a kernel ran, 0 to 1; None where NVML does not tell (no
    nvidia-ml-py, or MIG)."""
    used_bytes: int
    total_bytes: int
    allocated_bytes: int
    """Most that this process's own tensors took so far."""


def look_at(device: torch.device) -> Look:
    """Sample the GPU without waiting for it. Raises RuntimeError if it does not answer."""
    free, total = torch.cuda.mem_get_info(device)
    try:
        busy: float | None = torch.cuda.utilization(device) / 100
    except Exception:  # NVML's own errors, or no NVML: memory is worth telling by itself
        busy = None
    return Look(busy, total - free, total, torch.cuda.max_memory_allocated(device))


class GpuWatch:
    """Report a rank's GPU while its attempt trains, from a thread of its own. Does nothing on
    CPUs."""

    def __init__(
        self,
        emit: Emit,
        rank: int,
        node_id: str,
        device: torch.device,
        look: Callable[[torch.device], Look] = look_at,
        *,
        look_s: float = LOOK_S,
        first_s: float = FIRST_REPORT_S,
        every_s: float = REPORT_EVERY_S,
    ) -> None:
        self._emit, self._rank, self._node_id, self._device, self._look = (
            emit,
            rank,
            node_id,
            device,
            look,
        )
        self._look_s, self._next_s, self._every_s = look_s, first_s, every_s
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            self._thread = threading.Thread(target=self._run, name="gpu-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        began = time.monotonic()
        looks: list[Look] = []
        while not self._closing.wait(self._look_s):
            try:
                looks.append(self._look(self._device))
            except Exception as exc:  # a device that is lost is the training's to notice
                logger.warning(
                    "cannot read the use of %s any more, so it is not reported: %s",
                    self._device,
                    exc,
                )
                return
            seconds = time.monotonic() - began
            if seconds >= self._next_s:
                self._emit(EventKind.GPU_USE, self._summary(looks, seconds))
                began, looks, self._next_s = time.monotonic(), [], self._every_s

    def _summary(self, looks: list[Look], seconds: float) -> dict[str, Any]:
        busy = [look.busy for look in looks if look.busy is not None]
        return {
            "rank": self._rank,
            "node_id": self._node_id,
            "name": torch.cuda.get_device_name(self._device)
            if torch.cuda.is_available()
            else str(self._device),
            "busy": round(statistics.mean(busy), 3) if busy else None,
            "used_bytes": max(look.used_bytes for look in looks),
            "total_bytes": looks[-1].total_bytes,
            "allocated_bytes": max(look.allocated_bytes for look in looks),
            "seconds": round(seconds, 1),
        }
