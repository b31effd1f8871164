"""A checkpoint's manifest: its last file, whose write is the commit. A directory without a valid
manifest is not a checkpoint."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Final, Literal, Protocol

import blake3 as blake3_module
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from everstep.spec import plain_text
from everstep.wire import base
from storage.errors import CorruptFile
from storage.run_dir import CheckpointName

SCHEMA_VERSION: Final = 3
"""That of Everstep 0.1.0, the first release."""
MANIFEST = "manifest.json"

MAX_MANIFEST_BYTES = 8 << 20
"""Enough for tens of thousands of files."""


def check_file_name(name: str) -> str:
    """Return the name of a checkpoint's file, relative to its directory. Raises ValueError for an
    invalid name."""
    if fault := base.fault_of(name):
        raise ValueError(f"the file name {name[:200]!r} {fault}")
    if name == MANIFEST:
        raise ValueError(f"the file name {name!r} is reserved for the manifest: use another name")
    return name


HexDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Hash(Protocol):
    """Hashes a file's bytes in order, and releases the interpreter lock meanwhile."""

    def update(self, data: Any, /) -> object: ...

    def hexdigest(self) -> str: ...


def new_hash() -> Hash:
    """Return the hash of a file: BLAKE3, which is as fast as memory. SHA-256 would be slower than
    a disk."""
    return blake3_module.blake3()


class FileEntry(_Frozen):
    """Size and digest of a file."""

    size_bytes: Annotated[int, Field(ge=0)]
    blake3: HexDigest


class Manifest(_Frozen):
    """What a committed checkpoint contains: its state's position, and size and digest of every
    file."""

    schema_version: Literal[3] = SCHEMA_VERSION
    run_id: str
    step: Annotated[int, Field(ge=0)]
    """Optimizer steps done."""
    epoch: Annotated[int, Field(ge=0)]
    """Current epoch, from 0."""
    submission: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=0)]
    writer: str | None = None
    """Process that wrote it (``process_nonce``)."""
    parent: str | None
    """Checkpoint from which the state descends; None if training started from scratch."""
    world_size: Annotated[int, Field(ge=1)]
    sample_digest: str | None
    """Hash chain over the sample indices used so far."""
    chain: str | None = None
    """Hash chain over the steps so far: gradients, losses and samples."""
    metrics: dict[str, FiniteFloat]
    """From the evaluation of this state; empty if it was not evaluated."""
    created_at: AwareDatetime
    parameters: Literal["trainable"] | None = None
    """``trainable`` if the checkpoint leaves out the model's frozen parameters."""
    files: dict[Annotated[str, AfterValidator(check_file_name)], FileEntry]
    """By path relative to the checkpoint's directory."""

    @property
    def name(self) -> str:
        """Return the checkpoint's directory below ``checkpoints/``."""
        return str(CheckpointName(self.step, self.submission, self.attempt))

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that are None: they are no part of the digest either."""
        return {
            name: value
            for name, value in handler(self).items()
            if name not in ("writer", "parameters", "chain") or value is not None
        }

    @property
    def size_bytes(self) -> int:
        """Return the sum of the files' sizes, without the manifest."""
        return sum(entry.size_bytes for entry in self.files.values())

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the manifest's canonical JSON, which includes every file's
        digest."""
        return _digest(self.model_dump(mode="json"))

    def to_bytes(self) -> bytes:
        """Return the content of ``manifest.json``: canonical JSON with its own digest as an
        additional field."""
        fields = self.model_dump(mode="json")
        return _canonical({**fields, "digest": _digest(fields)})


def parse_manifest(data: bytes) -> Manifest:
    """Parse ``manifest.json``. Raises CorruptFile if a single byte differs from what was
    written."""
    try:
        raw = plain_text.parse_json(data)
        version = raw.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise CorruptFile(
                f"schema version {version} is from a newer Everstep; this one reads up to "
                f"{SCHEMA_VERSION}"
            )
        raw.pop("digest", None)
        manifest = Manifest.model_validate_json(json.dumps(raw))
    except (ValueError, AttributeError, ValidationError) as exc:
        raise CorruptFile(f"not a manifest: {exc}") from exc
    if data != manifest.to_bytes():  # includes the digest
        raise CorruptFile("its content does not match its digest")
    return manifest


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(fields)).hexdigest()


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
