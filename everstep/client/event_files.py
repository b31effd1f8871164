"""The TensorBoard files of a run: download what is new of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from everstep.client.run_checkpoints import RunCheckpoints
from everstep.errors import ServiceError
from everstep.wire.history import EventFileInfo

_NAME = re.compile(r"events\.out\.tfevents\.[0-9A-Za-z.]+")


class RunEventFiles(RunCheckpoints):
    """A run and its TensorBoard files."""

    def download_event_files(self, directory: str | Path) -> int:
        """Bring the TensorBoard files in a directory up to date; return how many bytes were new.

        A file only grows, so what is there is not fetched again. Raises errors of the service, and
        OSError if a file cannot be written.

        >>> run.download_event_files("tb/digits")                            # doctest: +SKIP
        """
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        path = f"{self._path}/tensorboard"
        num_new = 0
        for file in self._transport.pages(path, EventFileInfo):
            if not _NAME.fullmatch(file.name):
                raise ServiceError(f"{file.name!r} is not the name of a TensorBoard file")
            target = place / file.name
            there = target.stat().st_size if target.exists() else 0
            name = quote(file.name, safe="")
            with self._transport.stream(f"{path}/{name}", params={"offset": there}) as response:
                num_new += _appended(target, response.iter_raw())
        return num_new


def _appended(target: Path, blocks: Iterator[bytes]) -> int:
    first = next(blocks, b"")
    if not first:
        return 0
    with target.open("ab") as stream:
        return sum(stream.write(block) for block in itertools.chain((first,), blocks))
