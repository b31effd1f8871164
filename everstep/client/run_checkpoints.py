"""The checkpoints of a run: list, verify and download them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from everstep.client.archive_stream import ArchiveChanged, ArchiveStream
from everstep.client.checkpoint_download import receive_checkpoint
from everstep.client.run_fields import RunFields
from everstep.errors import CorruptDownload, EverstepError, Unavailable
from everstep.wire import Checkpoint

Which = int | Literal["latest", "best"]


class RunCheckpoints(RunFields):
    """A run and its checkpoints."""

    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint of the committed lineage, oldest first; those that retention let go have
        the state ``deleted``."""
        return list(self._transport.pages(f"{self._path}/checkpoints", Checkpoint))

    def checkpoint(self, which: Which = "latest") -> Checkpoint:
        """One checkpoint: of a step, the newest, or the best by the spec's
        ``checkpoint.best_metric``. Raises NotFound."""
        return self._transport.get(f"{self._path}/checkpoints/{_which(which)}", Checkpoint)

    def verify_checkpoint(self, which: Which = "latest") -> Checkpoint:
        """Have the service read a checkpoint back and compare every file with its size and digest.

        The answer's ``state`` is ``corrupt`` where a file is not what it should be, and its
        ``problem`` says which. Raises NotFound, and Conflict for one that retention deleted.
        """
        path = f"{self._path}/checkpoints/{_which(which)}/verify"
        return self._transport.parse(
            self._transport.send("POST", path, repeatable=True), Checkpoint
        )

    def download_checkpoint(
        self, which: Which, directory: str | Path, *, on_bytes: Callable[[int], None] | None = None
    ) -> Path:
        """Fetch a checkpoint into ``directory``, which then holds ``model.pt``, ``train_state.pt``
        and ``manifest.json``.

        Every file is compared with the size and digest in the manifest, and the manifest with its
        own digest, before any appears in ``directory``. A connection that breaks is made again, and
        goes on where it stopped. ``on_bytes`` is told of every chunk's size.

        >>> out = run.download_checkpoint("best", "out/")                       # doctest: +SKIP
        >>> weights = torch.load(out / "model.pt", weights_only=True)            # doctest: +SKIP

        Returns the directory. Raises NotFound, CorruptDownload, and OSError where the disk does not
        take it.
        """
        checkpoint = self.checkpoint(which)
        try:
            try:
                self._download(checkpoint, Path(directory), on_bytes)
            except ArchiveChanged:
                # a newer submission committed another one of this step: begin anew
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
        first = next(chunks, b"")  # with the answer that says which checkpoint this is
        digest = archive.digest or checkpoint.digest
        receive_checkpoint(
            itertools.chain((first,), chunks), target, digest, on_bytes or (lambda _num_bytes: None)
        )

    def _raise_if_corrupt(self, checkpoint: Checkpoint) -> None:
        """The service breaks a download off where a file is not what the manifest says; ask it
        whether that was the reason."""
        with contextlib.suppress(EverstepError):
            checkpoint = self.verify_checkpoint(checkpoint.step)
        if checkpoint.state == "corrupt":
            raise CorruptDownload(
                f"checkpoint {checkpoint.name} of run {self.id} is damaged in storage: "
                f"{checkpoint.problem}"
            )


def _which(which: Which) -> str:
    if isinstance(which, str) and which not in ("latest", "best") and not which.isdigit():
        raise ValueError(f"{which!r} names no checkpoint; give a step, 'latest' or 'best'")
    return str(which)
