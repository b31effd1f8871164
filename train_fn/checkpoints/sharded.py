"""Checkpoints of a sharded model: each rank writes its piece, and rank 0's manifest makes them one.

Rank 0 begins the checkpoint as ever, and writes what all ranks have in common and its own piece.
With the rows of the gates it says where the others are to write theirs, and they say what they have
written. It commits once every piece is there, or not at all.

``everstep download`` joins the pieces into one file; where torch is missing,
``python -m train_fn.checkpoints.sharded DIRECTORY`` does so elsewhere.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from storage.checkpoints.manifest import MANIFEST, FileEntry, parse_manifest
from storage.checkpoints.writer import CheckpointWriter, write_beside
from storage.errors import StorageError, StorageUnavailable
from train_fn.checkpoints.commit import STATE_FILE, num_pieces, piece_contents, piece_file
from train_fn.checkpoints.safetensors_file import write_safetensors
from train_fn.checkpoints.save_slot import BoundaryCopy
from train_fn.context import WorkerContext
from train_fn.state.pieces import AVERAGE, WEIGHT, WHOLE, Piece, cut_anew, whole_shapes

PATIENCE_S = 900.0
"""Longest wait of rank 0 for the pieces of all ranks."""

logger = logging.getLogger(__name__)


class PieceSaves:
    """One rank's part in the checkpoints of an attempt.

    The training thread says and hears, rank 0's saver collects, and a thread of each other rank
    writes.
    """

    def __init__(self, ctx: WorkerContext, of: int) -> None:
        """``of``: how many pieces there are. If there are more ranks, the others write none."""
        self._ctx, self._of = ctx, of
        self._changed = threading.Condition()
        self._copies: dict[int, BoundaryCopy] = {}
        """By step, for one checkpoint that is being saved and the one after it."""
        self._in_use: int | None = None
        """Step of the copy that a thread is writing."""
        self._writer: threading.Thread | None = None
        self._saved: dict[str, Any] | None = None
        """What this rank has written, for the others to hear."""
        self._wanted: tuple[int, str] | None = None
        """Step and directory of the checkpoint that rank 0 collects."""
        self._entries: dict[int, Mapping[str, Any]] = {}
        self._is_closed = False

    # -- the training thread

    def hold(self, copy: BoundaryCopy, release: Callable[[BoundaryCopy], None]) -> None:
        """Keep a copy of the state that a checkpoint is to hold, beside those of the two before:
        while one is collected, the best state so far may wait."""
        with self._changed:
            free = [step for step in sorted(self._copies)[:-2] if step != self._in_use]
            unused = [self._copies.pop(step) for step in free]
            if copy.step in self._copies:
                unused.append(copy)
            self._copies.setdefault(copy.step, copy)
        for each in unused:
            release(each)

    def said(self) -> dict[str, Any]:
        """Return what the other ranks are to hear."""
        with self._changed:
            return {"wanted": self._wanted, "saved": self._saved}

    def heard(self, rows: list[dict[str, Any]]) -> None:
        """Take in what all ranks said."""
        with self._changed:
            if self._ctx.world_rank == 0:
                for rank, row in enumerate(rows):
                    saved = row["saved"]
                    if saved and self._wanted and saved["directory"] == self._wanted[1]:
                        self._entries[rank] = saved
                self._changed.notify_all()
                return
            wanted, saved = rows[0]["wanted"], self._saved
        if self._ctx.world_rank >= self._of:
            return
        if wanted is None or (saved is not None and saved["directory"] == wanted[1]):
            return
        if self._writer is None or not self._writer.is_alive():
            self._writer = threading.Thread(
                target=self._write, args=(*wanted,), name="piece-saver", daemon=True
            )
            self._writer.start()

    def close(self) -> None:
        """Free rank 0's saver. A piece that is being written stays with its thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- a rank that writes

    def _write(self, step: int, directory: str) -> None:
        saved: dict[str, Any] = {"directory": directory}
        with self._changed:
            copy, self._in_use = self._copies.get(step), step
        try:
            if copy is None:
                raise LookupError(f"it keeps no copy of step {step}")
            [(name, content)] = piece_contents(copy.state, with_common=False).items()
            entry = write_beside(self._ctx.run_dir, directory, name, partial(torch.save, content))
            saved |= {"size_bytes": entry.size_bytes, "blake3": entry.blake3}
        except Exception as exc:
            logger.warning("the piece of step %d was not saved: %s", step, exc)
            saved |= {"problem": short(f"{type(exc).__name__}: {exc}")}
        with self._changed:
            self._saved, self._in_use = saved, None

    # -- rank 0's saver

    def collect(self, writer: CheckpointWriter, step: int, on_write: Callable[[], None]) -> None:
        """Let the other ranks write their pieces, and make them part of the checkpoint. Raises
        StorageUnavailable if one cannot, or has left."""
        others = range(1, self._of)
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            self._entries, self._wanted = {}, (step, writer.directory)
            try:
                while not all(rank in self._entries for rank in others):
                    if self._is_closed or time.monotonic() > deadline:
                        missing = [rank for rank in others if rank not in self._entries]
                        raise StorageUnavailable(f"ranks {missing} did not write their pieces")
                    self._changed.wait(1.0)
                    on_write()  # a step may take longer than a storage may be silent
            finally:
                self._wanted = None
            found = dict(self._entries)
        for rank in others:
            if problem := found[rank].get("problem"):
                raise StorageUnavailable(f"rank {rank} could not write its piece: {problem}")
            entry = FileEntry(size_bytes=found[rank]["size_bytes"], blake3=found[rank]["blake3"])
            writer.adopt(piece_file(Piece(rank, self._of)), entry)


