"""What a task's methods return. An error names the file and line of the method."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from everstep.spec.sections import TrainSpec
from everstep.wire.events import PREFIX
from train_fn.checks.check import Moment, checked
from train_fn.errors import BadTask
from train_fn.step.untrained import require_saved
from train_fn.tasks.protocol import (
    LOSS,
    METHOD,
    MOST_VALUES,
    Sum,
    Task,
    has_loss,
    is_iterable,
    where,
)

_NAMES_SHOWN = 5


def checked_model(task: Task, model: Any) -> nn.Module:
    """Return what ``build_model`` returned. Raises BadTask if it is no module, has no parameters to
    train, or if its ``state_dict`` leaves out some of them."""
    if not isinstance(model, nn.Module):
        raise BadTask(
            f"{where(task, 'build_model')} must return a torch.nn.Module, not {_kind(model)}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadTask(
            f"{where(task, 'build_model')} returned a model of which no parameter requires a "
            "gradient; nothing would be trained"
        )
    require_saved(model, where(task, "build_model"))
    return model


def checked_datasets(task: Task, datasets: Any) -> dict[str, Any]:
    """Return what ``build_datasets`` returned. Raises BadTask if it is not ``{"train": …, "val":
    …}`` of data sets."""
    source = where(task, "build_datasets")
    if not isinstance(datasets, dict) or datasets.get("train") is None:
        raise BadTask(
            f'{source} must return {{"train": dataset, "val": dataset or None}}, not '
            f"{datasets!r:.200}"
        )
    unknown = sorted(str(name) for name in datasets if name not in ("train", "val"))
    if unknown:
        raise BadTask(f"{source} returned {', '.join(unknown)} beside train and val; leave it out")
    for name, dataset in datasets.items():
        if dataset is not None:
            _check_dataset(f"{source}: {name}", dataset)
    if _length(datasets["train"]) == 0:
        raise BadTask(f"{source} returned a train set of length 0; there is nothing to train on")
    return datasets


def epoch_length(source: str, dataset: Any, train: TrainSpec) -> int:
    """Return the samples in an epoch of iterable data: its length if it has one, else ``max_steps``
    in ``epochs`` equal parts.

    Raises BadTask if neither is known.
    """
    length = _length(dataset)
    if length is not None:
        return length
    if train.max_steps is None:
        raise BadTask(
            f"{source}: train ({_kind(dataset)}) is iterable and has no __len__; set "
            "train.max_steps, so that the run has an end "
            "(train.epochs then divides it into so many parts, each followed by an evaluation), "
            "or give it __len__"
        )
    return -(-train.max_steps // train.epochs) * train.global_batch_size


def _length(dataset: Any) -> int | None:
    """Return how many samples a data set reports."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _check_dataset(source: str, dataset: Any) -> None:
    refuse_batches(source, dataset, iterable=is_iterable(dataset))
    if is_iterable(dataset):
        _check_iterable(source, dataset)
        return
    lacking = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
    if lacking and not (lacking == ["__getitem__"] and hasattr(dataset, "fetch")):
        raise BadTask(
            f"{source} ({_kind(dataset)}) has no {' and no '.join(lacking)}; a data set says how "
            "long it is and gives sample i"
        )
    try:
        length = len(dataset)
    except TypeError as exc:
        raise BadTask(f"{source}: the length of {_kind(dataset)} is not known: {exc}") from exc
    assert length >= 0


def _check_iterable(source: str, dataset: Any) -> None:
    keeps, loads = (
        callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")
    )
    if keeps != loads:
        lacking = "load_state_dict" if keeps else "state_dict"
        raise BadTask(
            f"{source} ({_kind(dataset)}) has no {lacking}; a restart goes on from what the two "
            "of them keep"
        )
    if isinstance(dataset, Iterator) and not keeps:
        raise BadTask(
            f"{source} is {_kind(dataset)}, which is used up after one pass and cannot go back "
            "after a restart; give an object "
            "whose __iter__ begins anew each time, with state_dict and load_state_dict where "
            "reading again would take long"
        )


