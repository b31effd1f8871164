"""What a process holds for the next attempt that it serves, and whether it can serve one after
what user code has left in it.
"""

from __future__ import annotations

import builtins
import contextlib
import decimal
import gc
import locale
import logging
import math
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from storage.run_dir import Origin
from train_fn.checks.left_behind import TooMuch, held_values
from train_fn.context import WorkerContext
from train_fn.errors import AsksForPeers, BuiltByHalves, TrainError
from train_fn.loop.build import Inventory, Parts
from train_fn.loop.replica import build_replica
from train_fn.recovery.staying import SOON_WRITTEN_BYTES, Outliving, why_not_to_stay
from train_fn.samples.streams import StreamSet
from train_fn.session.restore import KeptLabel
from train_fn.snapshots import store
from train_fn.snapshots.publisher import leave_snapshot
from train_fn.snapshots.state_file import state_digest
from train_fn.snapshots.store import Label
from train_fn.state.optim import each_of
from train_fn.state.tensor_tree import size_bytes, take_apart, tree_digest
from train_fn.state.train_state import TrainState
from train_fn.step.place_watch import asked_at, is_known_thread, watching

logger = logging.getLogger(__name__)


_OF_ONE_RANK = frozenset({"tail", "parent", "contents"})
"""Entries of a state that may differ between ranks."""


@dataclass(frozen=True)
class Survivor:
    """A state of whole steps, and everything that it was trained with."""

    parts: Parts
    ctx: WorkerContext
    """Of the attempt that made the state."""
    state: dict[str, Any]
    """Its ``state_dict``, whose tensors are live."""
    described: Future[KeptLabel]
    """What an election has to know of the state."""

    @property
    def step(self) -> int:
        return self.parts.state.step

    @property
    def origin(self) -> Origin:
        return self.ctx.submission, self.ctx.attempt

    @property
    def is_large(self) -> bool:
        return size_bytes(self.state) > SOON_WRITTEN_BYTES

    def leave(self, superseded: threading.Event | None = None) -> str | None:
        """Leave the state as a snapshot on this node. Return None, or the problem."""
        is_large, began = self.is_large, time.monotonic()

        def check() -> None:
            nonlocal began
            if not is_large or superseded is None:
                return
            is_taken = store.kept_step() is None
            if superseded.wait(store.pause_s(time.monotonic() - began, is_taken=is_taken)):
                raise _Superseded
            began = time.monotonic()

        try:
            kept = self.described.result()  # one thread at a time reads the state
            self.parts.state.require_sound(self.state)
            return leave_snapshot(self.ctx, self.state, kept.label.digest, check)
        except _Superseded:
            logger.info("the kept state of step %d is not written: all ranks have it", self.step)
            return None
        except (TrainError, RuntimeError) as exc:  # a device may not be readable any more
            logger.warning("the kept state of step %d cannot be left: %s", self.step, exc)
            return f"the kept state of step {self.step} cannot be left: {exc}"


class _Superseded(Exception):
    """Nobody needs the snapshot any more that is being written."""


@dataclass(frozen=True)
class Recruit:
    """Parts that nothing was trained with yet, for a rank that is to join."""

    parts: Parts
    ctx: WorkerContext
    """In which they were built. Its rank and size are not those that the rank gets."""
    step: None = None
    is_large = False

    def leave(self, superseded: threading.Event | None = None) -> None:
        """Leave nothing, since there is no state."""


@dataclass(frozen=True)
class Vacated:
    """A process whose rank has left a sharded model. Its pieces are on the node, and the next
    attempt builds everything anew: what FSDP2 has put on a model belongs to one group."""

    step: int
    ctx: WorkerContext
    inventory: Inventory
    """What the process held beside what was built in it."""
    parts: None = None
    is_large = False

    def leave(self, superseded: threading.Event | None = None) -> None:
        """Leave nothing more: the pieces are there."""


