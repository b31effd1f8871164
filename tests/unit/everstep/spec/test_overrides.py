"""Fields that the command line sets over a file's."""

from __future__ import annotations

from typing import Any

import pytest

from everstep import InvalidSpec, UsageError
from everstep.spec.overrides import apply_overrides
from everstep.spec.parsing import parse_spec
from tests.support.raw_specs import spec


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("train.epochs=3", ("train", "epochs"), 3),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 0.001),
        ("train.max_steps=null", ("train", "max_steps"), None),
        ("train.compile=true", ("train", "compile"), True),
        ("train.micro_batch_size=auto", ("train", "micro_batch_size"), "auto"),
        ("task.model.args.width=8", ("task", "model", "args", "width"), 8),
        ("task.data.args.augment=false", ("task", "data", "args", "augment"), False),
        ("env.OMP_NUM_THREADS=1", ("env", "OMP_NUM_THREADS"), "1"),
        ("tags.a.b=c=d", ("tags", "a.b"), "c=d"),
        ("name=true", ("name",), "true"),
        ("scaling.resources_per_worker.GPU=0.5", ("scaling", "resources_per_worker", "GPU"), 0.5),
        ("schedule.name=cosine", ("schedule", "name"), "cosine"),
    ],
)
def test_any_field_can_be_set(setting: str, path: tuple[str, ...], value: Any) -> None:
    parsed = parse_spec(apply_overrides(spec(), [setting])).model_dump(mode="json")
    for part in path:
        parsed = parsed[part]
    assert parsed == value and type(parsed) is type(value)


def test_settings_come_in_order_and_leave_the_original_alone() -> None:
    raw = spec(optimizer={"name": "adamw", "lr": 0.1})
    changed = apply_overrides(
        raw, ["optimizer={name: sgd, lr: 0.2}", "optimizer.momentum=0.5", "optimizer.lr=0.3"]
    )
    assert changed["optimizer"] == {"name": "sgd", "lr": 0.3, "momentum": 0.5}
    assert raw == spec(optimizer={"name": "adamw", "lr": 0.1})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "train.epoch=3",
            r"--set train\.epoch: train has no field 'epoch'; did you mean train\.epochs\?",
        ),
        ("epochs=3", r"did you mean train\.epochs\?"),
        ("optimizer.momentum=0.9", r"its fields are lr, weight_decay"),
        ("task.model.args.wdth=3", r"did you mean task\.model\.args\.width\?"),
        ("train.epochs.x=3", "it has no fields"),
        ("zzz=3", "its fields are name, project"),
        ("train.epochs=three", r"train\.epochs: should be a valid integer"),
        ("train.epochs=3.5", r"train\.epochs"),
        ("train=3", "train: must be a mapping"),
    ],
)
def test_what_cannot_be_set_is_named(setting: str, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        parse_spec(apply_overrides(spec(), [setting]))


@pytest.mark.parametrize(
    "setting",
    ["train.epochs", "=3", ".epochs=3", "train..epochs=3", "train.=3", "", "train.epochs={"],
)
def test_what_is_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        apply_overrides(spec(), [setting])
