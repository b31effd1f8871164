"""This process as a rank: its settings, its process group, its signals."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec
from train_fn.node import children
from train_fn.node.cpu_threads import set_threads
from train_fn.node.debug_level import take_debug_level
from train_fn.node.host_memory import keep_memory
from train_fn.node.network_settings import interface_problem
from train_fn.recovery.environment import device_env, take_environment
from train_fn.standalone.place import Place, device_of
from train_fn.step.nccl import group_backend


def set_up(spec: RunSpec) -> None:
    """Prepare this process to be a rank: its environment before anything reads it, its memory and
    its threads."""
    take_environment(device_env(spec) | spec.env)
    keep_memory()
    set_threads(spec)


def join(spec: RunSpec, place: Place, timeout_s: float) -> None:
    """Create the process group at the address that torchrun gave. A process that is alone needs no
    network. Raises UsageError."""
    device = device_of(spec, place)
    problem = interface_problem(os.environ, nccl=device.type == "cuda")
    if problem is not None and place.world_size > 1:
        raise UsageError(problem)
    backend, timeout = group_backend(device), timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    take_debug_level(over_nccl=backend != "gloo")
    if place.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    children.begin()
    dist.init_process_group(backend, timeout=timeout)
    children.connected()


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM, SIGHUP and the first Ctrl-C set, for all ranks to save at one
    step and leave. The second Ctrl-C ends the process."""
    stopping = threading.Event()

    def ask(signum: int, frame: FrameType | None) -> None:
        stopping.set()
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, ask)
    return stopping
