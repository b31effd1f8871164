"""Compute digests of training states, to compare them between ranks and attempts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from train_fn.step.word_sums import word_sum


def digest(state: dict[str, Any]) -> str:
    """Return a digest of a state, to compare counters, ledger and all bits of all tensors.

    A tensor enters as the sum of its 8-byte words modulo 2**64, which runs at memory speed. The
    tail's times and the newest checkpoint are left out, since they may differ between ranks.
    """
    hashed = hashlib.sha256(f"{state['step']} {state['ledger']} {state['fingerprint']}".encode())
    for name in ("model", "optimizer", "scaler", "ema"):
        hashed.update(_text(state[name], name))
    for name in ("unsaved", "task", "scheduler", "chain"):  # which older states do not have
        if state.get(name):
            hashed.update(_text(state[name], name))
    return hashed.hexdigest()


def tree_digest(tree: Any) -> str:
    """Return a digest of nested plain values and tensors."""
    return hashlib.sha256(_text(tree, "")).hexdigest()


def _text(tree: Any, name: str) -> bytes:
    return "".join(f"{path} {_leaf_text(leaf)}\n" for path, leaf in leaves(tree, name)).encode()


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return str(word_sum(leaf))
    return repr(sorted(map(repr, leaf))) if isinstance(leaf, set) else repr(leaf)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested dicts, lists and tuples with its path, in order."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from leaves(value, f"{path}/{name}")
    elif isinstance(tree, list | tuple):
        for position, value in enumerate(tree):
            yield from leaves(value, f"{path}/{position}")
    else:
        yield path, tree
