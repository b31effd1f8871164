"""What user code has left in a process, and whether the process can serve another attempt."""

from __future__ import annotations

import logging

from train_fn.recovery.staying import Outliving, why_not_to_stay
from train_fn.step.place_watch import asked_at

logger = logging.getLogger(__name__)


def may_serve_again() -> bool:
    """Return whether this process can serve another attempt. If not, the log says why."""
    reason = why_not_to_stay(Outliving(asked_at()))
    if reason is not None:
        logger.info("this process does not serve another attempt: %s", reason)
    return reason is None
