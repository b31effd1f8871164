"""Pretrained weights: the backbone is taken, another classifier is not, and what does not fit is
named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from train_fn.errors import BadTask, DataMissing
from train_fn.models import load_weights
from train_fn.user_code.modules import torchvision_models

pytestmark = pytest.mark.own_process


def resnet(num_classes: int, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model: torch.nn.Module = torchvision_models().get_model(
        "resnet18", weights=None, num_classes=num_classes
    )
    return model


@pytest.fixture(scope="module")
def trained() -> dict[str, torch.Tensor]:
    return dict(resnet(1000, 1).state_dict())


def test_weights_for_other_classes_give_their_backbone(
    trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(
        {"state_dict": {f"module.{name}": value for name, value in trained.items()}},
        tmp_path / "w.pt",
    )
    model = resnet(10, 2)
    before = model.fc.weight.clone()  # type: ignore[union-attr, operator]
    assert load_weights(model, tmp_path / "w.pt", num_classes=10) == ["fc.weight", "fc.bias"]
    found = model.state_dict()
    assert all(
        torch.equal(found[name], value)
        for name, value in trained.items()
        if not name.startswith("fc.")
    )
    assert torch.equal(found["fc.weight"], before)


def test_weights_for_the_same_classes_are_taken_whole(
    trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save({**trained, "aux1.weight": torch.zeros(1)}, tmp_path / "w.pt")
    model = resnet(1000, 2)
    assert load_weights(model, tmp_path / "w.pt", num_classes=1000, ignored=("aux1.",)) == []
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_weights_of_another_model_are_refused(
    trained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wrong = {**trained, "layer1.0.conv1.weight": torch.zeros(3, 3), "extra": torch.zeros(1)}
    del wrong["conv1.weight"]
    torch.save(wrong, tmp_path / "w.pt")
    words = (
        r"1 unknown \(extra\); 1 missing \(conv1.weight\); 1 of another shape "
        r"\(layer1.0.conv1.weight\)"
    )
    with pytest.raises(BadTask, match=words):
        load_weights(resnet(1000, 2), tmp_path / "w.pt", num_classes=1000)


def test_a_file_that_is_no_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="there is no file"):
        load_weights(torch.nn.Linear(1, 1), tmp_path / "w.pt", num_classes=1)
    (tmp_path / "w.pt").write_text("not weights")
    with pytest.raises(DataMissing, match="cannot be read as weights"):
        load_weights(torch.nn.Linear(1, 1), tmp_path / "w.pt", num_classes=1)
    torch.save([1, 2], tmp_path / "w.pt")
    with pytest.raises(BadTask, match="holds no state_dict"):
        load_weights(torch.nn.Linear(1, 1), tmp_path / "w.pt", num_classes=1)
