"""Keep the memory of a rank's steps in its process, instead of taking it from the system at every
step."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc

LARGEST_KEPT = 64 << 20
"""Bytes of a block up to which its memory is kept, as large as a thread's heaps; what is larger (a
checkpoint's copy) goes back."""

_OPERATORS_WORD = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


def keep_memory() -> bool:
    """Let malloc keep freed tensors of up to LARGEST_KEPT bytes for the next step. Return whether
    it does.

    By default glibc returns the memory of activations to the system at the end of a step, and gets
    it again in the next, each page cleared. Nothing is changed if the environment chooses how to
    allocate (``MALLOC_TRIM_THRESHOLD_``, another malloc), or if malloc is not glibc's. Source:
    mallopt(3).
    """
    if any(name in os.environ for name in _OPERATORS_WORD):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _M_MMAP_THRESHOLD: LARGEST_KEPT,
        _M_TRIM_THRESHOLD: -1,  # never; of a heap's end
        _M_TOP_PAD: LARGEST_KEPT,  # a heap that is free as a whole stays, too
    }
    return all([mallopt(name, value) for name, value in settings.items()])
