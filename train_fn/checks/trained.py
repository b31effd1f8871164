"""What only Everstep's steps may change: trained parameters, their gradients, learning rates.
And samples, which nothing may.

DDP all-reduces, and the optimizer updates, the parameters that were there when the run was built. A
layer that is unfrozen later would never learn, without any error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from train_fn.checks.check import Check, Moment, checked
from train_fn.errors import BadTask, few
from train_fn.samples.loader import data_sets_in
from train_fn.state.contents import Sketch, alike, sketch
from train_fn.state.optim import Optimizers
from train_fn.step.fingerprints import local, word_sum
from train_fn.step.precision import modes_of
from train_fn.step.trial import ExtraStates, PlainAttributes, with_extra_state

_WATCHED_BYTES = 64 << 20

_PLAIN = {bool, int, float, str, tuple, type(None)}

_is_trained = operator.attrgetter("requires_grad")
_WAY_OUT = (
    "Build the model with everything that it will ever train, and let requires_grad be; to train "
    "other layers from some point on, "
    "start a new run with resume_from"
)


class TrainedParameters(Check):
    """Refuse another set of trained parameters than was built, in the model and in its
    optimizer."""

    costs = dict.fromkeys(
        (Moment.LOSS, Moment.AFTER_STEP, Moment.EPOCH_HOOK, Moment.LEAVING),
        "a comparison of flags and names",
    )

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | Optimizers) -> None:
        self._model, self._optimizer = model, optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameters = list(model.parameters())
        self._flags = list(map(_is_trained, self._parameters))
        self._frozen = [value for value in self._parameters if not value.requires_grad]
        self._held = _held(optimizer)
        held = {value for group in self._held for value in group}
        trained = [value for value in self._parameters if value.requires_grad]
        self.parameters = [value for value in trained if id(value) in held]
        """The parameters that a step changes."""
        self.idle = [value for value in trained if id(value) not in held]
        """Parameters that get gradients, but that the user's optimizer does not hold."""

    @property
    def with_gradient(self) -> list[nn.Parameter]:
        """Return the parameters that get gradients, also those that no step changes."""
        return [*self.parameters, *self.idle]

    def sums(self) -> list[int]:
        """Return the sum of the words of each trained parameter. A change of its values changes
        its sum, but for rare accidents."""
        return [word_sum(value) for value in self._trained_now()]

    def differing(self, one: list[int], other: list[int]) -> list[str]:
        """Return the names of trained parameters whose sums differ."""
        names = [self._names.get(id(value), "?") for value in self._trained_now()]
        return [name for name, a, b in zip(names, one, other, strict=True) if a != b]

    def sketches(self, names: Iterable[str]) -> dict[str, Sketch]:
        """Return sketches of the named parameters, to compare between ranks."""
        wanted = set(names)
        return {
            name: sketch(local(value))
            for value in self._trained_now()
            if (name := self._names.get(id(value), "?")) in wanted
        }

    def _trained_now(self) -> list[nn.Parameter]:
        return [
            value
            for value in self._parameters
            if value.requires_grad and value.layout is torch.strided and not is_lazy(value)
        ]

    def check_thawed(self) -> None:
        """Raise BadTask if a frozen parameter was unfrozen. Every step calls this, so it is
        cheap."""
        if any(map(_is_trained, self._frozen)):
            self.check_flags()

    def check_flags(self) -> None:
        """Raise BadTask if ``requires_grad`` of a parameter has changed."""
        if list(map(_is_trained, self._parameters)) == self._flags:
            return
        pairs = list(zip(self._parameters, self._flags, strict=True))
        thawed = [self._names[id(value)] for value, was in pairs if value.requires_grad and not was]
        frozen = [self._names[id(value)] for value, was in pairs if was and not value.requires_grad]
        said = [
            f"requires_grad of {few(names)} became {value}"
            for names, value in ((thawed, True), (frozen, False))
            if names
        ]
        raise BadTask(
            f"{' and '.join(said)} after the run was built: what is trained cannot change within "
            f"a run. {_WAY_OUT}"
        )

    def after(self, moment: Moment, source: str) -> None:
        try:
            self.check_flags()
        except BadTask as exc:
            raise BadTask(f"{source}: {exc}") from None
        now = {id(parameter): name for name, parameter in self._model.named_parameters()}
        if now != self._names:
            built, found = _by_name(self._names), _by_name(now)
            changed = [name for name in {**built, **found} if built.get(name) != found.get(name)]
            raise BadTask(
                f"{source} put other parameters in place of those that were built, or took some "
                f"away: {few(changed)}. The "
                "optimizer and the exchange between ranks still have the old ones; change values "
                "in place, by copy_(). "
                f"{_WAY_OUT}"
            )
        if _held(self._optimizer) != self._held:
            raise BadTask(
                f"{source} changed which parameters the optimizer holds: it had "
                f"{sum(map(len, self._held))} in {len(self._held)} "
                f"groups. {_WAY_OUT}"
            )


