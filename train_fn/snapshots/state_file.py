"""Write a state to a file at memory speed, and read it back without copying it.

The file holds the state's plain values, then the bytes of its tensors. The writer sums each piece
while it writes it. A reader maps the file, and sums what it has mapped. Neither needs memory for
another copy of the state.

A file may be written over, since memory that is in use is written at twice the speed of new memory.
Nobody reads it then. A reader holds a shared lock while it has the file mapped; a writer that does
not get the exclusive lock takes a new file. A file is renamed before it is written over, so a
reader that has just opened it finds that the path no longer names it.

A state that a process holds on the same machine is read there without a file (at the end).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import io
import itertools
import json
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from train_fn.state.tensor_tree import (
    TensorShape,
    digest,
    plain_apart,
    put_together,
    room_for,
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
_MAGIC, _LENT = b"everstep state 1", b"everstep lends 1"
"""Begin a file that holds a state, and one that says which process holds it."""
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

    Its tensors are views of the mapped file. A write to one changes this process's copy only. Those
    of a state that another process lends are copied from there. Raises OSError, and ValueError if
    the file is damaged, or leads nowhere.
    """
    with open_state(path) as file:
        preface = file.read(_PREFACE.size)
        if preface.startswith(_LENT):
            return _read_lent(preface[len(_LENT) :] + file.read())
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


def lend_state(path: Path, state: Mapping[str, Any], until: ExitStack) -> None:
    """Write where this process holds ``state``, whose tensors are in the host's memory. Others may
    read them there until ``until`` closes. Raises OSError."""
    tensors: list[torch.Tensor] = []
    skeleton = plain_apart(state, tensors)
    window = until.enter_context(lent(tensors))
    if window is None:
        raise OSError(errno.ENOTSUP, "this system does not say which machine it is")
    packed = _packed(skeleton)
    with exclusively(path) as file:
        size = len(packed).to_bytes(8, "little")
        write_all(file, _LENT + size + packed + json.dumps(window).encode())
        file.truncate()


def _read_lent(data: bytes) -> tuple[dict[str, Any], str]:
    """Read the state of a process on this machine, given what its file says."""
    end = 8 + int.from_bytes(data[:8], "little")
    skeleton = torch.load(io.BytesIO(data[8:end]), weights_only=True)
    window = window_of(json.loads(data[end:]))
    if window.machine != machine():
        raise ValueError("it is in the memory of a process on another machine")
    tensors = room_for(skeleton)
    sums = read_memory(window, tensors)
    state: dict[str, Any] = put_together(skeleton, tensors)
    return state, digest(put_together(skeleton, sums))


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


# ---------------------------------------------------------------- another process's memory

# Read tensors straight from the memory of another rank's process on the same machine.
#
# A state that a process holds need not be written or sent there: the kernel copies its bytes into
# the memory of the rank that lacks it. Both must run as one user, in one namespace of process ids.
# Where the kernel refuses, the caller sends the bytes.

_MOST_PARTS = 512
"""Parts of memory in one call. Linux takes 1024."""
_PR_SET_PTRACER = 0x59616D61
_ANYBODY = 2**64 - 1
_TOKEN_BYTES = 16


class Place(NamedTuple):
    """Bytes in a process's memory."""

    address: int
    num_bytes: int


class Window(NamedTuple):
    """Tells where a process holds tensors, for another one to read."""

    machine: str
    pid: int
    token: tuple[Place, str]
    """What is in the process's memory while it may be read. Another process of its id has it
    not."""
    places: tuple[Place, ...]
    """Of each tensor's bytes."""


def window_of(found: Any) -> Window:
    """Return the window that was written as JSON."""
    machine, pid, (shown, token), places = found
    return Window(machine, pid, (Place(*shown), token), tuple(Place(*each) for each in places))


