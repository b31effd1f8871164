"""Memory that a rank's steps take from the system once, and not at every step anew."""

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
    """Have malloc keep what tensors of up to LARGEST_KEPT bytes free, for the next step's; whether
    it does now.

    As it comes, glibc gives the memory of activations back to the system at the end of a step, and
    gets it again, page by page and each page cleared, in the next. Where the environment says how
    to allocate (``MALLOC_TRIM_THRESHOLD_``, another malloc), and where malloc is not glibc's,
    nothing is done. Source: mallopt(3).
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