class WeightsKept(Check):
    """Refuse code that changes values of trained parameters."""

    costs = dict.fromkeys(
        (Moment.FIRST_PASS, Moment.TRIED, Moment.EVALUATED), "two reads of all weights"
    )

    def __init__(self, trained: TrainedParameters) -> None:
        self._trained = trained
        self._before: list[int] = []

    def before(self, moment: Moment) -> None:
        self._before = self._trained.sums()

    def after(self, moment: Moment, source: str) -> None:
        if not (names := self._trained.differing(self._before, self._trained.sums())):
            return
        if moment is Moment.FIRST_PASS:
            raise BadTask(
                f"{source} changes trained parameters: {few(names)}. A rank calls it once for each "
                "of its micro-batches, so ranks would train different models. Let the optimizer "
                "change them, or on_epoch_end"
            )
        raise BadTask(
            f"{source} changes trained parameters: {few(names)}. Each rank evaluates a part of the "
            "data, so ranks would train different models from then on. Work on a copy of the "
            "model, or change weights in on_epoch_end"
        )


class ModesKept(Check):
    """Refuse a training_step that leaves modules in another mode."""

    costs = dict.fromkeys((Moment.LOSS,), "a read of the modules' modes")

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: object = None

    def before(self, moment: Moment) -> None:
        self._before = modes_of(self._model)

    def after(self, moment: Moment, source: str) -> None:
        if modes_of(self._model) != self._before:
            raise modes_left(source)


class ExtraKept(Check):
    """Refuse training code that changes extra states of modules (``get_extra_state``)."""

    costs = dict.fromkeys((Moment.FIRST_PASS, Moment.LOSS), "copies of extra states")

    def __init__(self, model: nn.Module) -> None:
        self._modules = with_extra_state(dict(model.named_modules()))
        self._before = ExtraStates({})

    def before(self, moment: Moment) -> None:
        self._before = ExtraStates(self._modules)

    def after(self, moment: Moment, source: str) -> None:
        if names := [name or "the model" for name in self._before.changed()]:
            raise BadTask(
                f"{source} changes the extra state (get_extra_state) of {few(names)}. Each rank "
                "would have its own, and a failed step would leave its traces there. Keep it in a "
                "buffer, on which the ranks agree after every step, or change it in after_step or "
                "on_epoch_end"
            )


@checked(Moment.LOSS, cost="a read of the modules' modes")
def modes_left(source: str, why: str = "") -> BadTask:
    """Return the error for code that leaves modules in another mode."""
    return BadTask(
        f"{source} left modules in another mode, train or eval, than before. {why}Put the mode "
        "back before it returns, or change it in on_epoch_end"
    )


