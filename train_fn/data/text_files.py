"""Text files as one row of tokens, packed into sequences of one length."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from everstep.spec.tasks import TextFilesArgs
from train_fn.data.images import Arrays
from train_fn.errors import DataMissing

Tokens = NDArray[np.uint16]

END_OF_TEXT = -1
"""Stands in a vocabulary for the token behind each file; the others stand for bytes, or for code
points."""
_MAX_VOCABULARY = 1 << 16


class PackedText(Dataset[torch.Tensor]):
    """Sample ``i`` is tokens ``[i * length, (i + 1) * length]``: the inputs and, shifted by one,
    their targets.

    So every token but the first is predicted once an epoch. Tokens at the end that fill no whole
    sequence are left out. Sequences continue past the end of a file, as usual for packed text.
    """

    in_memory = True

    def __init__(self, tokens: Tokens, length: int, fingerprint: str) -> None:
        self._tokens, self._length = tokens, length
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int, /) -> torch.Tensor:
        return self.fetch(0, None, np.array([index]))[0]

    def fetch(self, seed: int, epoch: int | None, indices: NDArray[np.int64]) -> torch.Tensor:
        """Return a micro-batch: int64 [n, length + 1]. It is not random."""
        positions = indices[:, None] * self._length + np.arange(self._length + 1)
        return torch.from_numpy(self._tokens[positions].astype(np.int64))


@dataclass(frozen=True)
class TextData:
    """The data that the files give to the task; ``val`` is None if nothing is held out."""

    train: PackedText
    val: PackedText | None
    vocabulary: torch.Tensor
    """int64: byte or code point of every token, END_OF_TEXT for the last."""


def load_text_files(args: TextFilesArgs, context_length: int) -> TextData:
    """Return training and validation text.

    Raises DataMissing if there is no text or too little, or if it is not UTF-8 and the spec asks
    for characters.
    """
    files = _find(args)
    arrays = _decode(files, args.level)
    tokens: Tokens = arrays["tokens"]
    digest = bytes(arrays["digest"].tobytes()).decode()
    num_held_out = int(len(tokens) * args.val_fraction)
    split = len(tokens) - num_held_out
    fingerprint = f"text_files/{args.level}/{split}/{context_length}/{digest}"
    train, val = (
        PackedText(part, context_length, fingerprint) for part in (tokens[:split], tokens[split:])
    )
    if len(train) == 0:
        raise DataMissing(
            f"data set text_files: {args.path} has {split} tokens to train on, fewer than one "
            f"sequence of {context_length + 1}; "
            "lower task.model.args.context_length or task.data.args.val_fraction, or add text"
        )
    return TextData(
        train,
        val if len(val) else None,
        torch.from_numpy(np.array(arrays["vocabulary"], dtype=np.int64)),
    )


def _find(args: TextFilesArgs) -> list[Path]:
    """Return the files sorted by their paths below the directory. A file with several links is read
    once."""
    root = Path(args.path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataMissing(
            f"data set text_files: there is no {root} on this node; put it on every node, or set "
            "task.data.args.path"
        )
    first: dict[Path, Path] = {}
    for path in sorted(root.rglob(args.pattern), key=lambda path: path.relative_to(root).parts):
        if path.is_file():
            first.setdefault(path.resolve(), path)
    files = list(first.values())
    if not files:
        raise DataMissing(
            f"data set text_files: no file below {root} is called {args.pattern}; set "
            "task.data.args.pattern"
        )
    return files


def _decode(files: list[Path], level: str) -> Arrays:
    if level == "byte":
        vocabulary = np.append(np.arange(256), END_OF_TEXT)
        parts = [
            np.frombuffer(file.read_bytes(), dtype=np.uint8).astype(np.uint16) for file in files
        ]
    else:
        points = [_code_points(file) for file in files]
        known = np.unique(np.concatenate([np.unique(part) for part in points])).astype(np.int64)
        if len(known) >= _MAX_VOCABULARY:
            raise DataMissing(
                f"data set text_files: {len(known)} different characters are too many; set "
                "task.data.args.level: byte"
            )
        vocabulary = np.append(known, END_OF_TEXT)
        parts = [np.searchsorted(known, part).astype(np.uint16) for part in points]
    end = np.array([len(vocabulary) - 1], dtype=np.uint16)
    tokens = np.concatenate([piece for part in parts for piece in (part, end)])
    digest = hashlib.sha256(tokens.tobytes() + vocabulary.tobytes()).hexdigest()
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "digest": np.frombuffer(digest.encode(), dtype=np.uint8),
    }


def _code_points(file: Path) -> NDArray[np.uint32]:
    try:
        return np.frombuffer(file.read_bytes().decode("utf-8").encode("utf-32-le"), dtype=np.uint32)
    except UnicodeDecodeError as exc:
        raise DataMissing(
            f"data set text_files: {file} is not UTF-8 (byte {exc.start}); leave it out by "
            "task.data.args.pattern, or set "
            "task.data.args.level: byte"
        ) from exc
