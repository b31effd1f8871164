"""The checkpoints of a run: list, verify and download them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

from everstep.client.archive_stream import ArchiveChanged, ArchiveStream
from everstep.client.checkpoint_download import receive_checkpoint
from everstep.client.follow import Patience
from everstep.client.run_fields import RunFields
from everstep.client.transport import Transport
from everstep.errors import CorruptDownload, EverstepError, Unavailable
from everstep.wire import Checkpoint, Run

Which = int | Literal["latest", "best"]


class RunCheckpoints(RunFields):
    """A run and its checkpoints."""

    run: Run

    def __init__(self, transport: Transport, run: Run, patience: Patience) -> None:
        self.run = run
        self._transport = transport
        self._patience = patience
        self._path = f"/v1/runs/{quote(run.id, safe='')}"

    def refresh(self) -> Self:
        """Fetch the current state of the run; return self."""
        self.run = self._transport.get(self._path, Run)
        return self

    def checkpoints(self) -> list[Checkpoint]:
        """Return every checkpoint of the committed lineage, oldest first. Those that retention
        removed have the state ``deleted``."""
        return list(self._transport.pages(f"{self._path}/checkpoints", Checkpoint))

    def checkpoint(self, which: Which = "latest") -> Checkpoint:
        """Return one checkpoint: by step, the newest, or the best by the spec's
        ``checkpoint.best_metric``. Raise NotFound."""
        return self._transport.get(f"{self._path}/checkpoints/{_which(which)}", Checkpoint)

    def verify_checkpoint(self, which: Which = "latest") -> Checkpoint:
        """Have the service read a checkpoint back and compare the size and digest of every file.

        The result's ``state`` is ``corrupt`` if a file differs, and ``problem`` names it. Raises
        NotFound, and Conflict for a checkpoint that retention deleted.
        """
        path = f"{self._path}/checkpoints/{_which(which)}/verify"
        return self._transport.parse(
            self._transport.send("POST", path, repeatable=True), Checkpoint
        )

    def download_checkpoint(
        self, which: Which, directory: str | Path, *, on_bytes: Callable[[int], None] | None = None
    ) -> Path:
        """Download a checkpoint into ``directory``: ``model.pt``, ``train_state.pt`` and
        ``manifest.json``.

        Sizes and digests of all files are verified before any file appears in ``directory``. A
        broken connection is resumed where it stopped.

        >>> out = run.download_checkpoint("best", "out/")                       # doctest: +SKIP
        >>> weights = torch.load(out / "model.pt", weights_only=True)            # doctest: +SKIP

        Args:
            on_bytes: called with the size of every chunk.

        Returns the directory. Raises NotFound, CorruptDownload, and OSError if it cannot be
        written.
        """
        checkpoint = self.checkpoint(which)
        try:
            try:
                self._download(checkpoint, Path(directory), on_bytes)
            except ArchiveChanged:
                # a newer submission committed another checkpoint of this step: start again
                self._download(checkpoint, Path(directory), on_bytes)
        except (Unavailable, CorruptDownload):
            self._raise_if_corrupt(checkpoint)
            raise
        return Path(directory)

    def _download(
        self, checkpoint: Checkpoint, target: Path, on_bytes: Callable[[int], None] | None
    ) -> None:
        archive = ArchiveStream(
            self._transport, f"{self._path}/checkpoints/{checkpoint.step}/archive"
        )
        chunks = iter(archive)
        first = next(chunks, b"")  # the response names the checkpoint's digest
        digest = archive.digest or checkpoint.digest
        receive_checkpoint(
            itertools.chain((first,), chunks), target, digest, on_bytes or (lambda _num_bytes: None)
        )

    def _raise_if_corrupt(self, checkpoint: Checkpoint) -> None:
        """Raise CorruptDownload if the service aborted the download because a file does not match
        its manifest."""
        with contextlib.suppress(EverstepError):
            checkpoint = self.verify_checkpoint(checkpoint.step)
        if checkpoint.state == "corrupt":
            raise CorruptDownload(
                f"checkpoint {checkpoint.name} of run {self.id} is damaged in storage: "
                f"{checkpoint.problem}"
            )


def _which(which: Which) -> str:
    if isinstance(which, str) and which not in ("latest", "best") and not which.isdigit():
        raise ValueError(f"{which!r} is not a checkpoint; use a step, 'latest' or 'best'")
    return str(which)
