"""Versions of a node: one model for the ranks of a group and for a check of the deployment."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from everstep.doctor.nodes import _MUST_AGREE
from train_fn.node.node_check import NodeProbe, versions


def test_a_deployment_check_compares_what_ranks_compare() -> None:
    found = versions()
    assert NodeProbe("node", "127.0.0.1").facts(has_gpu=False)["versions"] == found
    built_without = set() if torch.version.cuda else {"cuda", "nccl"}
    assert set(found) == set(_MUST_AGREE) - built_without


def test_a_package_that_is_missing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torchvision":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    whole = versions()
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert versions() == {name: value for name, value in whole.items() if name != "torchvision"}
