"""Note what each step of a rank is made of, as lines of JSON, and die where a plan says so.

Two hooks of torch show any loop: one is called before an optimizer steps, one before a module is
called. What the state holds comes from the run; what only the user's code holds, from its frames,
modules and objects.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, GeneratorType, ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from train_fn.loop.training import RankProgress
from train_fn.own_loop import OwnLoop
from train_fn.protect.protected import Protected
from train_fn.rehearsal.comparison import COPIED
from train_fn.state.optim import each_of
from train_fn.state.tensor_tree import leaves
from train_fn.state.train_state import TrainState
from train_fn.step.fingerprints import local

Place = Literal["forward", "update", "commit"]
"""Where in a step something happens: when its first forward pass begins, between its backward pass
and its optimizer, right after its commit."""

_MOST_BYTES = 1 << 20
"""Largest tensor of a user's own objects that is digested."""
_MOST_ITEMS = 16
"""Longest list or dict of a user's own that is noted."""
_MOST_DEPTH = 2
"""Objects of the user's within each other whose attributes are read."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def steppers_of(state: TrainState) -> dict[str, Any]:
    """Return the run's optimizers and its scheduler, by the name to use for them."""
    optimizers = each_of(state.optimizer).items()
    found: dict[str, Any] = {f"optimizer {name}".strip(): each for name, each in optimizers}
    return found if state.scheduler is None else {**found, "scheduler": state.scheduler}


@dataclass(frozen=True)
class Orders:
    """What the ranks of an attempt do other than train."""

    last_step: int
    """Steps done at which every rank waits to be ended, with its state noted."""
    dies: tuple[int, int, Place] | None = None
    """(rank, steps done, place): that rank ends itself there by SIGKILL. After a commit, the steps
    include the committed one."""
    parks_at: int | None = None
    """Steps done at which every rank waits to be ended, before the next step."""

    @property
    def dies_at(self) -> int | None:
        """Return the steps done when ranks die."""
        return self.dies[1] if self.dies is not None else self.parks_at


class OfTask:
    """A task that Everstep's loop trains. What it draws shows in its gradients."""

    seeds_steps = False
    """Whether the generators' states follow from the step's number: not if steps that draw nothing
    leave them as they are."""

    def __init__(self, progress: RankProgress) -> None:
        self._progress = progress

    def step(self) -> int | None:
        """Return the steps done; None if no step is being made."""
        progress = self._progress
        if progress.training is None or progress.replica is None or progress.phase != "step":
            return None
        return progress.replica.state.step

    def steps_done(self) -> int | None:
        """Return the steps done, whatever happens now; None before anything is trained."""
        replica = self._progress.replica
        return None if replica is None else replica.state.step

    def ends_epoch(self) -> bool:
        assert self._progress.replica is not None
        state = self._progress.replica.state
        return state.step % state.steps_per_epoch == 0

    def state(self) -> dict[str, Any]:
        assert self._progress.replica is not None
        state = self._progress.replica.state
        return {
            "model": dict(state.model.state_dict()),
            "optimizer": state.optimizer.state_dict(),
            "scheduler": state.scheduler.state_dict() if state.scheduler else None,
            "extra/scaler": state.scaler.state_dict(),
            "extra/average": state.ema.state_dict() if state.ema else None,
            "extra/task": state.task,
        }

    def models(self) -> list[nn.Module]:
        assert self._progress.replica is not None
        return [self._progress.replica.state.model]

    def held_by(self) -> dict[str, Any]:
        assert self._progress.replica is not None
        replica = self._progress.replica
        return {"self": replica.parts.task, **steppers_of(replica.state)}


