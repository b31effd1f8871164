"""Memory of a GPU: what it held when it was too small, and waiting for that of dead ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

FREED_S = 30.0
"""Longest wait for the memory of processes that have just ended."""
_SETTLED_S = 2.0
"""No more of it will be freed, once nothing was for so long: another program holds the rest."""
_LOOK_S = 0.1
_MOSTLY_FREE = 0.95
_GIB = 1 << 30

logger = logging.getLogger(__name__)


def _free_or_own(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a GPU that are free or kept by torch in this process, and all bytes."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device), total


def wait_for_free_memory(
    device: torch.device,
    look: Callable[[torch.device], tuple[int, int]] = _free_or_own,
) -> None:
    """Wait until the memory of ranks that died on ``device`` is free: the driver takes seconds for
    many gigabytes. Nothing on a CPU.

    Args:
        device: This rank's.
        look: Gives the bytes that are free or this process's own, and those that there are.
    """
    if device.type != "cuda":
        return
    began = grew_at = time.monotonic()
    most, total = look(device)
    while most < _MOSTLY_FREE * total:
        now = time.monotonic()
        if now - grew_at > _SETTLED_S or now - began > FREED_S:
            logger.warning(
                "%s: %.1f of %.1f GiB are free after %.1f s; other processes hold the rest",
                device,
                most / _GIB,
                total / _GIB,
                now - began,
            )
            return
        time.sleep(_LOOK_S)
        free, _ = look(device)
        if free > most:
            most, grew_at = free, now


def memory_summary(cause: BaseException, device: torch.device) -> str | None:
    """Return who held the memory of ``device`` when ``cause`` was raised, in words; None unless a
    GPU was too small."""
    if device.type != "cuda" or not isinstance(cause, torch.OutOfMemoryError):
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        head = (
            f"{device}: {total / _GIB:.2f} GiB, {free / _GIB:.2f} free; this rank: "
            f"{allocated / _GIB:.2f} in tensors, "
            f"{(reserved - allocated) / _GIB:.2f} kept by torch for reuse; others and the CUDA "
            "context: "
            f"{(total - free - reserved) / _GIB:.2f}"
        )
        return f"{head}\n{torch.cuda.memory_summary(device, abbreviated=True)}"
    except RuntimeError as exc:
        return f"{device}: its memory could not be looked at: {exc}"
