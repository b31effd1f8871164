"""Note what each step of a rank is made of, as lines of JSON, and die where a plan says so.

Two hooks of torch show any loop: one is called before an optimizer steps, one before a module is
called.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from train_fn.rehearsal.values import OwnValues, Source, generator_states, shown, text_of, values_in

Place = Literal["forward", "update", "commit"]
"""Where in a step something happens: when its first forward pass begins, between its backward pass
and its optimizer, right after its commit."""


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
        of, where = shown((args, named)), self._own.where(caller)
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
            state=values_in(self._source.state()),
            gradients=self._gradients(optimizer),
            draws=generator_states() if self._source.seeds_steps else {},
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
        self._write(kind="final", step=step, state=values_in(self._source.state()))

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
            names.get(id(weight), f"weight {number}"): text_of(weight.grad)
            for number, weight in enumerate(weights)
            if weight.grad is not None
        }
