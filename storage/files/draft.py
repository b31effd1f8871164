"""A file that is written beside its place and then put there, so that nobody reads half of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def draft_beside(path: str | os.PathLike[str]) -> Iterator[str]:
    """Name a hidden file beside ``path``, to be written and then renamed or linked to it.

    What is there by that name afterwards is removed, whatever happened: a draft never outlives a
    write that failed.
    """
    directory, name = os.path.split(path)
    draft = os.path.join(directory, f".{name}.{secrets.token_hex(6)}.tmp")
    try:
        yield draft
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)