def checked_optimizer(
    task: Task, model: nn.Module, optimizer: Any, name: str = ""
) -> torch.optim.Optimizer:
    """Return an optimizer that ``build_optimizer`` returned. Raises BadTask if it would not change
    the model."""
    source = where(task, "build_optimizer") + (name and f", optimizer {name!r}:")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadTask(f"{source} must return a torch.optim.Optimizer, not {_kind(optimizer)}")
    # its class's own, since a scheduler wraps that of the object; that of LBFGS needs a closure
    if not _binds(type(optimizer).step, optimizer):
        raise BadTask(
            f"{source} returned {_kind(optimizer)}, whose step needs a closure that computes the "
            "loss again. Everstep computes the "
            "gradient of a global batch once, over all ranks, and calls step() without one: use "
            "SGD, Adam, AdamW or another that "
            "needs none"
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in held):
        raise BadTask(
            f"{source} returned an optimizer that holds no parameter of the model it was given; "
            "use model.parameters()"
        )
    foreign = sum(id(parameter) not in own for parameter in held)
    if foreign:
        raise BadTask(
            f"{source} returned an optimizer that holds {foreign} parameters which are not the "
            "model's: ranks would not agree on "
            "them, and no checkpoint would have them. Register them in the module that "
            "build_model returns"
        )
    return optimizer


