"""How a rank tells what stopped it: a structured error that survives pickling and any missing
module on the other side."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import storage.errors
from everstep.spec.plain_text import written_out
from storage.errors import StorageError
from train_fn import clock as head_clock
from train_fn.recovery.error_text import message_of, plain_message, with_place

TRACEBACK_CHARS = 20_000
"""Longest traceback that travels; the middle of a longer one is cut out."""

_COLLECTIVE_TYPES = frozenset(
    {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "PeersGone", "Replaced"}
)
"""Names of torch.distributed's errors. By name: the controller that reads them need not import
torch."""

_COLLECTIVE_WORDS = re.compile(
    r"/gloo/|\bgloo\b.*(clos|fail|timeout)|NCCL (error|communicator|operation)|Application "
    r"timeout caused pair closure"
)
"""Gloo raises a plain RuntimeError, so that only its words (the path of its source file) tell that
a peer went away."""

_LOADER_WORDS = re.compile(r"DataLoader worker \(pid.*\) (is killed by signal|exited unexpectedly)")
"""Torch's words for a loader process that is gone: what a data set itself raises arrives as what it
is."""

_LOADER_TYPES = frozenset(
    {
        "ConnectionResetError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "FileNotFoundError",
        "EOFError",
    }
)
_LOADER_FRAME = re.compile(
    r'torch/utils/data/dataloader\.py", line \d+, in _try_get_data\n(?:.*\n)*.*multiprocessing/'
)
"""What says the same where torch met the loss first: a batch's memory is handed over by the process
that made it, and that is gone. What a data set raises in a loader process comes out of another
frame."""

_USER_FRAME = re.compile(
    r'File "[^"\n]*/cache/code/[0-9a-f]{64}/([^"\n]+)", line (\d+)(?:, in (\S+))?'
)
"""A frame of uploaded code, by where nodes keep it (``own_code``)."""

_STORAGE_TYPES = frozenset(
    {"CheckpointFailed", "StorageNotShared"}
    | {
        name
        for name, value in vars(storage.errors).items()
        if isinstance(value, type) and issubclass(value, StorageError)
    }
)


class ErrorKind(StrEnum):
    """What sort of thing stopped a rank; the verdict policy weighs these."""

    USER = "user"
    """The task, its model or its data raised, or the loss was not finite."""
    COLLECTIVE = "collective"
    """A collective failed: the consequence of a peer's end, never its cause."""
    OUT_OF_MEMORY = "out_of_memory"
    STORAGE = "storage"
    """The run's storage could not be read or written."""
    NODE = "node"
    """The rank's node cannot train: found out before its ranks began."""
    EXCHANGE = "exchange"
    """The ranks' exchange came back without being complete; the step was refused."""
    LOADER_LOST = "loader_lost"
    """A loader process of the rank was killed."""
    HANG = "hang"
    """The rank's own watchdog stopped it."""


@dataclass(frozen=True)
class RankError:
    """One rank's own account of why it stopped. ``at`` is in unix seconds by the rank's clock;
    ``step`` counts steps done."""

    rank: int
    kind: ErrorKind
    type: str
    message: str
    traceback: str
    step: int | None
    phase: str | None
    at: float
    snapshot_step: int | None = None
    """Step of the state that it left behind on its node, if it did."""
    memory: str | None = None
    """What its GPU's memory held, where that was too small."""
    place: str | None = None
    """Innermost line of uploaded code, ``task.py, line 12, in loss``; None where it has no part in
    the traceback."""

    @property
    def collateral(self) -> bool:
        """Whether it only follows from what happened to another rank."""
        return self.kind is ErrorKind.COLLECTIVE

    @property
    def signature(self) -> str:
        """The same for two occurrences of one bug: type, message without numbers and addresses, and
        the innermost frame."""
        message = re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "#", self.message)
        frames = re.findall(r'File "([^"]+)", line (\d+)', self.traceback)
        where = ":".join(frames[-1]) if frames else ""
        return f"{self.type}|{message}|{where}"

    @property
    def summary(self) -> str:
        """One line for people."""
        return f"{self.type}: {self.message}" if self.message else self.type