@cache
def machine() -> str:
    """Return what processes have in common that can name each other by their ids: the boot of the
    machine, and the namespace. Empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


@contextmanager
def lent(tensors: Sequence[torch.Tensor]) -> Iterator[Window | None]:
    """Let other processes of this user read these tensors until the block ends. Nothing may change
    them meanwhile. Yield None if they are not in the host's memory."""
    nothing: Window | None = None
    if not machine() or not all(tensor.is_cpu for tensor in tensors):
        yield nothing
        return
    flat = [bytes_of(tensor) for tensor in tensors]  # copies of those that are not contiguous
    token = secrets.token_bytes(_TOKEN_BYTES)
    shown = ctypes.create_string_buffer(token, _TOKEN_BYTES)
    _libc().prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)  # does nothing without Yama
    try:
        yield Window(
            machine(),
            os.getpid(),
            (Place(ctypes.addressof(shown), _TOKEN_BYTES), token.hex()),
            tuple(Place(each.data_ptr(), each.numel()) for each in flat),
        )
    finally:
        _libc().prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def read_memory(window: Window, tensors: Sequence[torch.Tensor]) -> list[int]:
    """Overwrite contiguous tensors with the bytes of those in a window. Return ``word_sum`` of
    each.

    Raises OSError if the kernel refuses that, or the process is gone. The tensors may be
    overwritten in part then.
    """
    place, expected = window.token
    found = torch.empty(place.num_bytes, dtype=torch.uint8)
    _copy_from(window.pid, [place], [found])
    if bytes(found.tolist()).hex() != expected:
        raise ProcessLookupError(f"process {window.pid} is another one by now")
    totals = [Words(0, 0)] * len(tensors)
    with ThreadPoolExecutor(SUM_THREADS, "state-sum") as pool:
        for words in pool.map(partial(_read_pieces, window.pid), _batches(window, tensors)):
            for number, (whole, rest) in words:  # all but a tensor's last piece have a rest of 0
                totals[number] = Words(totals[number].whole + whole, totals[number].rest + rest)
    return list(map(joined, totals))


class _Distant(NamedTuple):
    number: int
    """Of the tensor."""
    source: Place
    target: torch.Tensor


def _batches(window: Window, tensors: Sequence[torch.Tensor]) -> Iterator[list[_Distant]]:
    """Yield pieces of all tensors, in lists that one call of the kernel copies."""
    batch: list[_Distant] = []
    size = 0
    for number, (tensor, place) in enumerate(zip(tensors, window.places, strict=True)):
        flat, address = bytes_of(tensor), place.address
        for target in torch.split(flat, PIECE_BYTES) if flat.numel() else ():
            if size + target.numel() > PIECE_BYTES or len(batch) == _MOST_PARTS:
                yield batch
                batch, size = [], 0
            batch.append(_Distant(number, Place(address, target.numel()), target))
            address, size = address + target.numel(), size + target.numel()
    if batch:
        yield batch


def _read_pieces(pid: int, batch: Sequence[_Distant]) -> list[tuple[int, Words]]:
    """Copy pieces, and sum them while they are in the processor's cache."""
    _copy_from(pid, [piece.source for piece in batch], [piece.target for piece in batch])
    return [(piece.number, words_in(piece.target)) for piece in batch]


class _Part(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def _copy_from(pid: int, sources: Sequence[Place], targets: Sequence[torch.Tensor]) -> None:
    """Copy bytes of another process. Raises OSError."""
    count = len(sources)
    theirs = (_Part * count)(*(_Part(*place) for place in sources))
    ours = (_Part * count)(*(_Part(each.data_ptr(), each.numel()) for each in targets))
    copied = _libc().process_vm_readv(pid, ours, count, theirs, count, 0)
    if copied < 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    if copied != sum(place.num_bytes for place in sources):
        raise OSError(f"process {pid} shows only a part of its memory")


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    number, memory = ctypes.c_ulong, ctypes.c_void_p
    library.prctl.argtypes = (ctypes.c_int, number, number, number, number)
    library.process_vm_readv.argtypes = (ctypes.c_int, memory, number, memory, number, number)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library