def checked_scheduler(task: Task, optimizer: torch.optim.Optimizer, scheduler: Any) -> Any:
    """Return what ``build_scheduler`` returned. Raises BadTask if it cannot step once per step, or
    cannot be saved."""
    source = where(task, "build_scheduler")
    methods = ("step", "state_dict", "load_state_dict")
    lacking = [name for name in methods if not callable(getattr(scheduler, name, None))]
    if lacking:
        raise BadTask(
            f"{source} returned {_kind(scheduler)}, which has no {', '.join(lacking)}; return a "
            "scheduler of torch.optim.lr_scheduler"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise BadTask(
            f"{source} returned a scheduler of another optimizer; make it for the one that it is "
            "given"
        )
    if not _binds(scheduler.step):
        raise BadTask(
            f"{source} returned {_kind(scheduler)}, whose step needs arguments, for example a "
            "metric. Everstep calls step() once after each step of the optimizer: use a scheduler "
            "that follows the steps"
        )
    return scheduler


def _binds(function: Any, *arguments: Any) -> bool:
    """Return whether ``function`` can be called with these arguments, as far as is known."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # made by C code, which does not say what it takes
        return True
    return True


@checked(Moment.LOSS, cost="none")
def checked_loss(task: Task, answer: Any) -> tuple[torch.Tensor, Sum]:
    """Return what ``loss`` returned. Raises BadTask if it is not (0-d tensor, weight)."""
    if isinstance(answer, torch.Tensor):
        shape = "a 0-d tensor" if answer.ndim == 0 else f"a tensor of shape {tuple(answer.shape)}"
        raise BadTask(
            f"{where(task, 'loss')} must return (loss_sum, weight), not {shape}: the loss summed "
            "over the micro-batch, and how many "
            "samples or tokens that is, for example `return F.cross_entropy(logits, labels, "
            'reduction="sum"), len(labels)`'
        )
    if not (
        isinstance(answer, tuple)
        and len(answer) == 2
        and isinstance(answer[0], torch.Tensor)
        and answer[0].ndim == 0
    ):
        shown = tuple(
            f"tensor of shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else part
            for part in (answer if isinstance(answer, tuple) else (answer,))
        )
        raise BadTask(f"{where(task, 'loss')} must return (0-d tensor, weight), not {shown!r:.200}")
    weight = answer[1]
    if not isinstance(weight, int | float) and not (
        isinstance(weight, torch.Tensor) and weight.ndim == 0
    ):
        raise BadTask(
            f"{where(task, 'loss')} returned the weight {weight!r:.100}; it is a number or a 0-d "
            "tensor: samples or tokens"
        )
    return answer


@checked(Moment.FIRST_PASS, cost="none")
def check_moves(task: Task, loss_sum: torch.Tensor) -> None:
    """Raise BadTask for a loss that depends on no parameter."""
    if not loss_sum.requires_grad:
        raise BadTask(
            f"the loss moves no parameter: {where(task, 'loss')} returned one without a gradient. "
            "Look for .detach(), .item(), "
            "torch.no_grad() or numpy on the way from the model's output"
        )


@checked(Moment.FIRST_PASS, cost="three passes of the first micro-batch, once a run")
def check_sum(task: Task, step_module: nn.Module, batch: Any, num_samples: int) -> None:
    """Raise BadTask if ``loss`` returns a mean where it must return a sum: for a batch the mean of
    what it returns for its two halves. A batch that cannot be cut, or a model that makes no such
    pass in eval mode, is let be. What the passes change is put back by the caller.

    Args:
        step_module: (loss, weight) of a batch.
        batch: of ``num_samples`` samples, along the first dimension of its tensors.
    """
    half = num_samples // 2
    modes = [(module, module.training) for module in step_module.modules()]
    try:
        step_module.eval()
        with torch.no_grad():
            (whole, weight), *halves = (
                map(float, step_module(_cut(batch, num_samples, first, last)))
                for first, last in ((0, 2 * half), (0, half), (half, 2 * half))
            )
        (one, its_weight), (other, others_weight) = halves
    except Exception:  # the step itself will say it
        return
    finally:
        for module, mode in modes:
            module.training = mode
    total = its_weight + others_weight
    if not (0 < total < math.inf and math.isclose(weight, total)):
        return
    is_mean = math.isclose(whole, (one * its_weight + other * others_weight) / total, rel_tol=1e-4)
    if is_mean and not math.isclose(whole, one + other, rel_tol=0.1):
        raise BadTask(
            f"{where(task, LOSS)} returns the mean of a batch: {whole:.4g} for {2 * half} samples, "
            f"{one:.4g} and {other:.4g} for its halves. The gradient would be too small by the "
            "batch's weight. Return the sum and its weight, for example `return "
            'cross_entropy(output, target, reduction="sum"), len(target)`'
        )


def _cut(value: Any, num_samples: int, first: int, last: int) -> Any:
    """Return the samples from ``first`` to ``last`` of a batch. Raises ValueError if that is not
    known."""
    if isinstance(value, torch.Tensor) and value.dim() and len(value) == num_samples:
        return value[first:last]
    if isinstance(value, dict):
        return {name: _cut(each, num_samples, first, last) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_cut(each, num_samples, first, last) for each in value)
    raise ValueError(f"a {_kind(value)} is not a batch of {num_samples} samples")


@checked(Moment.FIRST_PASS, cost="none")
def uses_nothing(task: Task) -> BadTask:
    """Return the error for a loss that does not depend on the model."""
    return BadTask(
        f"the loss moves no parameter: {where(task, 'loss')} does not use the model that it was "
        "given"
    )


@checked(Moment.FIRST_PASS, cost="none")
def check_gradients(task: Task, model: nn.Module, *, may_be_unused: bool) -> None:
    """Raise BadTask if parameters had no part in the loss of a first backward pass.

    Args:
        may_be_unused: whether some may have none. All need one if the ranks could not agree on
            which have a gradient.
    """
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    unused = [name for name, parameter in trained if parameter.grad is None]
    if len(unused) == len(trained):
        raise uses_nothing(task)
    if unused and not may_be_unused:
        shown = ", ".join(unused[:_NAMES_SHOWN]) + (", …" if len(unused) > _NAMES_SHOWN else "")
        raise BadTask(
            f"{len(unused)} of {len(trained)} parameters have no part in the loss of "
            f"{where(task, 'loss')}: {shown}. Ranks add up "
            "gradients of all parameters: leave these out of the model, or set "
            "requires_grad=False on them; if later batches use "
            "them, set train.unused_parameters to allow, or add 0.0 * parameter.sum() to the loss"
        )


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


@checked(Moment.LOSS, cost="none")
def checked_values(task: Task, answer: Any) -> dict[str, torch.Tensor]:
    """Return the metrics that ``training_step`` returned, by name. Raises BadTask if they are no
    numbers."""
    source = where(task, METHOD)
    if answer is None:
        return {}
    named = answer if isinstance(answer, Mapping) else {LOSS: answer}
    values = {}
    for name, value in named.items():
        try:
            number = torch.as_tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError):
            number = torch.empty(0)
        if not isinstance(name, str) or number.numel() != 1:
            raise BadTask(
                f"{source} returned {value!r:.100} as {name!r}; return the loss, or metrics by "
                "name: numbers or 0-d tensors, each the mean over the batch"
            )
        values[name] = number.detach().reshape(())
    if len(values) > MOST_VALUES:
        raise BadTask(f"{source} returned {len(values)} metrics; return at most {MOST_VALUES}")
    return values


# ---------------------------------------------------------------- evaluation

# What the methods that measure return, and what a task without a loss in validation needs.

NO_LOSS = (
    "If the model has no loss in eval mode, measure it in metrics alone: set validation_loss = "
    "False on the task"
)


def measures_loss(task: Task) -> bool:
    """Return whether evaluation measures a loss: unless the task has none, or sets
    ``validation_loss = False`` because its model has none in eval mode.

    Raises BadTask for another value, and if nothing else is measured.
    """
    asked: Any = getattr(task, "validation_loss", True)
    name = type(task).__name__
    if not isinstance(asked, bool):
        raise BadTask(f"validation_loss of {name} is {asked!r:.100}; set it to True or False")
    measures: bool = asked and has_loss(task)
    if not measures and not callable(getattr(task, "metrics", None)):
        raise BadTask(
            f"{name} {'has no loss' if asked else 'sets validation_loss to False'} and has no "
            "method metrics, so that nothing is measured. Add metrics(model, batch), or let "
            "build_datasets return no val"
        )
    return measures


def require_measured(task: Task, best_metric: str) -> None:
    """Raise BadTask if ``best_metric`` is the loss of an evaluation that measures none."""
    wanted = best_metric.removeprefix("ema_").removeprefix(PREFIX)
    if wanted == "loss" and not measures_loss(task):
        raise BadTask(
            f"checkpoint.best_metric is {best_metric!r}, but {type(task).__name__} sets "
            "validation_loss to False: set best_metric to a name that "
            f"{where(task, 'metrics')} returns, or to null"
        )


# ---------------------------------------------------------------- batch objects

# Refuse data sets whose items are whole batches: a DataLoader, a sampler, or an iterable around
# one.

_LOADERS = frozenset(
    {
        "DataLoader",
        "DataLoader2",
        "StatefulDataLoader",
        "_BaseDataLoaderIter",
        "WebLoader",
        "_DaliBaseIterator",
        "DALIGenericIterator",
    }
)
"""Classes that yield batches, by name: most are of packages that need not be installed."""

_WAY_OUT = (
    "Everstep batches, shuffles and divides samples itself (train.global_batch_size, "
    "train.micro_batch_size) and reads them by "
    "processes of its own (train.loader). A collate_fn becomes the task's method collate"
)


@checked(Moment.BUILT, cost="the first item of iterable data that holds a DataLoader")
def refuse_batches(source: str, dataset: Any, *, iterable: bool) -> None:
    """Raise BadTask where ``dataset`` yields batches or indices instead of samples.

    Args:
        source: What made it, in words.
        dataset: What was returned as a data set.
        iterable: Whether it is read from one end to the other. What one that is read by index holds
            inside is its own business.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, list | tuple) and dataset and _is_loader(dataset[0]):
        first = type(dataset[0]).__name__
        raise BadTask(
            f"{source} is a {kind} of {first}: return torch.utils.data.ConcatDataset of their "
            f"data sets. {_WAY_OUT}"
        )
    if _is_loader(dataset):
        raise BadTask(
            f"{source} is a {kind}, which yields batches: return loader.dataset. {_WAY_OUT}"
        )
    if isinstance(dataset, Sampler) or hasattr(dataset, "batch_sampler"):
        raise BadTask(
            f"{source} is a {kind}, which gives indices and no samples: return the data set that "
            f"it draws from. {_WAY_OUT}"
        )
    held = vars(dataset).values() if iterable and hasattr(dataset, "__dict__") else ()
    loader = next((value for value in held if isinstance(value, DataLoader)), None)
    if loader is not None and _is_batch(_first_of(dataset), loader.batch_size):
        raise BadTask(
            f"{source} is a {kind} around a DataLoader, and its first item is a batch of "
            f"{loader.batch_size}: return the loader's "
            f"data set. {_WAY_OUT}"
        )


def _is_loader(value: Any) -> bool:
    return any(cls.__name__ in _LOADERS for cls in type(value).__mro__)


def _first_of(dataset: Any) -> Any:
    """Return the first item; None if reading it would consume it."""
    try:
        return next(iter(copy.deepcopy(dataset)), None)
    except Exception:
        return None if isinstance(dataset, Iterator) else next(iter(dataset), None)


def _is_batch(item: Any, size: int | None) -> bool:
    """Return whether all tensors of ``item`` have a first dimension of a loader's batch size."""
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in _tensors_in(item)}
    return size is not None and lengths == {size}


def _tensors_in(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, dict | list | tuple):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors_in(value)
