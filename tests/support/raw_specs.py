"""Specs as a user writes them, and the faults that are found in them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from everstep import InvalidSpec
from everstep.spec.parsing import parse_spec

TASK: dict[str, Any] = {
    "name": "image_classification",
    "model": {"name": "mini_resnet"},
    "data": {"name": "digits"},
}


OWN: dict[str, Any] = {"archive": f"sha256:{'0' * 64}", "task": "mine.task:Task"}


OWN_FUNCTION: dict[str, Any] = {
    "archive": OWN["archive"],
    "train_fn": "mine.train:train_fn",
    "config": {"lr": 0.1},
}


SCRIPT: dict[str, Any] = {"archive": OWN["archive"], "script": "train.py", "argv": ["--lr", "0.1"]}


def spec(**fields: Any) -> dict[str, Any]:
    return {"name": "a", "task": copy.deepcopy(TASK), **fields}


def faults(raw: Any) -> dict[str, str]:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(raw)
    return {".".join(map(str, fault.loc)): fault.msg for fault in caught.value.errors}