@checked(Moment.FIRST_PASS, cost="zeros for the first 64 MiB of gradients")
class GradientWatch:
    """Detect whether a forward pass changes gradients. Those of a rank's earlier micro-batches
    would be lost, so that results would depend on the world size."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the gradients of parameters to zero tensors, up to ``_WATCHED_BYTES`` in all."""
        self._watched: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        left = _WATCHED_BYTES
        for parameter in parameters:
            if parameter.nbytes <= left:
                left -= parameter.nbytes
                parameter.grad = gradient = torch.zeros_like(parameter)
                self._watched.append((parameter, gradient, gradient._version))

    def require_untouched(self, source: str) -> None:
        """Remove these gradients. Raise BadTask if ``source`` changed one."""
        touched = False
        for parameter, gradient, version in self._watched:
            touched |= parameter.grad is not gradient or gradient._version != version
            parameter.grad = None
        if touched:
            raise BadTask(
                f"{source} changes gradients, by zero_grad() or a backward of its own: those of "
                "earlier micro-batches of the step would be lost. Leave gradients alone, and "
                "return all that is to be minimised as the loss"
            )


@checked(Moment.STEP, cost="a comparison of numbers")
class LearningRates:
    """Set the learning rates by the run's schedule or the task's scheduler, and refuse changes by
    other code."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Optimizers,
        source: str,
        scheduler: Any | None = None,
    ) -> None:
        """Wrap an optimizer. ``source`` names the code that built it, for errors."""
        self._optimizer, self._source, self._scheduler = optimizer, source, scheduler
        self._set: list[float | None] | None = None
        self._options: list[dict[str, Any]] | None = None

    def note_options(self) -> None:
        """Remember the other options of the parameter groups, which the optimizer's own step and
        ``on_epoch_end`` may change."""
        self._options = _plain_options(self._optimizer)

    def check_options(self) -> None:
        """Raise BadTask if another option changed since ``note_options``, so in ``loss``."""
        now = _plain_options(self._optimizer)
        if self._options is None or now == self._options:
            return
        names = {
            name
            for was, new in zip(self._options, now, strict=False)
            for name in {**was, **new}
            if was.get(name) != new.get(name)
        }
        raise BadTask(
            f"loss changed options of the optimizer: {few(sorted(names)) or 'its groups'}. Each "
            "rank calls loss another number of times, so ranks would train different models. "
            f"The optimizer is from {self._source}. Change its options in on_epoch_end, or in a "
            "hook of the optimizer's step"
        )

    def set(self, factor: float) -> float | None:
        """Scale the peak learning rate of every parameter group for this step. Return the first
        group's learning rate; None if the optimizer computes its own, as Adafactor can.

        Raise BadTask if a schedule is to scale what the optimizer computes.
        """
        for number, group in enumerate(self._optimizer.param_groups):
            peak = group.setdefault("initial_lr", group["lr"])
            if peak is not None:
                group["lr"] = peak * factor
            elif factor != 1.0:
                raise BadTask(
                    f"parameter group {number} of the optimizer has no learning rate (lr=None): it "
                    "computes its own, which the spec's schedule cannot scale. Remove schedule "
                    f"from the spec, or give it a rate. The optimizer is from {self._source}"
                )
        self._set = self._rates()
        return self.present()

    def present(self) -> float | None:
        """Return the first group's learning rate; None if the optimizer computes its own."""
        rate = self._optimizer.param_groups[0]["lr"]
        return None if rate is None else float(rate)

    def _rates(self) -> list[float | None]:
        """Return the rate of each group that Everstep or a scheduler sets; None for others."""
        return [
            None if group.get("initial_lr", group["lr"]) is None else group["lr"]
            for group in self._optimizer.param_groups
        ]

    def tick(self) -> None:
        """Let the task's scheduler take its step. Raise BadTask if other code changed a rate."""
        assert self._scheduler is not None
        self.check()
        self._scheduler.step()
        self._set = self._rates()

    def check(self) -> None:
        """Raise BadTask if a learning rate is not the one that was set last."""
        if self._set is None:
            return
        now = self._rates()
        if now == self._set:
            return
        pairs = enumerate(zip(now, self._set, strict=False))
        said = [
            f"that of parameter group {number} is {value}, not {was}"
            for number, (value, was) in pairs
            if value != was
        ]
        what = f"{few(said) or 'there are other parameter groups'}. The optimizer is "
        if self._scheduler is not None:
            raise BadTask(
                f"a learning rate was changed past the scheduler of build_scheduler: {what}"
                f"from {self._source}. Everstep calls the scheduler's step() once after each step. "
                "Remove what else changes a rate, and let the scheduler compute it"
            )
        raise BadTask(
            f"a learning rate was changed past the spec: {what}"
            f"from {self._source}. Everstep sets every learning rate before each step, so that a "
            "step's is the same after a "
            "restart: remove the scheduler, or what else changes it in a hook or in loss, and use "
            "schedule: in the spec, or build_scheduler in the task"
        )


