"""Suggest the name that was meant. The work is bounded, however many and long the names are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

_LONGEST_CHARS = 100
_MOST_NAMES = 500


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most like ``name``; None if none is close, or ``name`` is too long.

    >>> closest("epohcs", ["epochs", "max_steps"])
    'epochs'
    """
    if len(name) > _LONGEST_CHARS:
        return None
    near = (
        each
        for each in islice(names, 100 * _MOST_NAMES)
        if abs(len(each) - len(name)) <= len(name) // 2 + 1
    )
    found = difflib.get_close_matches(name, islice(near, _MOST_NAMES), n=1)
    return found[0] if found else None
