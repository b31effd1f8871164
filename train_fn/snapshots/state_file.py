"""Write a state to a file at memory speed, and read it back without copying it.

The file holds the state's plain values, then the bytes of its tensors. The writer sums each piece
while it writes it. A reader maps the file, and sums what it has mapped. Neither needs memory for
another copy of the state.

A file may be written over, since memory that is in use is written at twice the speed of new memory.
Nobody reads it then. A reader holds a shared lock while it has the file mapped; a writer that does
not get the exclusive lock takes a new file. A file is renamed before it is written over, so a
reader that has just opened it finds that the path no longer names it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from train_fn.state.tensor_tree import (
    TensorShape,
    digest,
    plain_apart,
    put_together,
    shapes,
)
from train_fn.step.fingerprints import Words, bytes_of, joined, words_in

PIECE_BYTES = 4 << 20
"""Tensors are summed and written in pieces of this size, a multiple of 8. A piece stays in the
processor's cache between the two."""
SUM_THREADS = 4
"""Limit on the threads that sum a state. More would not help: they saturate the memory."""
_WORTH_A_THREAD = 1 << 20
"""Bytes from which another thread sums a piece."""
_MAGIC = b"everstep state 1"
_PREFACE = struct.Struct("<16sQQ32s")
"""Magic, size of the header, size of the file, SHA-256 of the header."""
_ALIGNED = 64


def write_state(path: Path, state: Mapping[str, Any]) -> str:
    """Write ``state``, whose tensors may be on any device. Return its digest.

    Raises OSError, BadTask for a value that could not be loaded again, and RuntimeError if a device
    cannot be read.
    """
    tensors: list[torch.Tensor] = []
    skeleton = plain_apart(state, tensors)
    header = _packed(skeleton)
    starts = _starts(len(header), [tensor.nbytes for tensor in tensors])
    with exclusively(path) as file:
        checksum = hashlib.sha256(header).digest()
        write_all(file, _PREFACE.pack(_MAGIC, len(header), starts[-1], checksum) + header)

        def write(number: int, piece: torch.Tensor) -> None:
            write_all(file, bytes(max(0, starts[number] - file.tell())))
            write_all(file, piece.numpy().data)

        sums = word_sums(tensors, write)
        write_all(file, bytes(starts[-1] - file.tell()))
        file.truncate()
    return digest(put_together(skeleton, sums))


def read_state(path: Path) -> tuple[dict[str, Any], str]:
    """Return the state in a file, and the digest of what is there.

    Its tensors are views of the mapped file. A write to one changes this process's copy only.
    Raises OSError, and ValueError if the file is damaged.
    """
    with open_state(path) as file:
        preface = file.read(_PREFACE.size)
        if len(preface) < _PREFACE.size or not preface.startswith(_MAGIC):
            raise ValueError(f"{path.name} is not a file that holds a state")
        _, header_bytes, size_bytes, checksum = _PREFACE.unpack(preface)
        # To read a mapping beyond the end of its file would kill the process.
        if os.fstat(file.fileno()).st_size != size_bytes or header_bytes > size_bytes:
            raise ValueError(f"{path.name} does not have the {size_bytes} bytes that it names")
        header = file.read(header_bytes)
        if hashlib.sha256(header).digest() != checksum:
            raise ValueError(f"{path.name} is damaged: its header is not what was written")
        mapped = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY)
    skeleton = torch.load(io.BytesIO(header), weights_only=True)
    tensors = _mapped_tensors(mapped, header_bytes, skeleton)
    state: dict[str, Any] = put_together(skeleton, tensors)
    return state, digest(put_together(skeleton, word_sums(tensors)))


def open_state(path: Path) -> BinaryIO:
    """Return the file of a state. Nobody writes over it until it is closed, and nothing maps it any
    more. Raises OSError."""
    file = path.open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise BlockingIOError
        return file
    except OSError as exc:
        file.close()
        if isinstance(exc, BlockingIOError):
            raise FileNotFoundError(errno.ENOENT, "another state takes its place", path) from None
        raise


def is_in_use(path: Path) -> bool:
    """Return whether a process reads or writes the file of a state."""
    try:
        with path.open("rb") as file, _locked(file):
            return False
    except BlockingIOError:
        return True
    except OSError:  # it is gone
        return False