class OfLoop:
    """A loop of the user's own under ``es.protect``."""

    seeds_steps = True

    def __init__(self, present: OwnLoop) -> None:
        self._present = present

    def step(self) -> int | None:
        protection = self._present.protection
        return protection.step_number if protection is not None and protection.is_open else None

    def steps_done(self) -> int | None:
        protection = self._present.protection
        return None if protection is None else protection.step_number

    @property
    def _protected(self) -> Protected:
        assert isinstance(self._present.protection, Protected)
        return self._present.protection

    def ends_epoch(self) -> bool:
        return self._protected.ends_epoch

    def state(self) -> dict[str, Any]:
        parts = self._protected.parts
        return {
            "model": {
                prefix + name: value
                for prefix, model in parts.models.items()
                for name, value in model.state_dict().items()
            },
            "optimizer": {name: each.state_dict() for name, each in parts.optimizers.items()},
            **{
                name.replace(".", "/"): each.state_dict()
                for name, each in parts.others.items()
                if name not in parts.loaders
            },
        }

    def models(self) -> list[nn.Module]:
        return list(self._protected.parts.models.values())

    def held_by(self) -> dict[str, Any]:
        return {}


Source = OfTask | OfLoop
"""What is trained here."""


class Recorder:
    """Write what the steps of this rank are made of.

    Args:
        path: file to write to.
        rank: of this process.
        orders: where to die or wait.
        root: directory of the user's code.
        source: what is trained.
        wait: called where the ranks wait to be ended; does not return.
        settle: called before a death, to wait until the state of a step is saved.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        orders: Orders,
        root: Path,
        source: Source,
        wait: Callable[[str], None],
        settle: Callable[[int], None],
    ) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._rank, self._orders, self._source, self._wait = rank, orders, source, wait
        self._settle = settle
        self._own = OwnValues(root, source)
        self._depth = 0
        self._updated: int | None = None
        """Steps done when an optimizer was last about to step."""
        self._settled = 0
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_module_forward_pre_hook(self._before_call),
            register_module_forward_hook(self._after_call, always_call=True),
        ]

    def finish(self) -> None:
        """Note what the state holds: the code has come to its end by itself."""
        if self._source.steps_done() is not None:
            self._write_final()

    def close(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()
        self._file.close()

    def commit(self) -> None:
        """Note that a step was committed; its number is the source's."""
        step = self._source.steps_done()
        self._write(kind="commit", step=step, ends_epoch=self._source.ends_epoch())
        self._own.note_batches(sys._getframe(1))
        self._die("commit", step)

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1:
            return
        if not (module.training and torch.is_grad_enabled()):
            if (done := self._source.steps_done()) is not None:
                self._write(kind="evaluation", step=done)
            return
        if (step := self._source.step()) is None:
            return
        self._come_to(step)
        caller = sys._getframe(1)
        # torch's hook for all modules is not given them: they are those of its Module.__call__
        named = caller.f_locals.get("kwargs") or {}
        of, where = _sketches((args, named)), self._own.where(caller)
        carried, is_made = self._own.carried((args, named))
        self._write(kind="input", step=step, of=of, where=where, carried=carried, is_made=is_made)
        self._die("forward", step)

    def _after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)
            if self._depth == 0 and torch.is_grad_enabled():
                self._own.note_output(output)

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Note the update. One with a closure has its gradients once that has run."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._note_update(optimizer)
            return None

        def noted() -> Any:
            loss = closure()
            self._note_update(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": noted}

    def _note_update(self, optimizer: torch.optim.Optimizer) -> None:
        if (step := self._source.step()) is None:
            return
        self._come_to(step)
        frame = sys._getframe(1)
        self._write(
            kind="update",
            step=step,
            state=_values(self._source.state()),
            gradients=self._gradients(optimizer),
            draws=_generators() if self._source.seeds_steps else {},
            held=self._own.read(frame),
            where=self._own.where(frame),
            lines=self._own.new_lines(),
        )
        if self._updated != step:
            self._updated = step
            self._die("update", step)

    def _come_to(self, step: int) -> None:
        """Wait to be ended, if the orders say so at this step."""
        if step >= self._orders.last_step:
            self._write_final()
            self._wait("done")
        death = self._orders.dies_at
        if death is not None and death - 1 <= step <= death and step != self._settled:
            # twice: a write that is in progress keeps the next state from being saved
            self._settled = step
            self._settle(step)
        if step == self._orders.parks_at:
            self._wait("parked")

    def _die(self, place: Place, step: int | None) -> None:
        if self._orders.dies == (self._rank, step, place):
            os.kill(os.getpid(), signal.SIGKILL)

    def _write_final(self) -> None:
        step = self._source.steps_done()
        self._write(kind="final", step=step, state=_values(self._source.state()))

    def _write(self, **facts: Any) -> None:
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def _gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        names = {
            id(weight): name
            for model in self._source.models()
            for name, weight in model.named_parameters()
        }
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        return {
            names.get(id(weight), f"weight {number}"): _value(weight.grad)
            for number, weight in enumerate(weights)
            if weight.grad is not None
        }


class OwnValues:
    """Read what the user's code holds by itself: variables of its functions and modules, plain
    attributes of its objects and of the modules of its models, and copies of weights."""

    def __init__(self, root: Path, source: Source) -> None:
        self._root, self._source = f"{root.resolve()}{os.sep}", source
        self._known: dict[str, bool] = {}
        """Files, and whether they are the user's."""
        self._batches: list[tuple[str, torch.Tensor]] = []
        """Tensors that variables held at the newest commit."""
        self._made: list[torch.Tensor] = []
        """Tensors that models have returned since the commit before that one. While they are here,
        no other tensor takes their place in memory."""
        self._outputs: list[torch.Tensor] = []
        """Those since the newest commit."""
        self._lines: dict[str, int] = {}
        """Where what was read is assigned, by its name."""
        self._new_lines: dict[str, int] = {}

    def note_output(self, output: Any) -> None:
        """Note what a model has returned."""
        self._outputs += _tensors(output)

    def note_batches(self, frame: FrameType | None) -> None:
        """Note which tensors the variables of the loop hold, when a step is committed, and those of
        generators and objects of the user's, which may read ahead."""
        spaces = [(each.f_code.co_filename, each.f_locals) for each in self._frames(frame)]
        own = {name for name, module in list(sys.modules.items()) if self._is_own_module(module)}
        for each in gc.get_objects():
            if type(each) is GeneratorType:
                if each.gi_frame is not None and self._is_own(each.gi_code.co_filename):
                    spaces.append((each.gi_code.co_filename, each.gi_frame.f_locals))
            elif type(each).__module__ in own and not issubclass(type(each), nn.Module | type):
                spaces.append(("", getattr(each, "__dict__", {})))
        self._batches = [
            (self._with_line(file, name) if file else name, leaf)
            for file, names in spaces
            for name, value in list(names.items())
            if isinstance(value, torch.Tensor | list | tuple | dict)
            for leaf in _tensors(value)
        ]
        self._made, self._outputs = self._outputs, []

    def carried(self, args: Any) -> tuple[list[str], bool]:
        """Return the variables that held these arguments of a model at the newest commit, before
        their step began, and whether a model had made them, as a hidden state."""
        given = {_memory_of(leaf) for leaf in _tensors(args)}
        found = [(name, leaf) for name, leaf in self._batches if _memory_of(leaf) in given]
        made = {_memory_of(leaf) for leaf in self._made}
        is_made = [leaf.grad_fn is not None or _memory_of(leaf) in made for _, leaf in found]
        return list(dict.fromkeys(name for name, _ in found)), any(is_made)

    def new_lines(self) -> dict[str, int]:
        """Return where values are assigned that were read for the first time, by their names."""
        found, self._new_lines = self._new_lines, {}
        return found

    def _with_line(self, file: str, name: str) -> str:
        line = _assignments(file).get(name)
        return name if line is None else f"{name} ({self._short(file)}, line {line})"

    def where(self, frame: FrameType | None) -> str | None:
        """Return the innermost line of the user's code on this stack."""
        for each in self._frames(frame):
            return f"{self._short(each.f_code.co_filename)}, line {each.f_lineno}"
        return None

    def read(self, frame: FrameType | None) -> dict[str, str]:
        """Return values by name, such as ``train.py: main: best``."""
        spaces: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for module in list(sys.modules.values()):
            if self._is_own_module(module):
                file = str(module.__file__)
                spaces[self._short(file)] = file, vars(module)
        for each in self._frames(frame):
            name, path = each.f_code.co_name, each.f_code.co_filename
            file = self._short(path)
            is_module = each.f_locals is each.f_globals or name == "<module>"
            spaces[file if is_module else f"{file}: {name}()"] = path, each.f_locals
        if objects := self._source.held_by():
            spaces["the task"] = "", objects
        models = self._source.models()
        self._trained = {id(part) for model in models for part in model.modules()}
        shapes = [{each.shape for each in model.parameters()} for model in models]
        matrices = [{shape for shape in each if len(shape) > 1} for each in shapes]
        self._shapes = [each for each in matrices if each]
        found = {
            name: text
            for space, (file, names) in spaces.items()
            for own, value in list(names.items())
            if not own.startswith("__")
            for name, text in self._read(f"{space}: {own}", value, file, own)
        }
        for number, model in enumerate(models):
            name = f"model {number}" if number else "model"
            for inner, module in model.named_modules():
                found.update(self._attributes(f"{name}.{inner}".rstrip("."), module))
        return found

    def _read(
        self, name: str, value: Any, file: str, own: str, depth: int = 0
    ) -> Iterator[tuple[str, str]]:
        """Yield an object's text, or those of its attributes.

        Args:
            own: the last part of the name, as assignments in ``file`` have it.
        """
        text = self._copy_of_weights(value) or _own_value(value)
        if text is not None:
            line = _assignments(file).get(own)
            if line is not None and name not in self._lines:
                self._lines[name] = self._new_lines[name] = line
            yield name, text
        elif depth < _MOST_DEPTH and self._is_ours(type(value)) and id(value) not in self._trained:
            yield from self._attributes(name, value, depth + 1)

    def _attributes(self, name: str, value: Any, depth: int = 1) -> Iterator[tuple[str, str]]:
        """Yield what an object of the user's classes holds; of a module not what torch keeps."""
        if not self._is_ours(type(value)):
            return
        file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
        for attribute, inner in list(getattr(value, "__dict__", {}).items()):
            is_count = type(inner) in (int, float)
            if isinstance(value, nn.Module) and attribute.startswith("_") and not is_count:
                continue
            yield from self._read(f"{name}.{attribute}", inner, file, f".{attribute}", depth)

    def _copy_of_weights(self, value: Any) -> str | None:
        """Return a text for another model than those that are trained, for a gradient scaler, or
        for tensors with the shapes of a model's weights, as an average has; None for all else."""
        if isinstance(value, nn.Module):
            if any(id(part) in self._trained for part in value.modules()):
                return None
            tensors = [*value.parameters(), *value.buffers()]
        elif isinstance(value, torch.amp.GradScaler):
            return f"{COPIED} {value.state_dict()}"
        elif isinstance(value, torch.Tensor | list | tuple | dict):
            found = [leaf for _, leaf in leaves(_plain(value)) if isinstance(leaf, torch.Tensor)]
            shapes = {leaf.shape for leaf in found}
            tensors = found if any(each <= shapes for each in self._shapes) else []
        else:
            return None
        return f"{COPIED} {_of_bytes(''.join(map(_value, tensors)).encode())}" if tensors else None

    def _is_ours(self, kind: type) -> bool:
        module = sys.modules.get(kind.__module__)
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and self._is_own(file)

    def _frames(self, frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None:
            if self._is_own(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def _is_own_module(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and self._is_own(file)

    def _is_own(self, file: str) -> bool:
        if file not in self._known:
            is_own = file.startswith(os.sep) and self._full(file).startswith(self._root)
            self._known[file] = is_own
        return self._known[file]

    def _full(self, file: str) -> str:
        return str(Path(file).resolve())

    def _short(self, file: str) -> str:
        return self._full(file).removeprefix(self._root)


@cache
def _assignments(file: str) -> dict[str, int]:
    """Return the last line that assigns each variable of a file, and each attribute (``.name``)."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    stored = [each for each in ast.walk(tree) if isinstance(getattr(each, "ctx", None), ast.Store)]
    found = [
        (each.id if isinstance(each, ast.Name) else f".{each.attr}", each.lineno)
        for each in stored
        if isinstance(each, ast.Name | ast.Attribute)
    ]
    return dict(sorted(found, key=lambda each: each[1]))


def _own_value(value: Any) -> str | None:
    """Return a text for a small value of the user's; None for all else."""
    if isinstance(value, torch.Generator):
        return _value(value.get_state())
    if isinstance(value, random.Random):
        return _of_bytes(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return _of_bytes(repr(value.bit_generator.state).encode())
    if isinstance(value, ModuleType | type) or callable(value):
        return None
    if isinstance(value, torch.Tensor):
        return _value(value) if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, np.ndarray):
        return _of_bytes(value.tobytes()) if value.nbytes <= _MOST_BYTES else None
    if isinstance(value, str | bytes) and len(value) > 80:
        return None
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple | dict) and len(value) <= _MOST_ITEMS:
        found = list(leaves(value))
        plain = [leaf for _, leaf in found if isinstance(leaf, (*_PLAIN, torch.Tensor))]
        if found and len(plain) == len(found) <= _MOST_ITEMS:
            if not any(isinstance(leaf, torch.Tensor) for leaf in plain):
                return repr(value)
            return ", ".join(_value(leaf) for leaf in plain)
    return None


def _values(tree: Any) -> dict[str, str]:
    """Return every value of a state by its path."""
    return {
        path.replace("//", "/").removeprefix("/"): _value(leaf)
        for path, leaf in leaves(_plain(tree))
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value."""
    return [leaf for _, leaf in leaves(_plain(value)) if isinstance(leaf, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what is the same for a tensor and its ``detach()``; an empty one has no memory."""
    place = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return (place or id(tensor), tensor.shape)


def _plain(tree: Any) -> Any:
    """Return nested mappings as dicts, and sets as lists."""
    if isinstance(tree, Mapping):
        return {name: _plain(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value) for value in tree]
    return sorted(map(repr, tree)) if isinstance(tree, set | frozenset) else tree


def _value(leaf: Any) -> str:
    """Return a text that two values share if they are equal in every bit. Of a tensor that is
    sharded, this rank's part counts."""
    leaf = local(leaf)
    if isinstance(leaf, np.ndarray):
        return _of_bytes(leaf.tobytes())
    if not isinstance(leaf, torch.Tensor):
        # the default text of an object has its address, which differs in every process
        own = type(leaf).__mro__[:-1]
        has_text = isinstance(leaf, _PLAIN) or any("__repr__" in vars(base) for base in own)
        return repr(leaf) if has_text else f"a {type(leaf).__name__}"
    if leaf.layout is not torch.strided:
        leaf = leaf.to_dense()
    if leaf.numel() == 1:
        return repr(leaf.item())
    return _of_bytes(
        leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def _of_bytes(data: bytes) -> str:
    return "#" + hashlib.blake2b(data, digest_size=6).hexdigest()


def _sketches(args: Any) -> list[list[str]]:
    """Return the arguments of a model's call: each a digest and its first values."""
    found = []
    for _, leaf in leaves(_plain(args)):
        if isinstance(leaf, torch.Tensor):
            first = leaf.detach().reshape(-1)[:3].tolist()
            shown = ", ".join(f"{each:.4g}" for each in first)
            found.append([_value(leaf), f"{list(leaf.shape)} {shown}…"])
        else:
            found.append([_value(leaf), _value(leaf)[:40]])
    return found


def _generators() -> dict[str, str]:
    """Return the states of the global generators."""
    states = {
        "torch": _value(torch.get_rng_state()),
        "random": _of_bytes(repr(random.getstate()).encode()),
        "numpy": _of_bytes(repr(np.random.get_state()).encode()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = _value(torch.cuda.get_rng_state())
    return states
