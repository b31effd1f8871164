"""Compute digests of training states, to compare them between ranks and attempts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


def digest(state: dict[str, Any]) -> str:
    """Return a digest of a state, to compare counters, ledger and all bits of all tensors.

    A tensor enters as the sum of its 8-byte words modulo 2**64, which runs at memory speed. The
    tail's times and the newest checkpoint are left out, since they may differ between ranks.
    """
    hashed = hashlib.sha256(f"{state['step']} {state['ledger']} {state['fingerprint']}".encode())
    for name in ("model", "optimizer", "scaler", "ema"):
        hashed.update(_text(state[name], name))
    for name in ("unsaved", "task", "scheduler"):  # which older states do not have
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


def word_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's 8-byte words modulo 2**64, at memory speed."""
    return joined(words_in(bytes_of(tensor)))


class Words(NamedTuple):
    """Sum of the 8-byte words of some bytes, and the bytes after the last whole word as a
    number."""

    whole: int
    rest: int


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, without a copy if it is contiguous: shape (nbytes,), uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def words_in(data: torch.Tensor) -> Words:
    """Return the words of a part of ``bytes_of``. Only the last part may end within a word."""
    whole = data.numel() // 8 * 8
    words = int(data[:whole].view(torch.int64).sum()) if whole else 0
    return Words(words, int.from_bytes(bytes(data[whole:].tolist()), "little"))


def joined(words: Words) -> int:
    """Return the ``word_sum`` of a tensor from the sums over its parts."""
    signed = (words.whole + (1 << 63)) % (1 << 64) - (1 << 63)  # as torch's sum wraps
    return signed ^ words.rest
