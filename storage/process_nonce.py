"""A unique name of this process, with which it recognises its own files."""

from __future__ import annotations

import os
import secrets

_nonce: str | None = None


def process_nonce() -> str:
    """Return the nonce, constant for the life of this process. A forked child has a different
    one."""
    global _nonce
    if _nonce is None:
        _nonce = secrets.token_hex(8)
    return _nonce


def _forget() -> None:
    global _nonce
    _nonce = None


os.register_at_fork(after_in_child=_forget)
