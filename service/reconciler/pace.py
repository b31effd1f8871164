"""Long work in pieces, so that requests are answered between them: computing threads block the
interpreter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PAUSE_FACTOR: Final = 2.0
"""Length of the pause after work, in lengths of the work."""
PIECE: Final = 64


async def in_pieces(do: Callable[[Sequence[T]], R], items: Sequence[T]) -> list[R]:
    """Call ``do`` in a thread for one piece of the items after another, with pauses. Return the
    results."""
    results = []
    for start in range(0, len(items), PIECE):
        began = time.monotonic()
        results.append(await asyncio.to_thread(do, items[start : start + PIECE]))
        if start + PIECE < len(items):
            await asyncio.sleep(PAUSE_FACTOR * (time.monotonic() - began))
    return results
