"""What the code of a loop carries from step to step in variables of its own.

No state holds them, and nothing but a look at the code and at its variables shows them: an average
of the loss, the patience of an early stopping, a count. After a restart they begin anew.
"""

from __future__ import annotations

import ast
import logging
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from train_fn.checks.check import Check, Moment
from train_fn.state.contents import few
from train_fn.step.place_watch import is_users
from train_fn.step.plain_attributes import PlainAttributes, generator_text
from train_fn.step.untrained import marks_of

if TYPE_CHECKING:
    from train_fn.protect.loop_state import LoopState

_COMMITS = 2
"""First commits at which the code is looked at."""

_MOST_PARTS, _MOST_BYTES = 256, 1 << 20
"""Containers of more are not copied to see whether they change."""

logger = logging.getLogger(__name__)


class CarriedWatch(Check):
    """Warn once of variables that a loop carries from step to step, and of objects in them that it
    changes. Those that are part of the state are left out."""

    costs = dict.fromkeys((Moment.STEP,), "a look at the loop's code, in two steps and an epoch")

    def __init__(self, state: LoopState) -> None:
        self._state, parts = state, state.parts
        self._held = {id(each) for each in (*parts.others.values(), *parts.models.values())}
        owned = (part for each in (*parts.wrapped, *parts.modules()) for part in each.modules())
        self._held |= {id(each) for each in (*owned, *parts.optimizers.values())}
        self._followed = {id(getattr(each, "loader", each)) for each in parts.others.values()}
        self._noted: PlainAttributes | None = None
        self._counts: dict[str, Any] = {}
        self._num_commits = 0
        self._has_ended = self._was_at_end = False
        self._named: set[str] = set()

    def after(self, moment: Moment, source: str) -> None:
        """Look at the code that commits: at the first commits, and once an epoch has ended."""
        self._num_commits += 1
        is_due = self._num_commits <= _COMMITS or (self._has_ended and not self._was_at_end)
        self._was_at_end |= self._has_ended
        self._has_ended = self._state.ends_epoch
        if not is_due:
            return
        stack = [frame for frame, _ in walk_stack(sys._getframe())]
        frames = [each for each in stack if _is_of_user(each.f_code.co_filename)]
        if self._num_commits == 1:
            found = [name for each in frames for name in self._carried(each)]
            self._warn_of_loaders(frames)
            self._note(frames)
        else:
            found = (self._noted.changed() if self._noted else []) + self._changed_counts(frames)
        if self._was_at_end:
            self._noted = None
        if new := sorted({*found} - self._named):
            self._named.update(new)
            logger.warning(
                "the loop carries %s from step to step, which no checkpoint holds: after a restart "
                "they begin as the code before the loop makes them. That is harmless where they "
                "are only printed. Take a count of steps from state.step_number, and pass an "
                "object with state_dict() and load_state_dict() that keeps the rest as "
                "es.protect(extra=…)",
                few(new),
            )

    def _carried(self, frame: FrameType) -> list[str]:
        tree = _tree_of(frame.f_code.co_filename)
        names = carried(tree, frame.f_lineno) if tree is not None else set()
        return [name for name in names if not self._is_known(frame.f_locals.get(name))]

    def _warn_of_loaders(self, frames: Iterable[FrameType]) -> None:
        names = sorted(
            name
            for frame in frames
            if (tree := _tree_of(frame.f_code.co_filename)) is not None
            for name in iterated(tree, frame.f_lineno)
            if self._is_unknown_loader({**frame.f_globals, **frame.f_locals}.get(name))
        )
        if names:
            logger.warning(
                "the loop reads %s beside its state, so a restart reads it from the beginning. "
                "Read it by one = es.loader(…), pass that as es.protect(extra={'one': one}), and "
                "iterate one.batches(state)",
                few(names),
            )

    def _is_unknown_loader(self, value: Any) -> bool:
        """Return whether this is a loader, or an iterator that lives on over steps, of which no
        state knows."""
        is_iterator = isinstance(value, _BaseDataLoaderIter | cycle)
        return is_iterator or (isinstance(value, DataLoader) and id(value) not in self._followed)

    def _is_known(self, value: Any) -> bool:
        """Return whether a value is part of the state, or none that counts."""
        return id(value) in self._held or isinstance(
            value, nn.Module | torch.optim.Optimizer | ModuleType | type | FunctionType
        )

    def _variables(self, frame: FrameType) -> dict[str, Any]:
        """Return the variables of a frame, and those that functions there, hooks on weights and
        modules, and schedulers have of their own, by name."""
        parts, found = self._state.parts, {**frame.f_globals, **frame.f_locals}
        owners = (each for model in parts.models.values() for each in model.modules())
        places = [getattr(each, "_backward_hooks", None) for each in parts.parameters()]
        places += [hooks for each in owners for key, hooks in vars(each).items() if "_hooks" in key]
        hooks = [hook for place in places if isinstance(place, dict) for hook in place.values()]
        calls = [call for each in parts.others.values() for call in getattr(each, "lr_lambdas", ())]
        return {**_own_variables([*hooks, *calls, *found.values()]), **found}

    def _note(self, frames: Iterable[FrameType]) -> None:
        """Copy what the variables of the loop hold, to see what it changes in place."""
        held, owners = SimpleNamespace(), dict[str, object]()
        for frame in frames:
            for name, value in self._variables(frame).items():
                is_owner = isinstance(value, nn.Module | torch.amp.GradScaler | type)
                is_own = is_owner or _is_own_object(value)
                is_owner |= isinstance(value, torch.optim.Optimizer)
                is_own |= _is_small(value) or generator_text(value) is not None
                if is_own and self._may_count(name, value):
                    (owners if is_owner else vars(held)).setdefault(name, value)
            self._counts.update(self._counts_of(frame))
        self._noted = PlainAttributes({"": held, **owners})

    def _may_count(self, name: str, value: Any) -> bool:
        """Return whether a variable is neither of the state, nor of a library."""
        is_of_library = isinstance(value, type) and not _is_of_user(file_of(value))
        return not name.startswith("__") and id(value) not in self._held and not is_of_library

    def _counts_of(self, frame: FrameType) -> dict[str, Any]:
        """Return the numbers that functions and their module hold, and marks of the tensors of
        other models. At its top a module's are those of the loop."""
        found = self._variables(frame)
        inner = found.keys() - frame.f_locals.keys()
        return {
            name: marks_of([*each.parameters(), *each.buffers()]) if is_model else each
            for name, each in found.items()
            if ((is_model := isinstance(each, nn.Module)) and self._may_count(name, each))
            or (name in inner and type(each) in (int, float))
        }

    def _changed_counts(self, frames: Iterable[FrameType]) -> list[str]:
        """Return the names of such numbers and models that have changed."""
        now = {name: value for frame in frames for name, value in self._counts_of(frame).items()}
        return [name for name, value in self._counts.items() if now.get(name, value) != value]


