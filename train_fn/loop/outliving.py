"""What user code has left in a process, and whether the process can serve another attempt.

Two moments are compared: the end of the first pass, up to which a fresh process would have come as
well, and the moment at which the rank leaves.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from train_fn.loop.held_values import TooMuch, held_values
from train_fn.loop.parts import Inventory, Parts
from train_fn.recovery.staying import Outliving, why_not_to_stay
from train_fn.state.optimizers import each_of
from train_fn.state.train_state import TrainState
from train_fn.step.place_watch import asked_at, is_known_thread

logger = logging.getLogger(__name__)

_LIBRARIES: dict[str, Any] = {
    "builtins": builtins,
    "math": math,
    "numpy": np,
    "random": random,
    "time": time,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.nn.Module": torch.nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
}
"""Modules and classes whose functions user code may replace."""


_OWN_POOLS = ("state-copy", "state-sum", "checkpoint-digest")
"""Names of Everstep's threads that wait for work in code of Python's own."""
_ABSENT = object()


@dataclass
class Beginning:
    """What a process has before code of the user's runs in it."""

    threads: frozenset[int | None] = field(
        default_factory=lambda: frozenset(each.ident for each in threading.enumerate())
    )
    streams: tuple[int, int] = field(default_factory=lambda: (id(sys.stdout), id(sys.stderr)))


def take_inventory(parts: Parts) -> Inventory:
    """Return the present inventory of a process with these parts."""
    values: dict[str, object] | None
    try:
        values = held_values(parts.owners, tensors_of(parts.state))
    except TooMuch:
        values = None
    return Inventory(
        values,
        dict(os.environ),
        str(Path.cwd()),
        {each.name: id(signal.getsignal(each)) for each in signal.Signals},
        _settings(),
        {
            f"{library}.{name}": id(value)
            for library, module in _LIBRARIES.items()
            for name, value in list(vars(module).items())
            if callable(value)
        },
    )


def note_inventory(parts: Parts) -> None:
    """Note what the process holds after the first pass of an attempt. A process that stays holds
    the values of its first one, and in all else what Ray and Everstep have made of it since."""
    now, first = take_inventory(parts), parts.inventory
    parts.inventory = now if first is None else replace(now, values=first.values)


def tensors_of(state: TrainState) -> Iterator[object]:
    """Yield the tensors that a state holds."""
    yield from state.model.parameters()
    yield from state.model.buffers()
    for optimizer in each_of(state.optimizer).values():
        for moments in optimizer.state.values():
            yield from moments.values() if isinstance(moments, dict) else ()


def _settings() -> dict[str, object]:
    return {
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "torch.is_anomaly_enabled": torch.is_anomaly_enabled(),
        "torch.get_deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.enabled),
        "numpy.geterr": np.geterr(),
        "sys.path": list(sys.path),
    }


def may_serve_again(began: Beginning, parts: Parts, own_children: Collection[int] = ()) -> bool:
    """Return whether this process can serve another attempt. If not, the log says why.

    Args:
        began: what the process had before the attempt.
        own_children: ids of processes that end with the attempt.
    """
    reason: str | None = "the attempt did not come to its first step"
    if parts.inventory is not None:
        reason = why_not_to_stay(outliving(began, parts, parts.inventory, own_children))
    if reason is not None:
        logger.info("this process does not serve another attempt: %s", reason)
    return reason is None


def outliving(
    began: Beginning, parts: Parts, built: Inventory, own_children: Collection[int] = ()
) -> Outliving:
    """Return what outlives the attempt in this process.

    Args:
        built: the inventory of the process once it had built.
    """
    now = take_inventory(parts)
    is_comparable = built.values is not None and now.values is not None
    return Outliving(
        asked_at=asked_at(),
        children=_children(own_children),
        threads=_threads_since(began),
        streams=() if began.streams == Beginning().streams else ("sys.stdout or sys.stderr",),
        environment=_changed(built.environment, now.environment),
        directory=() if built.directory == now.directory else (now.directory,),
        signals=_changed(built.signals, now.signals),
        settings=_changed(built.settings, now.settings),
        functions=_changed(built.functions, now.functions),
        values=_changed(built.values or {}, now.values or {}) if is_comparable else (),
        too_much=not is_comparable,
    )


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names whose values differ, and those that are there only once."""
    names = before.keys() | now.keys()
    return tuple(
        sorted(each for each in names if before.get(each, _ABSENT) != now.get(each, _ABSENT))
    )


def _children(own: Collection[int]) -> tuple[str, ...]:
    """Return the processes that this one has started, and that run on.

    Args:
        own: ids of those that end with the attempt.
    """
    known = {*own, getattr(resource_tracker._resource_tracker, "_pid", None)}
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in known and child.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{child.name()} ({child.pid})")
    return tuple(found)


def _threads_since(began: Beginning) -> tuple[str, ...]:
    """Return the threads that code of the user's, or a library for it, has started since."""
    frames = sys._current_frames()
    return tuple(
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in began.threads
        and thread is not threading.current_thread()
        and not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith(_OWN_POOLS)
        and not is_known_thread(frames.get(thread.ident or 0))
    )
