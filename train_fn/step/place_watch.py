"""Notice when code of the user's asks for its place among the ranks while it builds: its rank, its
peers, or a group of them.

What is built once for all ranks of a node has no place. A build that asks for one would be told a
wrong one, so each rank then builds for itself.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions hold the group that exists when it is imported: none

OF_A_PLACE = frozenset({"RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
"""Environment variables that Ray Train and torchrun set to a rank's place."""

_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_SITE_PACKAGES = f"{Path(torch.__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(f"{_SITE_PACKAGES}{name}{os.sep}" for name in ("torch", "ray"))
_PUT_ON = f"{_SITE_PACKAGES}torch/distributed/fsdp/"
"""FSDP2's hooks on the user's modules: Everstep has put them there."""
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
_TELL_NOTHING = frozenset({"is_initialized", "_get_distributed_settings"})
"""Functions of torch whose answer is the same in every attempt, or used by none but a DataLoader
that ends with it."""


class _PlaceWatch:
    """Remember the first question of this process."""

    def __init__(self) -> None:
        self.is_on = False
        self.asked_at: str | None = None

    def note(self) -> None:
        """Note who asks, if it is code of the user's. Called wherever a place is told."""
        if self.is_on and self.asked_at is None:
            self.asked_at = asker(sys._getframe(2))


_watch = _PlaceWatch()


def asked_at() -> str | None:
    """Return the line of the user's code that first asked for its place in this process, as
    ``task.py, line 12, in loss``; None if none has."""
    return _watch.asked_at


@contextmanager
def watching() -> Iterator[None]:
    """Notice questions inside. Those of Everstep and Ray do not count."""
    _install()
    _watch.is_on = True
    try:
        yield
    finally:
        _watch.is_on = False


def asker(frame: FrameType | None) -> str | None:
    """Return the user's line that asks, by the frames of a question; None if Everstep asks, or a
    library by itself.

    Args:
        frame: of what told the place.
    """
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        is_of_library = path.startswith(_LIBRARIES)
        is_own = path.startswith((_OWN, _PUT_ON))
        if is_own or (is_of_library and code.co_name in _TELL_NOTHING):
            return None
        if not (is_of_library or _is_standard(path)):
            return f"{Path(path).name}, line {frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return None


def _is_standard(path: str) -> bool:
    """Return whether a file is of Python's own library, or of no file."""
    return path.startswith("<frozen ") or (
        path.startswith(_STANDARD) and not path.startswith(_SITE_PACKAGES)
    )


class _WatchedEnvironment(dict[Any, Any]):
    """The variables of this process; those of a place are watched."""

    def __getitem__(self, key: Any) -> Any:
        if os.fsdecode(key) in OF_A_PLACE:
            _watch.note()
        return super().__getitem__(key)


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method``, whose calls are questions if they are answered."""

    @functools.wraps(method)
    def watched(*arguments: Any, **named: Any) -> Any:
        answer = method(*arguments, **named)
        if answer is not None:
            _watch.note()
        return answer

    watched.is_watched = True  # type: ignore[attr-defined]
    return watched


def _install() -> None:
    """Watch every way to a place: torch's group of all ranks, through which all of its functions
    go, and the environment."""
    world: Any = dist.distributed_c10d._World
    if getattr(world.default_pg.fget, "is_watched", False):
        return
    world.default_pg = world.default_pg.getter(_watched(world.default_pg.fget))
    variables = _WatchedEnvironment(os.environ._data)  # type: ignore[attr-defined]
    environments: tuple[Any, ...] = (os.environ, os.environb)
    for environment in environments:
        environment._data = variables