def _own_variables(values: Iterable[Any]) -> dict[str, Any]:
    """Return the variables that the user's among these functions keep from call to call: of the
    functions around them, and their own attributes."""
    every = [(each, each.__code__) for each in values if isinstance(each, FunctionType)]
    own = [(each, code) for each, code in every if _is_of_user(code.co_filename)]
    names = (name for _, code in own for name in code.co_freevars)
    cells = (cell for each, _ in own for cell in each.__closure__ or ())
    return {
        **{f"{each.__name__}()": vars(each) for each, _ in own},
        **{at: each.cell_contents for at, each in zip(names, cells, strict=True) if is_full(each)},
    }


def _is_small(value: Any) -> bool:
    """Return whether this is a container that a copy of costs nothing."""
    if type(value) not in (list, dict, set, deque):
        return False
    parts = islice(value.values() if isinstance(value, dict) else value, _MOST_PARTS)
    return sum(each.nbytes for each in parts if isinstance(each, torch.Tensor)) <= _MOST_BYTES


def _is_own_object(value: Any) -> bool:
    """Return whether this is an object of a class of the user's that may count: data and modules
    are looked at elsewhere."""
    kind = type(value)  # calls no code of the object's, as its own attributes may
    return (
        kind.__dictoffset__ != 0
        and not issubclass(kind, nn.Module | Dataset | DataLoader | type)
        and not issubclass(kind, ModuleType | FunctionType)
        and _is_of_user(file_of(kind))
    )


def _is_of_user(file: str) -> bool:
    """Return whether a file is neither of Python, nor installed, nor ours."""
    return file.endswith(".py") and "site-packages" not in file and is_users(file)


@cache
def _tree_of(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def carried(tree: ast.Module, line: int) -> set[str]:
    """Return the variables that loops around a line hand from one round to the next: those that a
    round reads before it assigns them; and a count by ``enumerate``, which begins at 0 again."""
    found = set[str]()
    for loop in _loops_around(tree, line):
        stored, exposed = set[str](), set[str]()
        for name, is_stored in _uses(loop):
            if is_stored:
                stored.add(name)
            elif name not in stored:
                exposed.add(name)
        found |= stored & exposed
        call = getattr(loop, "iter", None)
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "enumerate":
            counts = [each.id for each in _names(getattr(loop, "target", loop))[:1]]
            read = {name for each in loop.body for name, is_stored in _uses(each) if not is_stored}
            found |= {*counts} & read if len(call.args) == 1 and not call.keywords else set()
    return found


def iterated(tree: ast.Module, line: int) -> set[str]:
    """Return the variables that loops around a line iterate, or from which they take the next."""
    taken = [
        part
        for loop in _loops_around(tree, line)
        for node in ast.walk(loop)
        for part in (
            [node.iter]
            if node is loop and isinstance(node, ast.For)
            else node.args[:1]
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "next"
            else []
        )
    ]
    return {each.id for part in taken for each in _names(part)}


_OWN_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _loops_around(node: ast.AST, line: int) -> list[ast.For | ast.While]:
    """Return the loops around a line, from the outermost on, of the innermost function that has
    it."""
    found = list[ast.For | ast.While]()
    for child in ast.iter_child_nodes(node):
        first = getattr(child, "lineno", line)
        if first <= line <= (getattr(child, "end_lineno", None) or line):
            inner = _loops_around(child, line)
            is_loop = isinstance(child, ast.For | ast.While)
            found += [child, *inner] if is_loop else inner  # type: ignore[list-item]
            if isinstance(child, _OWN_SCOPES):
                return inner
    return found


def _uses(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names that a statement reads, and those that it assigns (True), in the order in
    which it does so."""
    if isinstance(node, ast.Name):
        yield node.id, not isinstance(node.ctx, ast.Load)
    if isinstance(node, _OWN_SCOPES):
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, False
    own = set[str]()
    if isinstance(node, _COMPREHENSIONS):
        own = {each.id for part in node.generators for each in _names(part.target)}
    first = getattr(node, "value", None) or getattr(node, "iter", None)
    parts = [each for each in ast.iter_child_nodes(node) if each is not first]
    for part in (first, *parts) if isinstance(first, ast.AST) else parts:
        yield from (each for each in _uses(part) if each[0] not in own)


def _names(node: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name)]


def file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that was not set yet
        return False
