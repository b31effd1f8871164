"""``torch.save`` at the speed of memory: a zip file whose checksums are taken as its bytes pass, or that has none.

torch takes a CRC-32 of every record by a table, which costs a core more than all else about a checkpoint together; on a host whose
ranks fill its cores it is taken from their steps. Only torch itself can do without it: whoever opens the file as a zip file looks.
"""

from __future__ import annotations

import io
import operator
import pickle
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from isal.isal_zlib import crc32

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FORM_BYTES = 16 << 20
"""Files of named tensors up to this size are kept as a form; to write a larger one takes longer than to describe its tensors."""
_LOCAL, _DESCRIPTOR, _CENTRAL = b"PK\x03\x04", b"PK\x07\x08", b"PK\x01\x02"
_LOCAL_BYTES, _CENTRAL_BYTES = 30, 46
"""Of the headers' fixed parts; names and padding follow."""


class Sink(Protocol):
    """What a file is written to."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


def save(content: Any, file: Sink) -> None:
    """As ``torch.save``, to the same bytes but for the file's serial number."""
    if not _layout_is_known():
        torch.save(content, cast(IO[bytes], file))
        return
    with without_checksums():
        torch.save(content, cast(IO[bytes], _Checksums(file)))


@contextmanager
def without_checksums() -> Iterator[None]:
    """Inside, and in this thread alone, torch writes zeros in place of checksums; torch does not look at them when it loads."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class FormFile:
    """Saves the same tensors again and again, each time with other values: torch writes the first file, and that is a form, in
    which later ones' values and checksums are put in their places.

    To describe a tensor and to head its record is Python, for a small model most of what its file costs.
    """

    def __init__(self) -> None:
        self._form: _Form | None = None

    def save(self, content: Any, file: Sink) -> None:
        """As ``save``. A form is made of a dict of plain tensors on the CPU, and holds until one of them is another object."""
        if self._form is not None and self._form.is_of(content):
            file.write(self._form.filled())
            return
        self._form = None
        if not _suits_form(content):
            save(content, file)
            return
        first = io.BytesIO()
        save(content, first)
        data = first.getvalue()
        file.write(data)
        self._form = _proven_form(content, data)


class _Form:
    """A file of torch's, and where in it each tensor's bytes and checksums are. Raises where it is not laid out as expected."""

    def __init__(self, content: dict[str, torch.Tensor], data: bytes) -> None:
        self._names, self._tensors = list(content), list(content.values())
        self._data = bytearray(data)
        self._sources = {name: _bytes_of(tensor) for name, tensor in content.items() if tensor.nbytes}
        self._targets: list[torch.Tensor] = []
        self._records: list[tuple[memoryview, int, int]] = []
        """Of each tensor that has any: its bytes, and where its checksum is twice."""
        records = _records(data)
        for number, tensor in enumerate(self._tensors):
            begin, size_bytes, checksum_at = records[f"data/{number}"]
            if size_bytes != tensor.nbytes:
                raise ValueError(f"record {number} has {size_bytes} bytes, its tensor {tensor.nbytes}")
            if not size_bytes:
                continue
            end = begin + size_bytes
            if data[end : end + 4] != _DESCRIPTOR:
                raise ValueError(f"nothing follows record {number}")
            self._targets.append(torch.frombuffer(self._data, dtype=torch.uint8, count=size_bytes, offset=begin))
            self._records.append((memoryview(self._data)[begin:end], end + 4, checksum_at))

    def is_of(self, content: Any) -> bool:
        """Whether these are the tensors it was made of."""
        return type(content) is dict and list(content) == self._names and all(map(operator.is_, content.values(), self._tensors))

    def filled(self) -> memoryview:
        """The file with the tensors' present values; the next call overwrites it."""
        return self._filled_with(list(self._sources.values()))

    def proof(self) -> bool:
        """Whether it loads as what it was filled with, whatever that is, and its checksums are right. Leaves other values in it."""
        random = np.random.default_rng(len(self._data))
        values = [torch.from_numpy(random.integers(0, 256, source.numel(), np.uint8)) for source in self._sources.values()]
        file = io.BytesIO(self._filled_with(values))
        loaded = torch.load(file, weights_only=True)
        found = [_bytes_of(loaded[name]) for name in self._sources]
        with zipfile.ZipFile(file) as archive:
            return all(map(torch.equal, found, values)) and archive.testzip() is None

    def _filled_with(self, values: list[torch.Tensor]) -> memoryview:
        torch._foreach_copy_(self._targets, values)
        for data, *places in self._records:
            crc = crc32(data)
            for place in places:
                struct.pack_into("<I", self._data, place, crc)
        return memoryview(self._data)


