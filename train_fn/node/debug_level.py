"""How much torch checks and reports of its collectives: ``TORCH_DISTRIBUTED_DEBUG``."""

from __future__ import annotations

import logging
import os

from torch._C._distributed_c10d import (
    DebugLevel,
    get_debug_level,
    set_debug_level,
    set_debug_level_from_env,
)

logger = logging.getLogger(__name__)

_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


def take_debug_level(*, over_nccl: bool) -> None:
    """Set torch's level by this process's environment, before it makes a process group.

    A warm process imported torch, which reads the variable then, before it got the run's
    environment. Over gloo DETAIL becomes INFO: with the wrapper that DETAIL puts around gloo's
    process group torch's DDP (2.13) ends in a segmentation fault.
    """
    try:
        set_debug_level_from_env()
    except (RuntimeError, ValueError) as exc:
        logger.warning("%s is ignored: %s", _VARIABLE, exc)
    if not over_nccl and get_debug_level() == DebugLevel.DETAIL:
        set_debug_level(DebugLevel.INFO)


def lowered_level() -> str | None:
    """Return what the run's user should know where this process takes DETAIL for INFO."""
    is_lowered = os.environ.get(_VARIABLE) == "DETAIL" and (get_debug_level() != DebugLevel.DETAIL)
    if not is_lowered:
        return None
    return (
        f"{_VARIABLE}=DETAIL is taken for INFO: over gloo torch's DDP crashes with DETAIL. Set it "
        "to INFO, or use GPUs"
    )
