"""Files as streamed responses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain


def begun(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the same blocks, with the first already read: a missing file then becomes an error
    response, not a broken download."""
    return chain((next(blocks, b""),), blocks)
