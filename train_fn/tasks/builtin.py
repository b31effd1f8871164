"""The built-in tasks, image classification and language modeling; and the task that a spec names,
which may be a user's."""

from __future__ import annotations

import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn

from everstep.spec.code import CodeSpec
from everstep.spec.run_spec import RunSpec
from everstep.spec.tasks import ImageClassificationSpec, LanguageModelingSpec, TorchvisionModelSpec
from train_fn.data.image_sets import build_image_data
from train_fn.data.images import ImageBatch, ImageSet
from train_fn.data.text_files import PackedText, load_text_files
from train_fn.errors import BadTask
from train_fn.models import TORCHVISION_CHANNELS, Gpt, build_image_model
from train_fn.recovery.error_text import ended_program
from train_fn.tasks.protocol import Task, makes_own_steps
from train_fn.user_code.modules import load_named, place_of

_FEW_CLASSES = 10
"""Up to so many, five guesses say little."""


class ImageClassification:
    """Reports ``loss`` (without label smoothing), ``accuracy`` and, of more than ten classes,
    ``top5_accuracy`` of validation."""

    def __init__(self, spec: ImageClassificationSpec) -> None:
        self.spec = spec
        self.data = build_image_data(spec.data)
        torchvision = spec.model if isinstance(spec.model, TorchvisionModelSpec) else None
        self._channels = self.data.channels if torchvision is None else TORCHVISION_CHANNELS
        self._resize_to = torchvision.args.image_size if torchvision else None
        self._scale_and_shift: tuple[torch.Tensor, torch.Tensor] | None = None

    def build_model(self) -> nn.Module:
        model = build_image_model(
            self.spec.model,
            in_channels=self._channels,
            num_classes=self.data.num_classes,
            image_size=self.data.image_size,
        )
        # Channels innermost: convolutions are about a fifth faster on CPUs, more in half precision
        # on GPUs.
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def build_datasets(self) -> dict[str, ImageSet | None]:
        return {"train": self.data.train, "val": self.data.val}

    def loss(self, model: nn.Module, batch: ImageBatch) -> tuple[torch.Tensor, int]:
        images, labels = batch
        logits = model(self._prepare(images))
        return F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self.spec.label_smoothing
        ), len(labels)

    def metrics(self, model: nn.Module, batch: ImageBatch) -> dict[str, tuple[torch.Tensor, int]]:
        images, labels = batch
        logits = model(self._prepare(images))
        sums = {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (logits.argmax(dim=1) == labels).sum(),
        }
        if self.data.num_classes > _FEW_CLASSES:
            sums["top5_accuracy"] = (logits.topk(5, dim=1).indices == labels[:, None]).sum()
        return {name: (total, len(labels)) for name, total in sums.items()}

    def _normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Bytes from 0 to 255 as float32, each channel with mean 0 and standard deviation 1 over
        the data set."""
        if self._scale_and_shift is None or self._scale_and_shift[0].device != images.device:
            channels = self.data.bytes_as
            assert channels is not None
            mean, std = (
                torch.tensor(values, device=images.device).view(-1, 1, 1)
                for values in (channels.mean, channels.std)
            )
            self._scale_and_shift = (1 / (255 * std), mean / std)
        scale, offset = self._scale_and_shift
        return images.float().mul_(scale).sub_(offset)

    def _prepare(self, images: torch.Tensor) -> torch.Tensor:
        """Bytes become numbers; grey images get the channels, and all the size, that the model
        expects."""
        if images.dtype == torch.uint8:
            images = self._normalise(images)
        if images.shape[1] != self._channels:
            images = images.expand(-1, self._channels, -1, -1)
        if self._resize_to is not None and images.shape[-1] != self._resize_to:
            images = F.interpolate(images, size=self._resize_to, mode="bilinear", antialias=True)
        return images.contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------- language modeling

# Next-token prediction over text.


class LanguageModeling:
    """Batches are int64 [n, context_length + 1]. Losses are sums over tokens, in nats;
    exp(``loss``) is the perplexity."""

    def __init__(self, spec: LanguageModelingSpec) -> None:
        self.spec = spec
        self.data = load_text_files(spec.data.args, spec.model.args.context_length)
        self.tokens_per_sample = spec.model.args.context_length

    def build_model(self) -> nn.Module:
        return Gpt(self.spec.model.args, self.data.vocabulary)

    def build_datasets(self) -> dict[str, PackedText | None]:
        return {"train": self.data.train, "val": self.data.val}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = model(batch[:, :-1])
        return _cross_entropy(logits, batch[:, 1:]), batch[:, 1:].numel()

    def metrics(
        self, model: nn.Module, batch: torch.Tensor
    ) -> dict[str, tuple[torch.Tensor, float]]:
        logits, following = model(batch[:, :-1]), batch[:, 1:]
        loss_sum, num_tokens = _cross_entropy(logits, following), following.numel()
        return {
            "loss": (loss_sum, num_tokens),
            "accuracy": ((logits.argmax(dim=-1) == following).sum(), num_tokens),
            "bits_per_token": (loss_sum, num_tokens * math.log(2)),
        }


def _cross_entropy(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Sum over all tokens, in float32 whatever the logits are."""
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum")


def build_task(spec: RunSpec) -> Task:
    """Build it, with its data. Code of the user's is on the path already.

    Raises DataMissing when the data is not on this node, BadTask for code that holds no task.
    """
    if spec.code is not None:
        return build_own_task(spec.code)
    assert spec.task is not None
    if isinstance(spec.task, LanguageModelingSpec):
        return LanguageModeling(spec.task)
    return ImageClassification(spec.task)


REQUIRED_METHODS = ("build_model", "build_datasets", "loss")
"""Of a task without ``training_step``, which may have no ``loss``."""


def build_own_task(code: CodeSpec) -> Task:
    """Import and build the task. Raises BadTask with file and line if it is no task. Lets errors of
    its own code through."""
    assert code.task is not None
    make = load_named(code.task)
    if not callable(make):
        raise BadTask(
            f"{code.task} is a {type(make).__name__}, not a class; code.task names a class with "
            f"{', '.join(REQUIRED_METHODS)}"
        )
    try:
        inspect.signature(make).bind(**code.args)
    except TypeError as exc:
        raise BadTask(
            f"{code.task}{place_of(make)} cannot be made with code.args {code.args!r:.200}: {exc}"
        ) from exc
    except ValueError:
        pass  # made by C code, which does not say what it takes
    try:
        task: Task = make(**code.args)
    except SystemExit as exc:
        raise ended_program(f"{code.task} cannot be made", exc) from exc
    needed = REQUIRED_METHODS[:2] if makes_own_steps(task) else REQUIRED_METHODS
    missing = [name for name in needed if not callable(getattr(task, name, None))]
    if missing:
        raise BadTask(
            f"{code.task}{place_of(make)} has no method {', '.join(missing)}; a task needs "
            f"{', '.join(needed)}"
        )
    return task
