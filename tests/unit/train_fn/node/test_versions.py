"""Versions of a node: one model for the ranks of a group and for a check of the deployment."""

from __future__ import annotations

import torch

from everstep.doctor.nodes import _MUST_AGREE
from train_fn.node.node_check import NodeProbe, versions


def test_a_deployment_check_compares_what_ranks_compare() -> None:
    found = versions()
    assert NodeProbe("node", "127.0.0.1").facts(has_gpu=False)["versions"] == found
    built_without = set() if torch.version.cuda else {"cuda", "nccl"}
    assert set(found) == set(_MUST_AGREE) - built_without
