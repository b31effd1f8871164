"""Image classifiers by name: ours, and those of torchvision."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from everstep.spec.image_task import ImageModelSpec, MiniResNetSpec, TorchvisionModelArgs
from train_fn.models.mini_resnet import MiniResNet
from train_fn.models.pretrained import load_weights
from train_fn.user_code.torchvision_ops import torchvision_models

_WITH_AUXILIARY_HEADS = frozenset({"googlenet", "inception_v3"})
_AUXILIARY_HEADS = ("aux1.", "aux2.", "AuxLogits.")
TORCHVISION_CHANNELS = 3


def build_image_model(
    spec: ImageModelSpec, *, in_channels: int, num_classes: int, image_size: int
) -> nn.Module:
    """Return the model on CPU, with weights from torch's global generator. ``image_size`` is the
    smaller side in pixels."""
    if isinstance(spec, MiniResNetSpec):
        return MiniResNet(spec.args, in_channels, num_classes, image_size)
    return _torchvision_model(spec.name, spec.args, num_classes)


def _torchvision_model(name: str, args: TorchvisionModelArgs, num_classes: int) -> nn.Module:
    """Return a classifier of torchvision without its auxiliary heads, so that it returns one tensor
    of logits in training, too."""
    options: dict[str, object] = {"num_classes": num_classes}
    if name in _WITH_AUXILIARY_HEADS:
        options |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_") and args.image_size is not None:
        options["image_size"] = args.image_size
    model: nn.Module = torchvision_models().get_model(name, weights=None, **options)
    if args.weights_path is not None:
        load_weights(
            model,
            Path(args.weights_path).expanduser(),
            num_classes=num_classes,
            ignored=_AUXILIARY_HEADS,
        )
    return model
