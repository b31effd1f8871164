"""Directories of this user on this node: shared memory for snapshots, temporary files for decoded
data and for snapshots that are too large."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_LISTING = ".everstep-files.json"
_COMPILED = "__pycache__"
"""Python rewrites such files at any time."""


def shared_memory_root() -> Path:
    """Return this user's directory in the node's shared memory, or in the temporary directory of a
    system without shared memory."""
    return _own_dir(SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))


def snapshots_dir(run_id: str) -> Path:
    """Return the directory for snapshots of a run on this machine."""
    return shared_memory_root() / run_id


def states_on_disk(run_id: str) -> Path:
    """Return the directory for snapshots of a run that do not fit this machine's shared memory."""
    return own_temporary_dir() / "states" / run_id


def cache_root() -> Path:
    """Return this user's directory for files that can be made again."""
    return own_temporary_dir() / "cache"


def own_temporary_dir() -> Path:
    """Return this user's directory on the node's temporary disk."""
    return _own_dir(Path(tempfile.gettempdir()))


def _own_dir(parent: Path) -> Path:
    """Return ``parent/everstep-UID``, a directory that nobody else can read. Create it if it is
    missing.

    If another user took that name first, use the first of this user's ``everstep-UID-*`` instead,
    whose names nobody can guess. Raises PermissionError, with what to do, if there can be no such
    directory.
    """
    path = parent / f"everstep-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if _is_own(path):
            return path
        if not (others := _own_dirs(path)):
            logger.warning(
                "%s belongs to another user; this user's directory gets another name beside it",
                path,
            )
            tempfile.mkdtemp(prefix=f"{path.name}-", dir=parent)
            others = _own_dirs(path)
    except OSError as exc:
        if exc.filename is None:
            raise
        problem = exc.strerror or type(exc).__name__
        way_out = (
            f"let user {os.getuid()} write there, or set TMPDIR to a directory in which user "
            f"{os.getuid()} may write"
        )
        raise PermissionError(f"{exc.filename}: {problem}; {way_out}") from exc
    return others[0]


def _own_dirs(path: Path) -> list[Path]:
    """Return this user's directories whose names begin with that of ``path``, sorted, so that all
    processes choose the same one."""
    found = []
    for each in path.parent.glob(f"{path.name}-*"):
        with suppress(FileNotFoundError):  # another user took its own away
            if _is_own(each):
                found.append(each)
    return sorted(found)


def _is_own(path: Path) -> bool:
    """Return whether a directory, not a link, is this user's. Raises PermissionError if it is, but
    others can read or write it."""
    found = path.lstat()
    if found.st_uid != os.getuid():
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} is not a directory that only user {os.getuid()} can read (mode "
            f"{found.st_mode:o}); remove it"
        )
    return True


@contextmanager
def node_lock(path: Path) -> Iterator[None]:
    """Let one process of this node at a time inside, for each ``path``. The lock ends with its
    holder's process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def once_a_node(directory: Path, fill: Callable[[Path], object]) -> None:
    """Create ``directory`` if it is not complete, in the first process of this node that calls.

    A rename publishes all that ``fill`` puts into it. Files that a dead process left there are
    removed.
    """
    if _is_whole(directory):
        return
    with node_lock(directory.with_suffix(".lock")):
        if _is_whole(directory):
            return
        temporary = directory.with_suffix(".tmp")
        for leftover in (temporary, directory):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        fill(temporary)
        files = [
            path for path in temporary.rglob("*") if path.is_file() and _COMPILED not in path.parts
        ]
        sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in files}
        (temporary / _LISTING).write_text(json.dumps(sizes))
        temporary.rename(directory)


def files_of(directory: Path) -> dict[str, int]:
    """Return the size of each file that a directory of ``once_a_node`` had when it was filled."""
    found: dict[str, int] = json.loads((directory / _LISTING).read_text())
    return found


def _is_whole(directory: Path) -> bool:
    """Return whether every file is there. Cleaners of temporary directories remove single files."""
    try:
        return all(
            (directory / path).stat().st_size == size for path, size in files_of(directory).items()
        )
    except (OSError, ValueError):
        return False