def short(text: str | None) -> str | None:
    """Return a text of at most 200 bytes, for a row of a gate."""
    return text and text.encode("ascii", "replace")[:200].decode()


# ---------------------------------------------------------------- joined

# The weights of a downloaded checkpoint in one file. The other files are mapped, and tensors joined
# one after the other, so that no more than the largest of them has to fit into memory.

OUT, AVERAGED = "model.safetensors", "model_ema.safetensors"


def join(directory: Path) -> Path:
    """Join the weights and buffers of a checkpoint whose files lie in ``directory`` into one file
    there, and the averaged weights into ``AVERAGED``. Return the first one's path. Raises
    ValueError if the checkpoint is not in pieces, StorageError, OSError."""
    manifest = parse_manifest((directory / MANIFEST).read_bytes())
    of = num_pieces(manifest)
    if not of:
        raise ValueError(f"{directory} is not a checkpoint in pieces; load its model.pt")
    pieces = [_load(directory / piece_file(Piece(number, of))) for number in range(of)]
    shards = {number: piece["shards"] for number, piece in enumerate(pieces)}
    rows, common = pieces[0]["rows"], _load(directory / STATE_FILE)["model"]

    def write(out: str, kind: str) -> Path:
        def value_of(name: str) -> torch.Tensor:
            if (shard := f"{kind}{name}") not in rows:
                return cast(torch.Tensor, common[name])
            return cut_anew({shard: rows[shard]}, shards, of, WHOLE)[shard]

        draft = directory / f"{out}.tmp"
        with draft.open("wb") as file:
            write_safetensors({**common, **whole_shapes(pieces[0], kind)}, file, value_of)
        return draft.replace(directory / out)

    if any(name.startswith(AVERAGE) for name in rows):
        write(AVERAGED, AVERAGE)
    return write(OUT, WEIGHT)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def main(arguments: list[str]) -> int:
    """Join the pieces in a directory, and return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m train_fn.checkpoints.sharded DIRECTORY", file=sys.stderr)
        return 2
    try:
        print(join(Path(arguments[0])))
    except (OSError, ValueError, StorageError) as exc:
        print(f"{exc}. Pass the directory of `everstep download`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
