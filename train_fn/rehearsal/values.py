"""Read what a rank holds: what the run's state has, and what only the user's code holds, in its
frames, modules and objects. Values become texts, which are equal if the values are in every bit.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import random
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from train_fn.loop.training import RankProgress
from train_fn.own_loop import OwnLoop
from train_fn.protect.protected import Protected
from train_fn.rehearsal.comparison import COPIED
from train_fn.state.optim import each_of
from train_fn.state.tensor_tree import leaves
from train_fn.state.train_state import TrainState
from train_fn.step.fingerprints import local

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
        return f"{COPIED} {_of_bytes(''.join(map(text_of, tensors)).encode())}" if tensors else None

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
        return text_of(value.get_state())
    if isinstance(value, random.Random):
        return _of_bytes(repr(value.getstate()).encode())
    if isinstance(value, np.random.Generator):
        return _of_bytes(repr(value.bit_generator.state).encode())
    if isinstance(value, ModuleType | type) or callable(value):
        return None
    if isinstance(value, torch.Tensor):
        return text_of(value) if value.nbytes <= _MOST_BYTES else None
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
            return ", ".join(text_of(leaf) for leaf in plain)
    return None


def values_in(tree: Any) -> dict[str, str]:
    """Return every value of a state by its path."""
    return {
        path.replace("//", "/").removeprefix("/"): text_of(leaf)
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


def text_of(leaf: Any) -> str:
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


def shown(args: Any) -> list[list[str]]:
    """Return the arguments of a model's call: each a digest and its first values."""
    found = []
    for _, leaf in leaves(_plain(args)):
        if isinstance(leaf, torch.Tensor):
            first = leaf.detach().reshape(-1)[:3].tolist()
            shown = ", ".join(f"{each:.4g}" for each in first)
            found.append([text_of(leaf), f"{list(leaf.shape)} {shown}…"])
        else:
            found.append([text_of(leaf), text_of(leaf)[:40]])
    return found


def generator_states() -> dict[str, str]:
    """Return the states of the global generators."""
    states = {
        "torch": text_of(torch.get_rng_state()),
        "random": _of_bytes(repr(random.getstate()).encode()),
        "numpy": _of_bytes(repr(np.random.get_state()).encode()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = text_of(torch.cuda.get_rng_state())
    return states
