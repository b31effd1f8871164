"""Classify an exception once, in the process that raised it, by one table.

``kind_of`` looks at the class and its bases, then at the explicit cause. Torch raises a plain
RuntimeError for several system failures; only for these the message decides. The kind travels with
the rank's error, so nothing reads the class or the message again. Ray reports a death as text,
which ``kind_of_death`` reads.
"""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from everstep.wire import ErrorKind, Verdict
from storage.errors import StorageError
from train_fn.errors import (
    AsksForPeers,
    CheckpointFailed,
    Miscomputed,
    NumericsChanged,
    PeersGone,
    RanksApart,
    Replaced,
    StateNotWhole,
    StepNotWhole,
    StorageNotShared,
)
from train_fn.recovery.error_text import text_of

VERDICT_OF_KIND: Final[Mapping[ErrorKind, Verdict]] = MappingProxyType(
    {
        ErrorKind.USER: Verdict.USER_ERROR,
        ErrorKind.OUT_OF_MEMORY: Verdict.OUT_OF_MEMORY,
        ErrorKind.DEVICE_MEMORY: Verdict.OUT_OF_MEMORY,
        ErrorKind.DEVICE: Verdict.HARDWARE,
        ErrorKind.STORAGE: Verdict.STORAGE,
        ErrorKind.STORAGE_NOT_SHARED: Verdict.STORAGE,
        ErrorKind.NODE: Verdict.NODE_LOST,
        ErrorKind.LOADER_LOST: Verdict.WORKER_LOST,
        ErrorKind.HANG: Verdict.HANG,
        ErrorKind.EXCHANGE: Verdict.UNKNOWN,
        ErrorKind.CORRUPTION: Verdict.SILENT_CORRUPTION,
    }
)
"""The verdict if a rank with such an error failed first. ``collective`` has none: it is never
first."""

_PEER_WORDS = re.compile(
    r"/gloo/|\bgloo\b.*(clos|fail|timeout)|NCCL ([Ee]rror|communicator|operation)|Application "
    r"timeout caused pair closure"
)
"""Gloo raises a plain RuntimeError. Only the path of its source file shows that a peer is gone."""

_LOADER_WORDS = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")

_DEVICE_MEMORY_WORDS = re.compile(
    r"^CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)|CUDNN_STATUS_ALLOC_FAILED"
)
_DEVICE_MISUSE_WORDS = re.compile(
    r"^CUDA error: (device-side assert triggered|CUBLAS_STATUS_(INVALID_VALUE|NOT_SUPPORTED))"
)
"""A kernel rejected its arguments, for example an index out of range: a bug in user code."""

_DEVICE_WORDS = re.compile(
    r"^(CUDA|HIP) error: |CUBLAS_STATUS_|CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|"
    r"MAPPING_ERROR|NOT_INITIALIZED)"
)

_MEMORY_DEATH_WORDS = ("OUT_OF_MEMORY", "OutOfMemory", "out of memory")


@dataclass(frozen=True)
class _Row:
    """One row of the table: exceptions of class ``of`` are of ``kind`` if the conditions hold."""

    kind: ErrorKind
    of: type[BaseException] | str
    """A class, or ``module:name`` if its module may not be imported in this process."""
    words: re.Pattern[str] | None = None
    """Must be found in the message. Ignored for subclasses, whose class says more."""
    holds: Callable[[BaseException], bool] | None = None

    def matches(self, exc: BaseException, cls: type) -> bool:
        if cls is not _resolved(self.of):
            return False
        if self.words is not None and not (cls is type(exc) and self.words.search(text_of(exc))):
            return False
        return self.holds is None or self.holds(exc)


def _resolved(known: type[BaseException] | str) -> object:
    """Return the class; None if its module is not imported, so that it has no instances."""
    if isinstance(known, type):
        return known
    module, _, name = known.partition(":")
    return getattr(sys.modules.get(module), name, None)


def _has_no_memory(exc: BaseException) -> bool:
    return getattr(exc, "errno", None) == errno.ENOMEM