class RankFailure(Exception):
    """Carries a RankError out of the training function to the Train controller."""

    def __init__(self, error: RankError) -> None:
        super().__init__(f"rank {error.rank} stopped at step {error.step}: {error.summary}")
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailure, (self.error,)


def user_place(trace: str) -> str | None:
    """``file, line N, in function`` of the innermost frame of a traceback that lies in uploaded
    code; None where there is none.

    A line that Python could not even parse is in no function.
    """
    frames = _USER_FRAME.findall(trace)
    if not frames:
        return None
    file, line, function = frames[-1]
    return (
        f"{file}, line {line}, in {function}"
        if function and function != "<module>"
        else f"{file}, line {line}"
    )


def describe_error(exc: BaseException, rank: int) -> RankError:
    """RankError of what a rank's training function raised.

    The loop leaves a broken attempt in order and then raises anew, with text in place of the frames
    that would keep the process group alive (``errors.StepFailed``); what such an error says of its
    cause stands for the cause. Its words are told as they will be read again, or the same error
    would look like another one.
    """
    told_type = _text(exc, "type_name")  # many a foreign exception has a ``message``, too
    type_name = told_type or type(exc).__name__
    message = (_text(exc, "message") or "") if told_type else message_of(exc)
    trace = _text(exc, "traceback_text") or "".join(traceback.format_exception(exc))
    place = user_place(trace)
    told = with_place(plain_message(message)[:1800], place and place.partition(", in ")[0])
    at = getattr(exc, "at", None)
    kind = _classify_words(type_name, message) if hasattr(exc, "type_name") else classify(exc)
    if type_name in _LOADER_TYPES and _LOADER_FRAME.search(trace):
        kind = ErrorKind.LOADER_LOST
    return RankError(
        rank=rank,
        kind=kind,
        type=type_name,
        message=written_out(told[:2000]),
        traceback=written_out(_shorten(trace)),
        step=_integer(exc, "step"),
        phase=_text(exc, "phase"),
        at=float(at) if isinstance(at, int | float) else head_clock.now(),
        snapshot_step=_integer(exc, "snapshot_step"),
        memory=_text(exc, "memory"),
        place=None if place is None else written_out(place),
    )


def classify(exc: BaseException) -> ErrorKind:
    """Which kind an exception is of; what is not recognised as trouble of the system is the
    user's."""
    kinds = [
        _classify_words(cls.__name__, str(exc) if cls is type(exc) else "")
        for cls in type(exc).__mro__
    ]
    return next((kind for kind in kinds if kind is not ErrorKind.USER), ErrorKind.USER)


def _classify_words(type_name: str, message: str) -> ErrorKind:
    if type_name in {"MemoryError", "OutOfMemoryError"}:
        return ErrorKind.OUT_OF_MEMORY
    if type_name in {"StepNotWhole", "StateNotWhole"}:
        return ErrorKind.EXCHANGE
    if type_name in _STORAGE_TYPES:
        return ErrorKind.STORAGE
    if type_name in _COLLECTIVE_TYPES or (
        type_name == "RuntimeError" and _COLLECTIVE_WORDS.search(message)
    ):
        return ErrorKind.COLLECTIVE
    if type_name == "RuntimeError" and _LOADER_WORDS.search(message):
        return ErrorKind.LOADER_LOST
    return ErrorKind.USER


def _text(exc: BaseException, name: str) -> str | None:
    value = getattr(exc, name, None)
    return value if isinstance(value, str) else None


def _integer(exc: BaseException, name: str) -> int | None:
    value = getattr(exc, name, None)
    return value if isinstance(value, int) else None


def _shorten(text: str) -> str:
    if len(text) <= TRACEBACK_CHARS:
        return text
    half = TRACEBACK_CHARS // 2
    return f"{text[:half]}\n… {len(text) - TRACEBACK_CHARS} characters left out …\n{text[-half:]}"