def vacate(parts: Parts, ctx: WorkerContext, step: int) -> None:
    """Let this process serve the next attempt of a sharded model."""
    assert parts.inventory is not None
    store.keep(Vacated(step, ctx, parts.inventory))
    logger.info("this process stays; its piece of step %d is on the node", step)


def keep(parts: Parts, ctx: WorkerContext, state: dict[str, Any]) -> None:
    """Keep a state in this process, and everything that it was trained with.

    Args:
        ctx: of the attempt that made the state.
        state: its ``state_dict``. It is digested in the background, while the next group is formed.
    """
    survivor = Survivor(parts, ctx, state, Future())
    label = Label(*survivor.origin, survivor.step, ctx.world_rank, None, None)
    threading.Thread(
        target=_describe, args=(survivor.described, label, state), name="digest-state", daemon=True
    ).start()
    store.keep(survivor)


def _describe(described: Future[KeptLabel], label: Label, state: dict[str, Any]) -> None:
    try:
        rest = {name: value for name, value in state.items() if name not in _OF_ONE_RANK}
        details = tree_digest(take_apart(rest, []))
        described.set_result(KeptLabel(replace(label, digest=state_digest(state)), details))
    except BaseException as exc:  # a device that cannot be read; it is raised by who asks
        described.set_exception(exc)


def build_ahead(ctx: WorkerContext) -> None:
    """Build what a rank trains while it has no peers yet, and keep it in this process.

    The first pass is tried alone, which puts everything back. In a new process it takes longest:
    kernels load, and memory is taken. Now nobody waits for it.

    Args:
        ctx: of a rank that is alone.

    Raises:
        AsksForPeers: the task asks for its rank or its peers. Others may have answered, and waited
            for it; what this process heard is wrong.
        BuiltByHalves: the task has left something in the process that the next attempt, which tries
            the first pass again, would not find in a fresh one.
    """
    if ctx.spec.train.sharding != "none":
        return  # sharded over one rank it would be another model
    began = Beginning()
    with _group_of_one(), watching():
        replica = build_replica(ctx)
        built = take_inventory(replica.parts)
        takes_peers = replica.exchanges_in_forward
        if not takes_peers and not isinstance(replica.train_set, StreamSet):
            replica.join(is_fresh=True)  # of a stream it would use up samples
            replica.let_go()
    if (place := asked_at()) is not None:
        raise AsksForPeers(place)
    if (reason := why_not_to_stay(outliving(began, replica.parts, built))) is not None:
        raise BuiltByHalves(reason)
    store.keep(Recruit(replica.parts, ctx))