@checked(Moment.BUILT, cost="none")
def check_no_scheduler(optimizer: torch.optim.Optimizer | Optimizers, source: str) -> None:
    """Raise BadTask if a torch scheduler was created for a new optimizer."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise BadTask(
            f"{source} made a scheduler for its optimizer. Everstep sets every learning rate "
            "before each step, so that a step's is "
            "the same after a restart: remove the scheduler and use schedule: in the spec, or "
            "return the scheduler from build_scheduler(optimizer, total_steps)"
        )


def _plain_options(optimizer: torch.optim.Optimizer | Optimizers) -> list[dict[str, Any]]:
    """Return the options of each parameter group that are plain values, without its learning
    rate."""
    return [
        {name: value for name, value in group.items() if name != "lr" and type(value) in _PLAIN}
        for group in optimizer.param_groups
    ]


def _held(optimizer: torch.optim.Optimizer | Optimizers) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _by_name(names: dict[int, str]) -> dict[str, int]:
    return {name: number for number, name in names.items()}


# ---------------------------------------------------------------- samples

# Each rank, and each loader process, would train on changes of its own.

Batches = Callable[[], Generator[tuple[int | None, Any]]]


@checked(Moment.FIRST_PASS, Moment.TRIED, cost="a fingerprint of one batch")
def require_samples_kept(
    source: str, loaded: Sketch, batch: Any, read: Callable[[], Sketch]
) -> None:
    """Raise BadTask if code has changed ``batch`` in place, and the data set along with it.

    Args:
        source: name of the code.
        loaded: sketch of the batch as it was loaded.
        read: reads the same samples again.
    """
    if alike(loaded, sketch(batch)):
        return
    # Read twice: a data set that draws from a generator of its own is never the same.
    again, once_more = read(), read()
    if alike(again, once_more) and not alike(again, loaded):
        raise BadTask(
            f"{source} changes its batch in place, and with it the samples: "
            "the batch shares memory with the data set. Work on a copy, x = x.clone(), or copy "
            "samples in collate"
        )


def with_samples_kept(source: str, read: Batches) -> Generator[tuple[int | None, Any]]:
    """Yield what ``read`` yields, and require of each batch that its samples are kept."""
    with closing(read()) as batches:
        for number, batch in batches:
            loaded = sketch(batch)
            yield number, batch
            require_samples_kept(source, loaded, batch, lambda: _sketch_of_first(read))


def _sketch_of_first(read: Batches) -> Sketch:
    with closing(read()) as batches:
        return sketch(next(batches)[1])


class DataKept(Check):
    """Refuse an ``on_epoch_end`` that changes the training data."""

    costs = dict.fromkeys((Moment.EPOCH_HOOK,), "a copy of the data sets' plain attributes")

    def __init__(self, train_set: Any) -> None:
        self._root = getattr(train_set, "dataset", train_set)
        self._before = PlainAttributes({})

    def before(self, moment: Moment) -> None:
        found = [e for e in data_sets_in(self._root, set()) if not hasattr(e, "set_epoch")]
        self._before = PlainAttributes({type(each).__name__: each for each in found})

    def after(self, moment: Moment, source: str) -> None:
        if changed := self._before.changed():
            raise BadTask(
                f"{source} changes {few(changed)} of the training data: "
                "loader processes have copies of their own, and a restart begins with the first "
                "values. Give the data set a method set_epoch(epoch) that makes what the epoch "
                "needs; it is called in every process that reads"
            )
