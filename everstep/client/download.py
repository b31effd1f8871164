"""Bytes between a client and the service: checkpoints and files downwards, code upwards."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, Self, cast
from urllib.parse import quote

from blake3 import blake3

from everstep.client.handles import RunFields
from everstep.client.streams import Part, Patience
from everstep.client.transport import Transport
from everstep.code import pack
from everstep.errors import CorruptDownload, EverstepError, ServiceError, Unavailable, UsageError
from everstep.wire import Checkpoint, CodeArchive, Run
from everstep.wire.base import fault_of
from everstep.wire.events import EventFileInfo

MANIFEST = "manifest.json"
_BLOCK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 256 << 20


class _ChunkReader:
    """A file object over an iterator of bytes, for tarfile's stream mode."""

    def __init__(self, chunks: Iterator[bytes], on_bytes: Callable[[int], None]) -> None:
        self._chunks = chunks
        self._on_bytes = on_bytes
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        parts = list[bytes]()
        missing = size
        while missing > 0:
            if not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._on_bytes(len(chunk))
                self._rest = memoryview(chunk)
            parts.append(bytes(self._rest[:missing]))
            self._rest = self._rest[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)


def receive_checkpoint(
    chunks: Iterator[bytes], target: Path, digest: str | None, on_bytes: Callable[[int], None]
) -> None:
    """Write a checkpoint's archive to ``target``. Verify that it contains exactly the manifest's
    files, with their sizes and digests.

    Files appear in ``target`` only after all are verified. A new directory is moved into place at
    once. In an existing directory, files of the same names are replaced, ``manifest.json`` last.
    Temporary files go inside an existing target: it may be a volume, and the only writable place.

    Args:
        chunks: an uncompressed tar stream.
        digest: SHA-256 of the manifest as the service stated it; None trusts the manifest.
        on_bytes: called with the size of every chunk.

    Raises CorruptDownload, UsageError if the target is not a directory, and OSError if it cannot be
    written.
    """
    target = target.expanduser().absolute()
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; name a directory for the checkpoint")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target if target.exists() else target.parent
    with tempfile.TemporaryDirectory(prefix=f".{target.name[:64]}.partial-", dir=beside) as scratch:
        staged = Path(scratch) / "checkpoint"
        staged.mkdir()
        found = _extract(chunks, staged, on_bytes)
        _verify(staged, found, digest)
        _put_in_place(staged, target)


def _extract(
    chunks: Iterator[bytes], staged: Path, on_bytes: Callable[[int], None]
) -> dict[str, tuple[int, str]]:
    """Return size and BLAKE3 of every file, hashed while it is written."""
    found: dict[str, tuple[int, str]] = {}
    reader = _ChunkReader(chunks, on_bytes)
    with _tar_errors(), tarfile.open(fileobj=cast(IO[bytes], reader), mode="r|") as archive:
        for member in archive:
            if member.isdir():
                continue
            name = _safe_name(member)
            if name in found:
                raise CorruptDownload(f"the archive contains {name} twice; download it again")
            content = archive.extractfile(member)
            assert content is not None  # _safe_name let only regular files pass
            path = staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            hashed, size_bytes = blake3(), 0
            with path.open("xb") as file:
                while block := content.read(_BLOCK_BYTES):
                    hashed.update(block)
                    size_bytes += len(block)
                    file.write(block)
            found[name] = (size_bytes, hashed.hexdigest())
        for _ in iter(lambda: reader.read(_BLOCK_BYTES), b""):
            pass  # read to the end: the connection may still break in the padding
    return found


def _safe_name(member: tarfile.TarInfo) -> str:
    """Return the member's path if it is a regular file below the archive's root. Raise
    CorruptDownload."""
    if not member.isreg():
        raise CorruptDownload(
            f"the archive contains {member.name!r}, which is not a regular file; nothing was "
            "written"
        )
    if fault := fault_of(member.name):
        raise CorruptDownload(
            f"the archive contains {member.name!r}, which {fault}; nothing was written"
        )
    return member.name


