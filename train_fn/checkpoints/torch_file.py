"""Run ``torch.save`` at memory speed. Checksums of the zip file are computed as its bytes are
written, or are left out.

torch computes a CRC-32 of every record from a table, which takes more CPU time than the rest of a
checkpoint together. On a host whose cores are all used by ranks, it slows their steps. Only torch
can read a file without checksums: other zip readers verify them.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import torch
from isal.isal_zlib import crc32

from train_fn.errors import BadTask

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LOCAL, _DESCRIPTOR, _CENTRAL = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"
_LOCAL_BYTES, _CENTRAL_BYTES = 30, 46
"""Sizes of the headers' fixed parts, which names and padding follow."""


class Sink(Protocol):
    """Accept the bytes of a file."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


def save(content: Any, file: Sink) -> None:
    """Save like ``torch.save``. The bytes are the same, except for the file's serial number."""
    if not _layout_is_known():
        torch.save(content, cast(IO[bytes], file))
        return
    with without_checksums():
        torch.save(content, cast(IO[bytes], _Checksums(file)))


@contextmanager
def without_checksums() -> Iterator[None]:
    """Make torch write zeros instead of checksums inside the block, in this thread only. Torch does
    not verify them when it loads."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _header_bytes(data: ReadableBuffer, at: int = 0) -> int:
    """Return the length of a record's header in bytes."""
    name_bytes, padding_bytes = struct.unpack_from("<HH", data, at + 26)
    return _LOCAL_BYTES + int(name_bytes + padding_bytes)


def _checksum_places(data: ReadableBuffer, at: int) -> Iterator[int]:
    """Yield the offset of each record's checksum in a directory that starts at ``at``. The caller
    knows the number of records."""
    while True:
        yield at + 16
        at += _CENTRAL_BYTES + sum(struct.unpack_from("<HHH", data, at + 28))


class _Checksums:
    """Add checksums to what torch writes to a file: after each record, and for all records in the
    directory at the end.

    This relies on how torch writes. A record's header says that the checksum follows the data.
    Header, descriptor (which follows the data) and directory each arrive in a call of their own.
    """

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._header_left = 0
        """Bytes of the current record's header that have not arrived yet."""
        self._in_record = False
        self._crc = self._size_bytes = 0
        self._crcs: list[int] = []

    def write(self, data: bytes | memoryview, /) -> int:
        view = memoryview(data).cast("B")
        self._file.write(self._completed(view))
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def _completed(self, view: memoryview) -> memoryview:
        """Return ``view`` with the checksums that belong into it."""
        if self._header_left:
            self._header_left -= len(view)
        elif self._in_record and (
            # an empty record has no descriptor: the next one's header follows
            self._size_bytes or len(view) != _LOCAL_BYTES or view[:4] != _LOCAL
        ):
            if self._ends_record(view):
                self._in_record = False
                self._crcs.append(self._crc)
                return memoryview(b"".join((view[:4], struct.pack("<I", self._crc), view[8:])))
            self._crc = crc32(view, self._crc)
            self._size_bytes += len(view)
        elif view[:4] == _LOCAL:
            if self._in_record:
                self._crcs.append(0)
            self._header_left = _header_bytes(view) - len(view)
            self._in_record, self._crc, self._size_bytes = True, 0, 0
        elif view[:4] == _CENTRAL:
            return self._directory(view)
        return view

    def _ends_record(self, view: memoryview) -> bool:
        """Return whether ``view`` is a descriptor: signature, checksum, and the record's size
        twice."""
        layout = {16: "<4sIII", 24: "<4sIQQ"}.get(len(view))
        return layout is not None and struct.unpack(layout, view) == (
            _DESCRIPTOR,
            0,
            self._size_bytes,
            self._size_bytes,
        )

    def _directory(self, view: memoryview) -> memoryview:
        directory = bytearray(view)
        for crc, place in zip(self._crcs, _checksum_places(view, 0), strict=False):
            struct.pack_into("<I", directory, place, crc)
        return memoryview(directory)


@cache
def _layout_is_known() -> bool:
    """Return whether the installed torch writes zip files as ``_Checksums`` expects. Otherwise
    torch computes the checksums itself."""
    file = io.BytesIO()
    sample = {"a": torch.ones(5), "b": torch.zeros(0), "c": torch.ones(4, dtype=torch.int32)}
    try:
        with without_checksums():
            torch.save(sample, cast(IO[bytes], _Checksums(file)))
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, struct.error, RuntimeError):
        return False


# ---------------------------------------------------------------- safetensors file

# Write weights as a safetensors file, tensor by tensor, without joining all of it in memory.
#
# Format: https://huggingface.co/docs/safetensors, "Format". The file has eight bytes with the
# length of the header, the header as JSON, and the bytes of the tensors in sequence, all little-
# endian.

_DTYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def require_safetensors(state: Mapping[str, Any]) -> None:
    """Raise BadTask for values that the format cannot hold, and name them. Otherwise the first save
    would fail."""
    odd = [
        name
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES
    ]
    if odd:
        raise BadTask(
            f"checkpoint.safetensors is set, but the format does not hold {', '.join(odd[:5])} of "
            "the model; set it to false"
        )
    assert sys.byteorder == "little"


def write_safetensors(
    state: Mapping[str, torch.Tensor],
    file: IO[bytes],
    value_of: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write a ``state_dict`` with tensors on the CPU. Tensors with the widest elements come first,
    so that all are aligned.

    Args:
        value_of: gives a tensor when it is to be written; ``state`` then says shapes and dtypes
            alone.
    """
    ordered = sorted(state.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"safetensors cannot hold {name}, which is {tensor.dtype}; read the .pt files with "
                "torch.load"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in ordered:
        tensor = tensor if value_of is None else value_of(name)
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)