@contextmanager
def _group_of_one() -> Iterator[None]:
    """Have a process group inside, as every rank has. That there is one says nothing of peers."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def take(ctx: WorkerContext) -> Survivor | Recruit | Vacated | None:
    """Return what this process holds for such an attempt, and empty the slot. What it holds for any
    other is dropped. Call ``store.supersede`` once all ranks hold the state."""
    held = store.take(waits=False)
    if not isinstance(held, Survivor | Recruit | Vacated) or not ctx.in_process:
        return None
    if _trained(held.ctx) != _trained(ctx):
        return None
    if isinstance(held, Survivor):
        held.parts.origin = held.origin
    if isinstance(held, Vacated):
        from train_fn.state.sharded import forget_meshes  # it takes half a second

        gc.collect()  # the model of the last attempt, whose hooks refer to it
        forget_meshes()
    return held


def _trained(ctx: WorkerContext) -> tuple[object, ...]:
    """Return what an attempt trains, and where."""
    return ctx.run_dir.uri, ctx.submission, ctx.spec, ctx.device


# ---------------------------------------------------------------- outliving

# What user code has left in a process, and whether the process can serve another attempt.
#
# Two moments are compared: the end of the first pass, up to which a fresh process would have come
# as well, and the moment at which the rank leaves.

_LIBRARIES: dict[str, Any] = {
    "builtins": builtins,
    "math": math,
    "numpy": np,
    "numpy.random": np.random,
    "random": random,
    "time": time,
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.nn.init": torch.nn.init,
    **{
        f"{space.__name__}.{name}": found
        for space in (torch.nn, torch.optim, torch.optim.lr_scheduler, torch.utils.data)
        for name, found in vars(space).items()
        if isinstance(found, type)
    },
}
"""Modules and classes whose functions user code may replace, or to which it may add values."""
_NUMBERS_AND_WORDS = (bool, int, str)
_LIMITS = [each for each in dir(resource) if each.startswith("RLIMIT_")]
_TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")


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
    of_thread: dict[str, object] = field(default_factory=lambda: _of_thread())


def take_inventory(parts: Parts) -> Inventory:
    """Return the present inventory of a process with these parts."""
    try:
        # What the next attempt builds anew needs no comparison.
        owners = parts.owners if parts.state.piece is None else {}
        return _inventory(held_values(owners, tensors_of(parts.state) if owners else ()))
    except TooMuch:
        return _inventory(None)


def _inventory(values: dict[str, object] | None) -> Inventory:
    return Inventory(
        values,
        dict(os.environ),
        str(Path.cwd()),
        {each.name: id(signal.getsignal(each)) for each in signal.Signals},
        _settings(),
        {
            f"{library}.{name}": value if isinstance(value, _NUMBERS_AND_WORDS) else id(value)
            for library, module in _LIBRARIES.items()
            for name, value in list(vars(sys.modules.get(library, module)).items())
            if callable(value) or isinstance(value, _NUMBERS_AND_WORDS)
        },
    )


def note_inventory(parts: Parts, vacated: Vacated | None = None) -> None:
    """Note what the process holds after the first pass of an attempt. A process that stays holds
    the values of its first one, and in all else what Ray and Everstep have made of it since.

    Raises BuiltByHalves if a process that was ``vacated`` holds something else after the task has
    built a second time: in a fresh one it builds once.
    """
    first = parts.inventory
    parts.inventory = take_inventory(parts) if first is None else _inventory(first.values)
    if vacated is not None:
        before, now = vacated.inventory, parts.inventory
        changed = [
            *_changed(before.values or {}, now.values or {}),
            *_changed(before.functions, now.functions),
            *_changed(before.settings, now.settings),
        ]
        if changed or now.values is None:
            few = ", ".join(changed[:5]) or "more than can be compared"
            raise BuiltByHalves(f"what the task builds a second time changes {few}")


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
        "torch.is_anomaly_enabled": torch.is_anomaly_enabled(),
        "torch.get_deterministic_debug_mode": torch.get_deterministic_debug_mode(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.utils.deterministic": torch._C._get_deterministic_fill_uninitialized_memory(),
        "torch.multiprocessing": torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
        **_flags(),
        "decimal.DefaultContext": _precision(decimal.DefaultContext),
        "sys.path": list(sys.path),
        "sys.getrecursionlimit": sys.getrecursionlimit(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "locale": locale.setlocale(locale.LC_ALL),
        "socket.getdefaulttimeout": socket.getdefaulttimeout(),
        "warnings that are errors": [str(each) for each in warnings.filters if each[0] == "error"],
        "umask": _umask(),
        "resource limits": {each: resource.getrlimit(getattr(resource, each)) for each in _LIMITS},
    }


def _of_thread() -> dict[str, object]:
    """Return what each thread has of its own. Every attempt runs in a new one."""
    smallest = torch.tensor(5e-324, dtype=torch.float64, device="cpu")
    return {
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled": torch.is_inference_mode_enabled(),
        "torch.get_default_device": str(torch.get_default_device()),
        "torch.is_autocast_enabled": [torch.is_autocast_enabled(each) for each in ("cpu", "cuda")],
        "torch.set_flush_denormal": bool(smallest * 1.0 == 0.0),
        "modes of torch": (
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        ),
        "numpy.geterr": np.geterr(),
        "decimal.getcontext": _precision(decimal.getcontext()),
    }


def _precision(context: decimal.Context) -> tuple[object, ...]:
    return context.prec, context.rounding, context.Emin, context.Emax


def _flags() -> dict[str, object]:
    """Return the flags of ``torch.backends``, which choose kernels."""
    found: dict[str, object] = {}
    for name in ("cudnn", "mkldnn", "nnpack", "opt_einsum"):
        module = getattr(torch.backends, name)
        for key, flag in vars(type(module)).items():
            if isinstance(flag, torch.backends.ContextProp):
                with contextlib.suppress(Exception):  # not in this build, or set in a newer way
                    found[f"torch.backends.{name}.{key}"] = getattr(module, key)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
        found[f"torch.backends.cuda.{name}_sdp"] = enabled()
    found["torch.backends.mha"] = torch.backends.mha.get_fastpath_enabled()
    found["torch.backends.quantized"] = torch.backends.quantized.engine
    return found


def _umask() -> str | None:
    """Return the mask of new files' modes. To ask the system for it is to change it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((line for line in lines if line.startswith("Umask:")), None)