def _verify(staged: Path, found: dict[str, tuple[int, str]], digest: str | None) -> None:
    if MANIFEST not in found:
        raise CorruptDownload(
            f"the archive contains no {MANIFEST}: it is not a complete checkpoint"
        )
    promised = _promised_files(staged / MANIFEST, found[MANIFEST][0], digest)
    for name, (size_bytes, promised_digest) in promised.items():
        if name not in found:
            raise CorruptDownload(f"{name} is missing from the archive")
        found_bytes, found_digest = found[name]
        if found_bytes != size_bytes:
            raise CorruptDownload(
                f"{name} has {found_bytes} bytes, but the manifest states {size_bytes}"
            )
        if found_digest != promised_digest:
            raise CorruptDownload(
                f"{name} has blake3 {found_digest}, but the manifest states {promised_digest}"
            )
    unexpected = sorted(found.keys() - promised.keys() - {MANIFEST})
    if unexpected:
        raise CorruptDownload(f"the archive contains {unexpected[0]}, which is not in the manifest")


def _promised_files(
    manifest: Path, size_bytes: int, digest: str | None
) -> dict[str, tuple[int, str]]:
    """Return size and BLAKE3 of each file in the manifest.

    The manifest's own digest, over its canonical JSON without ``digest``, is verified.
    """
    if size_bytes > _MAX_MANIFEST_BYTES:
        raise CorruptDownload(
            f"{MANIFEST} is {size_bytes} bytes, over the limit of {_MAX_MANIFEST_BYTES}: the "
            "download is not a checkpoint"
        )
    try:
        raw: dict[str, Any] = json.loads(manifest.read_bytes())
        stated = raw.pop("digest", None)
        promised = {
            str(name): (int(entry["size_bytes"]), str(entry["blake3"]))
            for name, entry in raw["files"].items()
        }
        canonical = json.dumps(raw, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise CorruptDownload(f"{MANIFEST} is not a manifest: {exc!r}") from exc
    actual = hashlib.sha256(canonical).hexdigest()
    for source, expected in (
        ("states", stated),
        ("should have, according to the service,", digest),
    ):
        if expected is not None and expected.removeprefix("sha256:") != actual:
            raise CorruptDownload(
                f"{MANIFEST} {source} digest {expected}, but its content has {actual}"
            )
    return promised


def _put_in_place(staged: Path, target: Path) -> None:
    if not target.exists():
        staged.replace(target)
        return
    # Without a manifest the directory is not a checkpoint while its files change.
    (target / MANIFEST).unlink(missing_ok=True)
    files = [path for path in staged.rglob("*") if path.is_file() and path != staged / MANIFEST]
    for path in [*sorted(files), staged / MANIFEST]:
        place = target / path.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir():
            shutil.rmtree(place)
        path.replace(place)


@contextmanager
def _tar_errors() -> Iterator[None]:
    try:
        yield
    except (
        tarfile.TarError,
        EOFError,
        FileExistsError,
        NotADirectoryError,
        UnicodeDecodeError,
    ) as exc:
        raise CorruptDownload(f"the archive is damaged or truncated: {exc}") from exc


def leaves_out_frozen(directory: Path) -> bool:
    """Return whether a downloaded checkpoint leaves out the model's frozen parameters."""
    manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_bytes())
    return manifest.get("parameters") == "trainable"


# ---------------------------------------------------------------- run checkpoints

# The checkpoints of a run: list, verify and download them.

Which = int | Literal["latest", "best"]


class RunCheckpoints(RunFields, Part):
    """A run and its checkpoints."""

    run: Run

    def __init__(self, transport: Transport, run: Run, patience: Patience) -> None:
        super().__init__(transport, patience)
        self.run = run
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
        return self._transport.post(path, Checkpoint, repeatable=True)

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