def _suits_form(content: Any) -> bool:
    """Whether this is a dict of plain tensors, each with its values one behind the other in memory of its own, and all small."""
    if type(content) is not dict or {*map(type, content)} - {str} or {*map(type, content.values())} != {torch.Tensor}:
        return False
    tensors = list(content.values())
    return sum(tensor.nbytes for tensor in tensors) <= FORM_BYTES and all(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        for tensor in tensors
    )


def _proven_form(content: dict[str, torch.Tensor], data: bytes) -> _Form | None:
    """None where torch writes otherwise than a form expects, or tensors share their memory."""
    try:
        form = _Form(content, data)
        return form if form.proof() else None
    except (KeyError, ValueError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, struct.error):
        return None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _records(data: bytes) -> dict[str, tuple[int, int, int]]:
    """By name without the archive's own: where a record's data begins, its size, and where the directory has its checksum."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos, start = archive.infolist(), archive.start_dir
    return {
        info.filename.partition("/")[2]: (info.header_offset + _header_bytes(data, info.header_offset), info.file_size, checksum_at)
        for info, checksum_at in zip(infos, _checksum_places(data, start), strict=False)
    }


def _header_bytes(data: ReadableBuffer, at: int = 0) -> int:
    """Length of a record's header."""
    name_bytes, padding_bytes = struct.unpack_from("<HH", data, at + 26)
    return _LOCAL_BYTES + int(name_bytes + padding_bytes)


def _checksum_places(data: ReadableBuffer, at: int) -> Iterator[int]:
    """Where in a directory that begins there each record's checksum is; the caller knows how many there are."""
    while True:
        yield at + 16
        at += _CENTRAL_BYTES + sum(struct.unpack_from("<HHH", data, at + 28))


class _Checksums:
    """Between torch and a file: puts a record's checksum behind it, and all of them into the directory at the end.

    Relies on how torch writes: a record's header says that its checksum follows the data, and comes in a call of its own, as do the
    descriptor behind the data and the directory.
    """

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._header_left = 0
        """Bytes of the present record's header that are still to come."""
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
        if self._header_left:
            self._header_left -= len(view)
        elif self._in_record and not self._follows_nothing(view):
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

    def _follows_nothing(self, view: memoryview) -> bool:
        """Whether the present record is empty, and this the next one's header: there is no descriptor then."""
        return not self._size_bytes and len(view) == _LOCAL_BYTES and view[:4] == _LOCAL

    def _ends_record(self, view: memoryview) -> bool:
        """Whether this is a descriptor: signature, checksum, and the record's size twice."""
        layout = {16: "<4sIII", 24: "<4sIQQ"}.get(len(view))
        return layout is not None and struct.unpack(layout, view) == (_DESCRIPTOR, 0, self._size_bytes, self._size_bytes)

    def _directory(self, view: memoryview) -> memoryview:
        directory = bytearray(view)
        for crc, place in zip(self._crcs, _checksum_places(view, 0), strict=False):
            struct.pack_into("<I", directory, place, crc)
        return memoryview(directory)


@cache
def _layout_is_known() -> bool:
    """Whether this torch writes zip files as ``_Checksums`` expects; another one may not, and then takes checksums by itself."""
    file = io.BytesIO()
    sample = {"a": torch.ones(5), "b": torch.zeros(0), "c": torch.ones(4, dtype=torch.int32)}
    try:
        with without_checksums():
            torch.save(sample, cast(IO[bytes], _Checksums(file)))
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, struct.error, RuntimeError):
        return False
