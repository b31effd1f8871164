"""Ids that sort by creation time."""

from __future__ import annotations

import re
import secrets
from typing import Final

ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base32 in lower case: in ASCII order, without letters that look like digits."""
RUN_ID_PATTERN: Final = re.compile(r"run_[0-9a-hjkmnp-tv-z]{12}")
SWEEP_ID_PATTERN: Final = re.compile(r"sweep_[0-9a-hjkmnp-tv-z]{12}")
_EPOCH_S: Final = 1_704_067_200  # 2024-01-01; 41 bits of milliseconds reach to 2093
_RANDOM_BITS: Final = 19


def new_run_id(now: float) -> str:
    """Return ``run_`` and 12 characters: 41 bits of milliseconds, then 19 random bits.

    Two ids of one millisecond may collide (1 in 524,288); the primary key detects it, and the store
    draws again.
    """
    return "run_" + _dated(now)


def new_drill_id(now: float) -> str:
    """Return ``drill_`` and 12 characters, as for a run."""
    return "drill_" + _dated(now)


def new_check_id(now: float) -> str:
    """Return ``check_`` and 12 characters, as for a run."""
    return "check_" + _dated(now)


def new_profile_id(now: float) -> str:
    """Return ``prof_`` and 12 characters, as for a run."""
    return "prof_" + _dated(now)


def new_stacks_id(now: float) -> str:
    """Return ``stk_`` and 12 characters, as for a run."""
    return "stk_" + _dated(now)


def new_delivery_id(now: float) -> str:
    """Return ``dlv_`` and 12 characters, as for a run."""
    return "dlv_" + _dated(now)


def new_alert_id(now: float) -> str:
    """Return ``alr_`` and 12 characters, as for a run."""
    return "alr_" + _dated(now)


def new_sweep_id(now: float) -> str:
    """Return ``sweep_`` and 12 characters, as for a run."""
    return "sweep_" + _dated(now)


def _dated(now: float) -> str:
    milliseconds = max(0, int((now - _EPOCH_S) * 1000)) & (2**41 - 1)
    return _base32(milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS), 12)


def new_token_id() -> str:
    return "tok_" + _base32(secrets.randbits(60), 12)


def new_user_id() -> str:
    return "user_" + _base32(secrets.randbits(60), 12)


def _base32(value: int, length: int) -> str:
    return "".join(ALPHABET[value >> 5 * position & 31] for position in reversed(range(length)))
