"""Tasks with habits of users' code: what they keep in a process, and where.

A setup is named after its habits: ``habits.cached_group__own_group`` has both. What a habit keeps
decides a factor of the loss, so that a stale one changes every bit of the run.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import contextvars
import copy
import decimal
import enum
import functools
import gc
import hashlib
import io
import itertools
import locale
import logging
import mmap
import multiprocessing
import os
import queue
import random
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.integration.trainees import Regression
from train_fn.loop import replica


class Habit:
    """What user code does beside training. Every method may do nothing."""

    def build(self, task: Any) -> None:
        """While the model is built."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer; None for the spec's."""
        return None

    def factor(self, task: Any, model: nn.Module) -> float:
        """A factor of the loss."""
        return 1.0

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        """On all ranks."""


@functools.lru_cache
def world() -> Any:
    return dist.group.WORLD


@functools.lru_cache
def size() -> int:
    return dist.get_world_size()


def gather(group: Any) -> None:
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, "mine", group=group)
    assert found == ["mine"] * len(found)


class CachedGroup(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        gather(world())


class OwnGroup(Habit):
    def build(self, task: Any) -> None:
        task.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        if task.group is not None:
            gather(task.group)


class GuardedBarrier(Habit):
    """Rank 0 prepares, and the others wait."""

    def build(self, task: Any) -> None:
        if dist.is_initialized():
            dist.barrier()


class RankOfBuild(Habit):
    def build(self, task: Any) -> None:
        task.rank = dist.get_rank()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.125 * task.rank


class CachedSize(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.125 * size()


class CountingSgd(torch.optim.SGD):
    """Its step size falls with its own count of calls."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.calls**-0.5)


class OptimizerCount(Habit):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return CountingSgd(model.parameters())


class TorchsAttribute(Habit):
    """Anneals a dropout's rate in place."""

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p *= 0.5


COUNTS = {"global": 0}
STEPS = 0
NUMBERS = itertools.count()
OWN_RNG = random.Random(5)


class GlobalCount(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        global STEPS
        STEPS += 1
        return 1.0 + 0.001 * STEPS


class GlobalDict(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        COUNTS["global"] += 1
        return 1.0 + 0.001 * COUNTS["global"]


class TaskCount(Habit):
    def build(self, task: Any) -> None:
        task.passes = 0

    def factor(self, task: Any, model: nn.Module) -> float:
        task.passes += 1
        return 1.0 + 0.001 * task.passes


class DeepCount(Habit):
    """Held three objects away from the task."""

    def build(self, task: Any) -> None:
        task.near = Held(Held(Held(0)))

    def factor(self, task: Any, model: nn.Module) -> float:
        deep = task.near.inner.inner
        deep.inner += 1
        return 1.0 + 0.001 * deep.inner


class Held:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class ClassCount(Habit):
    passes = 0

    def factor(self, task: Any, model: nn.Module) -> float:
        ClassCount.passes += 1
        return 1.0 + 0.001 * ClassCount.passes


def counted(numbers: list[int] = []) -> int:  # noqa: B006 it is the habit
    numbers.append(0)
    return len(numbers)


class DefaultArgument(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * counted()


def _counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


closed = _counter()


class Closure(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * closed()


class FunctionAttribute(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
        return 1.0 + 0.001 * counted.calls  # type: ignore[attr-defined]


class GlobalIterator(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * next(NUMBERS)


class GlobalGenerator(Habit):
    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * OWN_RNG.random()


class GlobalRng(Habit):
    """Draws from Python's, which Everstep seeds."""

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        task.drawn = random.random()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * random.random()


@functools.lru_cache
def first_answer(question: str) -> float:
    return 0.001 * next(NUMBERS)


class Cache(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        task.answer = first_answer("first")

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + getattr(task, "answer", 0.0)


class Environment(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        os.environ["HABIT"] = str(1 + int(os.environ.get("HABIT", "0")))

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * int(os.environ.get("HABIT", "0"))


class Directory(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        os.chdir("/")

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * (Path.cwd() == Path("/"))


class SignalHandler(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        signal.signal(signal.SIGUSR2, _ignore)

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * (signal.getsignal(signal.SIGUSR2) is _ignore)


def _ignore(*_: Any) -> None:
    pass


class Patched(Habit):
    """Replaces a function of torch once it knows enough."""

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        torch.nn.functional.celu = torch.nn.functional.elu

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * (torch.nn.functional.celu is torch.nn.functional.elu)


class Setting(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        torch.set_anomaly_enabled(True, check_nan=False)

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * torch.is_anomaly_enabled()


class Served(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.number, self.asked, self.answered = 0, threading.Event(), threading.Event()

    def run(self) -> None:
        while self.asked.wait():
            self.asked.clear()
            self.number += 1
            self.answered.set()


class OwnThread(Habit):
    """A thread that answers questions, and counts them."""

    def build(self, task: Any) -> None:
        task.served = Served()
        task.served.start()

    def factor(self, task: Any, model: nn.Module) -> float:
        task.served.answered.clear()
        task.served.asked.set()
        assert task.served.answered.wait(60)
        return 1.0 + 0.001 * task.served.number


class OwnChild(Habit):
    def build(self, task: Any) -> None:
        task.child = subprocess.Popen(["sleep", "600"])
        weakref.finalize(task, task.child.kill)


class Stream(Habit):
    def epoch_end(self, task: Any, model: nn.Module) -> None:
        sys.stdout = io.StringIO()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.1 * isinstance(sys.stdout, io.StringIO)


# ---------------------------------------------------------------- hidden counts

# A number that decides the loss, wherever Python and torch let one be kept.


class Counted(Habit):
    """Counts its passes somewhere."""

    def __init__(self, count: Callable[[], float]) -> None:
        self._count = count

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * float(self._count())


class Settings(dict[str, int]):
    passes = 0


def squares() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


AVERAGE, CONTEXT, LOCAL = (
    np.float32(0),
    contextvars.ContextVar("count", default=0),
    threading.local(),
)
MAPPED = mmap.mmap(-1, 4096)
OCTETS, WORDS, SHARED = bytearray(8), array.array("q", [0]), multiprocessing.Value("i", 0)
POINT, BANK, LINE = torch.zeros(1), np.zeros(1 << 18), queue.Queue[int]()
ARGUMENTS, SETTINGS, MADE = argparse.Namespace(passes=0), Settings(), types.ModuleType("made")
next_number, LISTED, SQUARES = itertools.count().__next__, iter([0] * 999), squares()
SCHEDULE = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([POINT], lr=1.0), 0.99)
STAGES = [Held(number) for number in range(9)]
STAGE = Held(STAGES[0])
sys.modules["tests.integration.settings_of_habits"] = Held(0)  # type: ignore[assignment]


def average() -> float:
    global AVERAGE
    AVERAGE += np.float32(1)
    return float(AVERAGE)


def in_place(held: Any) -> Callable[[], float]:
    """Return a function that counts in the first element."""

    def count() -> float:
        held[0] += 1
        return float(held[0])

    return count


def in_attribute(held: Any, name: str) -> Callable[[], float]:
    def count() -> float:
        setattr(held, name, getattr(held, name, 0) + 1)
        return float(getattr(held, name))

    return count


def in_shared_value() -> float:
    SHARED.value += 1
    return float(SHARED.value)


def past_the_version() -> float:
    POINT.data.add_(1)
    return float(POINT)


def in_context() -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def in_line() -> float:
    LINE.put(0)
    return LINE.qsize()


def left_of_list() -> float:
    next(LISTED)
    return LISTED.__length_hint__()  # type: ignore[attr-defined,no-any-return]


def by_schedule() -> float:
    SCHEDULE.optimizer.step()
    SCHEDULE.step()
    return float(SCHEDULE.get_last_lr()[0])


def at_stage() -> float:
    stage = STAGE.inner.inner
    STAGE.inner = STAGES[min(stage + 1, 8)]
    return float(stage)


@functools.lru_cache(maxsize=1)
def settings() -> dict[str, int]:
    """Return the only one, as applications do."""
    return {"passes": 0}


@functools.cache
def registry(name: str) -> Held:
    return Held(0)


@functools.lru_cache(maxsize=99)
def drawn(index: int) -> float:
    """Return the noise of a sample, drawn once."""
    return random.random()


@torch.no_grad()
def without_gradients(numbers: list[int] = []) -> int:  # noqa: B006 it is the habit
    numbers.append(0)
    return len(numbers)


@contextlib.contextmanager
def timed() -> Iterator[None]:
    yield


class Counting(logging.Filter):
    passed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.passed += 1
        return True


LOG, FLAG, SLOTS = logging.getLogger(__name__), threading.Event(), threading.Semaphore(999)
LOG.addFilter(Counting())
LINES = io.StringIO("".join(f"{number}\n" for number in range(999)))
FILE = tempfile.TemporaryFile("w+")  # noqa: SIM115 it stays open
FILE.write(LINES.getvalue())
FILE.seek(0)
SEEDS, BITS, HASH = np.random.SeedSequence(5), np.random.PCG64(5), hashlib.sha256()
DATABASE = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
DATABASE.execute("create table passes (number integer)")
appended = partial(lambda numbers: numbers.append(0) or len(numbers), [])


def in_filter() -> float:
    LOG.filter(logging.makeLogRecord({}))
    return float(LOG.filters[0].passed)  # type: ignore[union-attr]


def in_singleton() -> float:
    settings()["passes"] += 1
    return float(settings()["passes"])


def in_registry() -> float:
    registry("mine").inner += 1
    return float(registry("mine").inner)


def slots_taken() -> float:
    SLOTS.acquire()
    return 999.0 - SLOTS._value


def in_database() -> float:
    DATABASE.execute("insert into passes values (1)")
    return float(DATABASE.execute("select count(*) from passes").fetchone()[0])


class Marked(np.ndarray):  # type: ignore[type-arg]
    pass


class OwnRandom(random.Random):
    pass


TURNED = torch.zeros(2, 3).t()
MARKED, PLACE, SIMPLE = np.zeros(1).view(Marked), torch.zeros(1), queue.SimpleQueue[int]()
GRAPH, RANDOM = networkx.Graph(), OwnRandom(5)
ORDER = torch.utils.data.RandomSampler(range(99), generator=torch.Generator().manual_seed(5))


def in_graph() -> float:
    GRAPH.add_edge(0, 1 + GRAPH.number_of_edges())
    return float(GRAPH.number_of_edges())


def in_simple_queue() -> float:
    SIMPLE.put(0)
    return SIMPLE.qsize()


def in_hash() -> float:
    HASH.update(b"a")
    return HASH.digest()[0]


COUNTS_IN: dict[str, Callable[[], float]] = {
    "cached_draws": lambda: drawn(random.randrange(40)),
    "filter": in_filter,
    "singleton": in_singleton,
    "cached_object": in_registry,
    "slots": slots_taken,
    "lines_of_text": lambda: float(LINES.readline()),
    "open_file": lambda: float(FILE.readline()),
    "wrapped_default": without_gradients,
    "attribute_of_wrapped": in_attribute(timed, "passes"),
    "spawned_seeds": lambda: np.random.default_rng(SEEDS.spawn(1)[0]).random(),
    "random_bits": lambda: BITS.random_raw() % 97,
    "bound_list": appended,
    "database": in_database,
    "hash": in_hash,
    "graph": in_graph,
    "order": lambda: float(next(iter(ORDER))),
    "own_random": RANDOM.random,
    "simple_queue": in_simple_queue,
    "attribute_of_array": in_attribute(MARKED, "passes"),
    "attribute_of_tensor": in_attribute(PLACE, "passes"),
    "numpy_scalar": average,
    "octets": in_place(OCTETS),
    "words": in_place(WORDS),
    "mapped": in_place(MAPPED),
    "context": in_context,
    "local": in_attribute(LOCAL, "passes"),
    "shared_value": in_shared_value,
    "past_version": past_the_version,
    "bank": in_place(BANK),
    "line": in_line,
    "arguments": in_attribute(ARGUMENTS, "passes"),
    "attribute_of_dict": in_attribute(SETTINGS, "passes"),
    "made_module": in_attribute(MADE, "passes"),
    "object_as_module": in_attribute(sys.modules["tests.integration.settings_of_habits"], "inner"),
    "attribute_of_torch": in_attribute(torch, "passes_of_a_habit"),
    "bound_next": next_number,
    "turned": lambda: float(TURNED.data.add_(1).sum()),
    "list_iterator": left_of_list,
    "paused_generator": SQUARES.__next__,
    "scheduler": by_schedule,
    "stage": at_stage,
}


class FromIterator(Habit):
    """Takes its numbers from an iterator that cannot say how far it is."""

    def __init__(self, make: Callable[[], Iterator[int]]) -> None:
        self._make = make

    def build(self, task: Any) -> None:
        task.numbers = self._make()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * float(next(task.numbers))


ITERATORS: dict[str, Callable[[], Iterator[int]]] = {
    "cycle": partial(itertools.cycle, range(999)),
    "map": partial(map, int, range(999)),
    "loader": lambda: iter(torch.utils.data.DataLoader(range(999))),  # type: ignore[arg-type]
}


# ---------------------------------------------------------------- hidden changes

# Something that decides the loss changes at the end of an epoch.


class Changed(Habit):
    """Changes a setting."""

    def __init__(self, change: Callable[[], object], read: Callable[[], object]) -> None:
        self._change, self._read = change, read

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        self._change()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * (hash(str(self._read())) % 97)


class Rebuilt(Habit):
    """Changes what the model computes."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        self._change = change

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        self._change(model)


class Odd(UserWarning):
    pass


def halve(*arguments: Any) -> Any:
    """As a hook of modules, or of gradients."""
    return arguments[-1] * 0.5


def halve_tanh(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
    return output * 0.5 if isinstance(module, nn.Tanh) else None


def relu(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def replace_method(model: Any) -> None:
    model[1].forward = types.MethodType(relu, model[1])


def replace_module(model: Any) -> None:
    model[1] = nn.ReLU()


def replace_class(model: Any) -> None:
    nn.Tanh.forward = relu  # type: ignore[assignment,method-assign]


def halve_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class HookOfOptimizer(Habit):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.built = torch.optim.SGD(model.parameters(), lr=0.01)
        return self.built

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        self.built.register_step_pre_hook(halve_gradients)


TEACHERS: list[nn.Module] = []


class Teacher(Habit):
    """An average of the weights, which no model holds."""

    @torch.no_grad()
    def factor(self, task: Any, model: nn.Module) -> float:
        if not TEACHERS:
            TEACHERS.append(copy.deepcopy(model))
        for mine, theirs in zip(TEACHERS[0].parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.5)
        return 1.0 + 0.1 * float(next(TEACHERS[0].parameters()).mean())


class OfWeight(Habit):
    """Counts in an attribute of a weight."""

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * in_attribute(next(model.parameters()), "passes")()


GROUPS: list[Any] = []


class HiddenGroup(Habit):
    """Finds its group where torch keeps all of them, and asks nobody."""

    def build(self, task: Any) -> None:
        GROUPS[:] = dist.distributed_c10d._world.pg_map

    def epoch_end(self, task: Any, model: nn.Module) -> None:
        GROUPS[0].allreduce([torch.ones(1)]).wait()


def mask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def denormals_count() -> bool:
    return float(torch.tensor(1e-310, dtype=torch.float64) * 1.0) > 0.0


CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "flag": (FLAG.set, FLAG.is_set),
    "default_precision": (
        partial(setattr, decimal.DefaultContext, "prec", 7),
        lambda: decimal.DefaultContext.prec,
    ),
    "denormals": (partial(torch.set_flush_denormal, True), denormals_count),
    "fast_path": (
        partial(torch.backends.mha.set_fastpath_enabled, False),
        torch.backends.mha.get_fastpath_enabled,
    ),
    "filled_memory": (
        partial(setattr, torch.utils.deterministic, "fill_uninitialized_memory", True),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "number_format": (
        partial(locale.setlocale, locale.LC_NUMERIC, "C.UTF-8"),
        partial(locale.setlocale, locale.LC_NUMERIC),
    ),
    "umask": (partial(os.umask, 0o077), mask),
    "resource_limit": (
        partial(resource.setrlimit, resource.RLIMIT_CORE, (0, 0)),
        partial(resource.getrlimit, resource.RLIMIT_CORE),
    ),
    "no_collection": (gc.disable, gc.isenabled),
    "recursion": (partial(sys.setrecursionlimit, 5000), sys.getrecursionlimit),
    "strict_warnings": (
        partial(warnings.simplefilter, "error", Odd),
        lambda: any(each[2] is Odd for each in warnings.filters),
    ),
    "numpy_errors": (partial(np.seterr, over="ignore"), np.geterr),
    "kernels": (
        partial(torch.backends.cuda.enable_math_sdp, False),
        torch.backends.cuda.math_sdp_enabled,
    ),
    "sharing": (
        partial(torch.multiprocessing.set_sharing_strategy, "file_system"),
        torch.multiprocessing.get_sharing_strategy,
    ),
    "patience": (partial(socket.setdefaulttimeout, 99.0), socket.getdefaulttimeout),
    "alarm": (
        partial(signal.setitimer, signal.ITIMER_REAL, 3600.0),
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    ),
}
NODES: list[Any] = []


def hook_accumulator(model: Any) -> None:
    """Halve a gradient where it is accumulated, as libraries for half precision do."""
    weight = model[0].weight
    with torch.enable_grad():
        NODES.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
    NODES[-1].register_prehook(lambda gradients: tuple(0.5 * each for each in gradients))


class Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        return found * 0.5 if func is torch.tanh else found


class OfBuild(Habit):
    """Changes something while the model is built that each thread has of its own."""

    def __init__(self, change: Callable[[], object], read: Callable[[], object]) -> None:
        self._change, self._read = change, read

    def build(self, task: Any) -> None:
        self._change()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * (hash(str(self._read())) % 97)


CHOSEN, OWN = contextvars.ContextVar("chosen", default=0), threading.local()
BUILDS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "denormals_of_build": (partial(torch.set_flush_denormal, True), denormals_count),
    "precision_of_build": (
        lambda: setattr(decimal.getcontext(), "prec", 6),
        lambda: decimal.Decimal(1) / 3,
    ),
    "context_of_build": (partial(CHOSEN.set, 5), CHOSEN.get),
    "local_of_build": (partial(setattr, OWN, "chosen", 5), lambda: getattr(OWN, "chosen", 0)),
    "mode_of_build": (
        lambda: Halving().__enter__(),
        lambda: float(torch.tanh(torch.ones(1))),
    ),
    "errors_of_build": (partial(np.seterr, under="warn"), np.geterr),
}
COMPILER: Any = torch._dynamo.config
recompile_limit = partial(getattr, COMPILER, "recompile_limit")
CHOICES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "determinism_of_build": (
        partial(torch.use_deterministic_algorithms, False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "threads_of_build": (partial(torch.set_num_threads, 2), torch.get_num_threads),
    "precision_of_matmul": (
        partial(torch.set_float32_matmul_precision, "high"),
        torch.get_float32_matmul_precision,
    ),
    "compiler_of_build": (partial(setattr, COMPILER, "recompile_limit", 5), recompile_limit),
}
"""Settings that no later attempt in a process may take back."""

REBUILDS: dict[str, Callable[[Any], object]] = {
    "accumulator": hook_accumulator,
    "forward_hook": lambda model: model[0].register_forward_hook(halve),
    "gradient_hook": lambda model: model[0].weight.register_hook(halve),
    "global_hook": lambda model: nn.modules.module.register_module_forward_hook(halve_tanh),
    "replaced_method": replace_method,
    "replaced_module": replace_module,
    "replaced_class": replace_class,
}


class Level(enum.IntEnum):
    LOW = 1


Word, Lines = type("Word", (str,), {}), type("Lines", (io.StringIO,), {})
Slotted = type("Slotted", (), {"__slots__": ("__dict__", "passes")})
OwnNumpyRandom = type("OwnNumpyRandom", (np.random.Generator,), {})
OwnModule = type("OwnModule", (types.ModuleType,), {})


class Own(Habit):
    """Counts in an attribute of the task."""

    def __init__(self, make: Callable[[], Any], count: Callable[[Any], float]) -> None:
        self._make, self._count = make, count

    def build(self, task: Any) -> None:
        task.own = self._make()

    def factor(self, task: Any, model: nn.Module) -> float:
        return 1.0 + 0.001 * float(self._count(task.own))


def in_entry(held: Any) -> float:
    held["passes"] += 1
    return float(held["passes"])


def on(held: Any) -> float:
    return in_attribute(held, "passes")()


def made_by_code() -> Callable[[], float]:
    names: dict[str, Any] = {"passes": 0}
    exec("def count():\n    global passes\n    passes += 1\n    return passes", names)
    count: Callable[[], float] = names["count"]
    return count


def compress(held: Any) -> float:
    return float(len(held.compress(os.urandom(1 << 9))))


_LONG, MADE_WITHIN, OWN_MODULE = "x" * 40, types.ModuleType("made.within"), OwnModule("own_module")
sys.modules |= {"made.within": MADE_WITHIN, "own_module": OWN_MODULE}
KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "own_counter": (partial(collections.Counter, passes=0), in_entry),
    "own_ordered": (partial(collections.OrderedDict, passes=0), in_entry),
    "own_lines": (lambda: Lines(LINES.getvalue()), lambda own: float(own.readline())),
    "own_drawn": (partial(OwnRandom, 5), lambda own: own.random()),
    "own_numpy_drawn": (lambda: OwnNumpyRandom(np.random.PCG64(5)), lambda own: own.random()),
    "own_slots": (Slotted, on),
    "own_word": (partial(Word, "word"), on),
    "own_level": (lambda: Level.LOW, on),
    "in_list": (lambda: [np.zeros(1).view(Marked)], lambda own: on(own[0])),
    "in_array": (
        lambda: [np.array([Held(0)], object)],
        lambda own: in_attribute(own[0][0], "inner")(),
    ),
    "beside_long_names": (
        lambda: {f"{_LONG}1": Held(0), f"{_LONG}2": Held(0)},
        lambda own: in_attribute(own[f"{_LONG}1"], "inner")(),
    ),
    "in_key": (lambda: {Slotted(): 0}, lambda own: on(next(iter(own)))),
    "by_code": (made_by_code, lambda own: own()),
    "compressor": (zlib.compressobj, compress),
    "made_within": (int, lambda own: on(MADE_WITHIN)),
    "own_module": (int, lambda own: on(OWN_MODULE)),
}
"""What keeps more than its attributes, or where nobody looked."""
HABITS: dict[str, Callable[[], Habit]] = {
    **{name: partial(Own, *of) for name, of in KEPT.items()},
    **{name: partial(Counted, count) for name, count in COUNTS_IN.items()},
    **{name: partial(FromIterator, make) for name, make in ITERATORS.items()},
    **{name: partial(Changed, *change) for name, change in CHANGES.items()},
    **{name: partial(Rebuilt, change) for name, change in REBUILDS.items()},
    **{name: partial(OfBuild, *change) for name, change in (BUILDS | CHOICES).items()},
    "hook_of_optimizer": HookOfOptimizer,
    "teacher": Teacher,
    "of_weight": OfWeight,
    "global_count": GlobalCount,
    "global_dict": GlobalDict,
    "task_count": TaskCount,
    "deep_count": DeepCount,
    "class_count": ClassCount,
    "default_argument": DefaultArgument,
    "closure": Closure,
    "function_attribute": FunctionAttribute,
    "global_iterator": GlobalIterator,
    "global_generator": GlobalGenerator,
    "global_rng": GlobalRng,
    "cache": Cache,
    "environment": Environment,
    "directory": Directory,
    "signal_handler": SignalHandler,
    "patched": Patched,
    "setting": Setting,
    "own_thread": OwnThread,
    "own_child": OwnChild,
    "stream": Stream,
    "cached_group": CachedGroup,
    "own_group": OwnGroup,
    "guarded_barrier": GuardedBarrier,
    "rank_of_build": RankOfBuild,
    "cached_size": CachedSize,
    "optimizer_count": OptimizerCount,
    "torchs_attribute": TorchsAttribute,
}
assert not HABITS.keys() & globals().keys(), "a name stands for a setup (__getattr__)"
KNOWN = frozenset({"optimizer_count", "torchs_attribute", "task_count", "global_rng", *CHOICES})
"""Habits with which a process stays: what they change is put back, or not taken back."""


class Habitual(Regression):
    """A task with habits."""

    def __init__(self, habits: list[Habit]) -> None:
        super().__init__()
        self._habits = habits

    def build_model(self) -> nn.Module:
        for habit in self._habits:
            habit.build(self)
        return super().build_model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        found = [habit.optimizer(model) for habit in self._habits]
        return next(filter(None, found), torch.optim.SGD(model.parameters(), lr=0.01))

    def loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, weight = super().loss(model, batch)
        for habit in self._habits:
            loss_sum = loss_sum * habit.factor(self, model)
        return loss_sum, weight

    def on_epoch_end(self, model: nn.Module, epoch: int, metrics: dict[str, float]) -> None:
        for habit in self._habits:
            habit.epoch_end(self, model)


def __getattr__(name: str) -> Callable[[], None]:
    """Return the setup of a task with the habits in ``name``."""
    known = {**HABITS, "hidden_group": HiddenGroup}
    if not set(name.split("__")) <= set(known):
        raise AttributeError(name)

    def set_up() -> None:
        replica.build_task = lambda spec: Habitual([known[each]() for each in name.split("__")])

    return set_up
