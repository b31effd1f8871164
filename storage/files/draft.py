"""Write a file under a temporary name and then move it into place, so that nobody reads half of
it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def draft_beside(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the name of a hidden file beside ``path``, to write and then rename or link to
    ``path``.

    The file is removed at the end in any case: a draft never outlives a failed write.
    """
    directory, name = os.path.split(path)
    draft = os.path.join(directory, f".{name}.{secrets.token_hex(6)}.tmp")
    try:
        yield draft
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