@contextmanager
def exclusively(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write over, which nobody reads: that of ``path`` or a new one."""
    if is_in_use(path):
        path.unlink(missing_ok=True)
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(opened, "r+b", buffering=0) as file, _locked(file):
        yield file


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold the exclusive lock of a file. Raises BlockingIOError if another process holds one."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:  # a process that was forked meanwhile would hold it on
        fcntl.flock(file, fcntl.LOCK_UN)


def state_digest(state: Mapping[str, Any]) -> str:
    """Return ``digest(state)``, computed by several threads. Tensors may be on any device."""
    tensors: list[torch.Tensor] = []
    skeleton = plain_apart(state, tensors)
    return digest(put_together(skeleton, word_sums(tensors)))


def _packed(skeleton: Any) -> bytes:
    torch.save(skeleton, packed := io.BytesIO())
    return packed.getvalue()


# For good: what torch allows inside of a `with` only, it allows for all threads until the first one
# of them leaves.
torch.serialization.add_safe_globals([TensorShape])


def _starts(header_bytes: int, sizes: Sequence[int]) -> list[int]:
    """Return where each tensor's bytes begin in the file, and at the end where the file ends."""
    starts, at = [], _PREFACE.size + header_bytes
    for size in sizes:
        at += -at % _ALIGNED
        starts.append(at)
        at += size
    return [*starts, at]


def _mapped_tensors(mapped: mmap.mmap, header_bytes: int, skeleton: Any) -> list[torch.Tensor]:
    """Return the tensors of a mapped file. Raise ValueError if the file has another layout, or a
    byte between two tensors is not zero."""
    found = sorted(shapes(skeleton), key=lambda shape: shape.position)
    starts = _starts(header_bytes, [shape.nbytes for shape in found])
    if starts[-1] != len(mapped):
        raise ValueError("the file does not have the size of the tensors that it names")
    end, tensors = _PREFACE.size + header_bytes, []
    for shape, start in zip(found, starts, strict=False):
        if any(mapped[end:start]):
            raise ValueError("the file is damaged between two tensors")
        end = start + shape.nbytes
        # each with a storage of its own: torch.save would write a shared one whole for each file
        flat = (
            torch.frombuffer(mapped, dtype=shape.dtype, count=shape.numel, offset=start)
            if shape.numel
            else torch.empty(0, dtype=shape.dtype)
        )
        tensors.append(flat.view(shape.shape))
    return tensors


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of ``data``. The kernel may take less at once."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


# ---------------------------------------------------------------- sums


def word_sums(
    tensors: Sequence[torch.Tensor], write: Callable[[int, torch.Tensor], None] | None = None
) -> list[int]:
    """Return ``word_sum`` of each tensor. Give every piece of their bytes to ``write``, in order,
    with the tensor's number."""
    totals = [Words(0, 0)] * len(tensors)

    def add(number: int, words: Words) -> None:
        """Add a piece's words, in any order: all but a tensor's last piece have a rest of 0."""
        whole, rest = totals[number]
        totals[number] = Words(whole + words.whole, rest + words.rest)

    waiting: list[tuple[int, Future[Words]]] = []
    with ThreadPoolExecutor(1 if write else SUM_THREADS, "state-sum") as pool:
        for piece in _pieces(tensors):
            is_large = piece.data.numel() >= _WORTH_A_THREAD
            words = pool.submit(words_in, piece.data) if is_large else None
            if write is not None:
                write(piece.number, piece.data)
            if words is None:
                add(piece.number, words_in(piece.data))
            elif write is not None or piece.copied is not None:  # its memory is used again
                add(piece.number, words.result())
            else:
                waiting.append((piece.number, words))
        for number, words in waiting:
            add(number, words.result())
    return list(map(joined, totals))


class _Piece(NamedTuple):
    """A part of a tensor's bytes in the host's memory, once ``copied`` has happened."""

    number: int
    """Of the tensor."""
    data: torch.Tensor
    copied: torch.cuda.Event | None


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[_Piece]:
    """Yield the bytes of all tensors in pieces, in order. Those of a GPU are copied to pinned
    memory while the caller still uses the piece before. Their memory is used for the next but one
    again."""
    buffers: Iterator[torch.Tensor] | None = None
    ahead: _Piece | None = None
    for number, tensor in enumerate(tensors):
        flat = bytes_of(tensor)
        for data in torch.split(flat, PIECE_BYTES) if flat.numel() else ():
            if data.is_cuda:
                buffers = buffers or itertools.cycle((_pinned(), _pinned()))
                piece = _copying(number, data, next(buffers))
            else:
                piece = _Piece(number, data, None)
            if ahead is not None:
                yield _arrived(ahead)
            ahead = piece
    if ahead is not None:
        yield _arrived(ahead)


def _copying(number: int, data: torch.Tensor, buffer: torch.Tensor) -> _Piece:
    target = buffer[: data.numel()]
    target.copy_(data, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return _Piece(number, target, copied)


def _arrived(piece: _Piece) -> _Piece:
    if piece.copied is not None:
        piece.copied.synchronize()
    return piece


def _pinned() -> torch.Tensor:
    """Return pinned memory for a piece. Pinning takes long, but torch keeps what is freed for the
    next call."""
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
