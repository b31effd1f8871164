"""A device whose context has failed, as after an illegal access: every later call of CUDA raises.

Where torch frees memory that several streams have used, it first records events. On a failed device
that raises in a destructor, and the process ends with SIGABRT, before it can report the error. So
the objects of a broken attempt are kept until the process ends.
"""

from __future__ import annotations

import ctypes

import torch


def is_broken(device: torch.device) -> bool:
    """Return whether the device's context has failed. Work that still runs is not waited for."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.current_stream(device).query()
    except RuntimeError:
        return True
    return False


def keep_if_broken(device: torch.device, *objects: object) -> bool:
    """Return whether the device is broken. If so, keep these objects until the process ends."""
    broken = is_broken(device)
    if broken:
        keep_for_ever(*objects)
    return broken


def keep_for_ever(*objects: object) -> None:
    """Never free these objects, nor what they refer to, not even when the process ends."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