# ---------------------------------------------------------------- code uploads

# Upload user code, as ``client.code``.


class Code(Part):
    """Archives of user code, as ``client.code``."""

    def upload(
        self,
        path: str | os.PathLike[str],
        *,
        project: str | None = None,
        create_project: bool = False,
    ) -> CodeArchive:
        """Upload a directory of code, one ``.py`` file, a zip or a tar.gz. Use the result's
        ``digest`` as ``code.archive`` in a spec.

        >>> archive = client.code.upload("my_project/")               # doctest: +SKIP
        >>> code = {"archive": archive.digest, "task": "my_package.task:MyTask"}  # doctest: +SKIP
        >>> spec = {"name": "mine", "code": code}                     # doctest: +SKIP

        In a directory, files that .gitignore or .everstepignore match are left out. The same files
        always give the same digest and are stored once.

        Args:
            project: runs of this project may use the code; by default the token's project.
            create_project: create the project if it does not exist; otherwise that is an error.

        Raises UsageError for what cannot be packed, InvalidSpec for what the service refuses,
        AuthError, Unavailable.
        """
        return self.upload_packed(pack(path), project=project, create_project=create_project)

    def upload_packed(
        self, data: bytes, *, project: str | None = None, create_project: bool = False
    ) -> CodeArchive:
        """Upload the bytes of an archive, as ``upload``. Safe to retry."""
        files = {"file": ("code", data, "application/octet-stream")}
        params = {"project": project, "create_project": create_project or None}
        response = self._transport.send(
            "POST", "/v1/code", params=params, files=files, repeatable=True
        )
        return self._transport.parse(response, CodeArchive)


# ---------------------------------------------------------------- archive stream

# Stream a checkpoint's archive; a broken connection is resumed at the byte where it stopped.

MAX_TRIES = 3
"""Maximum consecutive connections without new data."""


class ArchiveChanged(CorruptDownload):
    """The service now serves another archive at this URL; the bytes received so far are useless."""


class ArchiveStream:
    """The bytes of one archive; iterate once. ``digest`` is the manifest's, from the first
    response; None before.

    Raises Unavailable after MAX_TRIES connections without a new byte, ArchiveChanged, and errors of
    the service.
    """

    def __init__(self, transport: Transport, path: str) -> None:
        self._transport = transport
        self._path = path
        self._etag: str | None = None
        self._size_bytes: int | None = None
        self.num_bytes = 0
        """Bytes received so far."""
        self.digest: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        fruitless = 0
        while True:
            before = self.num_bytes
            try:
                yield from self._connection()
                return
            except Unavailable:
                fruitless = 1 if self.num_bytes > before else fruitless + 1
                if fruitless == MAX_TRIES:
                    raise
                self._transport.timing.sleep(self._transport.timing.backoff_s(fruitless))

    def _connection(self) -> Iterator[bytes]:
        """Yield the data of one connection, from where the previous one stopped."""
        headers = {"Accept": "application/x-tar, application/problem+json"}
        if self.num_bytes:
            if self.num_bytes == self._size_bytes:
                return
            headers |= {"Range": f"bytes={self.num_bytes}-"} | (
                {"If-Range": self._etag} if self._etag else {}
            )
        with self._transport.stream(self._path, headers=headers) as response:
            if self.num_bytes and response.status_code != 206:
                raise ArchiveChanged(
                    f"the archive at {self._path} changed during the download; download it again"
                )
            if not self.num_bytes:
                self._etag = response.headers.get("ETag")
                self.digest = response.headers.get("X-Everstep-Digest")
                length = response.headers.get("Content-Length", "")
                self._size_bytes = int(length) if length.isdigit() else None
            for chunk in response.iter_raw():
                self.num_bytes += len(chunk)
                yield chunk


# ---------------------------------------------------------------- event files

# The TensorBoard files of a run: download what is new of them.

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
