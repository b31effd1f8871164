"""Much work at once, done so that requests are answered meanwhile: threads that compute take the
interpreter from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PAUSE_FACTOR: Final = 2.0
"""However long work takes, the pause after it is so many times as long."""
PIECE: Final = 64


async def in_pieces(do: Callable[[Sequence[T]], R], items: Sequence[T]) -> list[R]:
    """What ``do`` returns for each piece of the items, one after the other, in a thread, with a
    pause between two."""
    results = []
    for start in range(0, len(items), PIECE):
        began = time.monotonic()
        results.append(await asyncio.to_thread(do, items[start : start + PIECE]))
        if start + PIECE < len(items):
            await asyncio.sleep(PAUSE_FACTOR * (time.monotonic() - began))
    return results
