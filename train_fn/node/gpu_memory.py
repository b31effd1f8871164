"""What a GPU's memory held when it was too small."""

from __future__ import annotations

import torch

_GIB = 1 << 30


def memory_summary(cause: BaseException, device: torch.device) -> str | None:
    """Who held the memory of ``device`` when ``cause`` was raised, for people; None where it was
    not a GPU that was too small."""
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