def _raised_in_storage(exc: BaseException) -> bool:
    """Return whether Everstep's storage code raised an OSError.

    The same error in user code is a user error: a run that fills its own disk must not wait until
    somebody frees it.
    """
    frames = traceback.walk_tb(exc.__traceback__)
    return any(_is_of_storage(frame.f_globals.get("__name__")) for frame, _ in frames)


def _is_of_storage(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == "storage"


def _lost_its_loader(exc: BaseException) -> bool:
    """Return whether torch was reading a batch from a loader process that is gone.

    An exception of the data set in a loader process is re-raised from another frame.
    """
    files = [
        (frame.f_code.co_filename, frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(exc.__traceback__)
    ]
    for number, (file, name) in enumerate(files):
        if name == "_try_get_data" and file.endswith("torch/utils/data/dataloader.py"):
            return any("multiprocessing/" in inner for inner, _ in files[number + 1 :])
    return False


_TABLE: Final[tuple[_Row, ...]] = (
    _Row(ErrorKind.OUT_OF_MEMORY, MemoryError),
    _Row(ErrorKind.OUT_OF_MEMORY, OSError, holds=_has_no_memory),
    _Row(ErrorKind.OUT_OF_MEMORY, "ray.exceptions:OutOfMemoryError"),
    _Row(ErrorKind.DEVICE_MEMORY, "torch:OutOfMemoryError"),
    _Row(ErrorKind.DEVICE_MEMORY, "torch:AcceleratorError", _DEVICE_MEMORY_WORDS),
    _Row(ErrorKind.USER, "torch:AcceleratorError", _DEVICE_MISUSE_WORDS),
    _Row(ErrorKind.DEVICE, "torch:AcceleratorError"),
    _Row(ErrorKind.DEVICE, NumericsChanged),
    _Row(ErrorKind.COLLECTIVE, PeersGone),
    _Row(ErrorKind.COLLECTIVE, Replaced),
    _Row(ErrorKind.COLLECTIVE, "torch.distributed:DistError"),
    _Row(ErrorKind.COLLECTIVE, RuntimeError, _PEER_WORDS),
    _Row(ErrorKind.LOADER_LOST, RuntimeError, _LOADER_WORDS),
    _Row(ErrorKind.DEVICE_MEMORY, RuntimeError, _DEVICE_MEMORY_WORDS),
    _Row(ErrorKind.USER, RuntimeError, _DEVICE_MISUSE_WORDS),
    _Row(ErrorKind.DEVICE, RuntimeError, _DEVICE_WORDS),
    _Row(ErrorKind.CORRUPTION, RanksApart),
    _Row(ErrorKind.CORRUPTION, Miscomputed),
    _Row(ErrorKind.EXCHANGE, StepNotWhole),
    _Row(ErrorKind.EXCHANGE, StateNotWhole),
    _Row(ErrorKind.EXCHANGE, AsksForPeers),
    _Row(ErrorKind.STORAGE, StorageError),
    _Row(ErrorKind.STORAGE, CheckpointFailed),
    _Row(ErrorKind.STORAGE_NOT_SHARED, StorageNotShared),
    _Row(ErrorKind.STORAGE, OSError, holds=_raised_in_storage),
    *(
        _Row(ErrorKind.LOADER_LOST, lost, holds=_lost_its_loader)
        for lost in (ConnectionError, FileNotFoundError, EOFError)
    ),
)
"""A class's rows are tried before those of its bases; the first that matches counts. Without a
match the error is the user's."""


def kind_of(exc: BaseException) -> ErrorKind:
    """Return the kind of an exception: that of its nearest base class in the table, else that of
    its explicit cause.

    Call it before the exception's frames are cleared.
    """
    for each in _chain(exc):
        for cls in type(each).__mro__:
            for row in _TABLE:
                if row.matches(each, cls):
                    return row.kind
    return ErrorKind.USER


def kind_of_death(words: str | None) -> ErrorKind | None:
    """Return why a process died, according to Ray's description; None if it does not say.

    Ray's memory monitor reports its kills only in the text of an ActorDiedError.
    """
    if words and any(each in words for each in _MEMORY_DEATH_WORDS):
        return ErrorKind.OUT_OF_MEMORY
    return None


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its chain of causes; from a group follow its first exception."""
    current: BaseException | None = exc
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            current = current.exceptions[0]
        else:
            current = current.__cause__