def may_serve_again(
    began: Beginning,
    parts: Parts,
    own_children: Collection[int] = (),
    own_threads: Collection[int | None] = (),
) -> bool:
    """Return whether this process can serve another attempt. If not, the log says why.

    Args:
        began: what the process had before the attempt.
        own_children: ids of processes that end with the attempt.
        own_threads: ids of threads that end with it.
    """
    if parts.inventory is None:
        logger.info("this process does not serve another attempt: it did not come to a step")
        return False
    found = outliving(began, parts, parts.inventory, own_children, own_threads)
    reason = why_not_to_stay(found)
    if reason is not None:
        level = logging.WARNING if found.may_decide_steps else logging.INFO
        logger.log(level, "this process does not serve another attempt: %s", reason)
    return reason is None


def outliving(
    began: Beginning,
    parts: Parts,
    built: Inventory,
    own_children: Collection[int] = (),
    own_threads: Collection[int | None] = (),
) -> Outliving:
    """Return what outlives the attempt in this process.

    Args:
        built: the inventory of the process once it had built.
    """
    now = take_inventory(parts)
    is_comparable = built.values is not None and now.values is not None
    timers = [each for each in _TIMERS if any(signal.getitimer(getattr(signal, each)))]
    return Outliving(
        asked_at=asked_at(),
        children=_children(own_children),
        threads=(*_threads_since(began, own_threads), *timers),
        streams=() if began.streams == Beginning().streams else ("sys.stdout or sys.stderr",),
        environment=_changed(built.environment, now.environment),
        directory=() if built.directory == now.directory else (now.directory,),
        signals=_changed(built.signals, now.signals),
        settings=_changed(built.settings, now.settings),
        of_thread=_changed(began.of_thread, _of_thread()),
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


def _threads_since(began: Beginning, own: Collection[int | None] = ()) -> tuple[str, ...]:
    """Return the threads that code of the user's, or a library for it, has started since.

    Args:
        own: ids of those that end with the attempt.
    """
    frames, compiling = sys._current_frames(), _threads_that_compile()
    return tuple(
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in began.threads
        and thread.ident not in own
        and thread is not threading.current_thread()
        and not isinstance(thread, threading._DummyThread)
        and thread not in compiling
        and type(thread).__module__ != "tqdm._monitor"  # it draws bars anew, and nothing else
        and not thread.name.startswith(_OWN_POOLS)
        and not is_known_thread(frames.get(thread.ident or 0))
    )


def _threads_that_compile() -> Collection[threading.Thread]:
    """Return the threads of torch's compiler, which wait for work in code of Python's own."""
    compiler = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    pool = getattr(compiler, "pool", None)
    if pool is None or not pool.cache_info().currsize:
        return ()
    return set(pool()._threads)
