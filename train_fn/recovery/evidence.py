"""The facts about one failure of an attempt, collected from every rank before a verdict is made."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from everstep.spec.plain_text import written_out
from everstep.wire import ErrorKind, Verdict
from everstep.wire.run import with_few_ranks
from storage.errors import StorageError
from train_fn import clock as head_clock
from train_fn.errors import (
    CheckpointFailed,
    EndedItself,
    Miscomputed,
    NumericsChanged,
    PeersGone,
    RanksApart,
    Replaced,
    StateNotWhole,
    StepNotWhole,
    StorageNotShared,
    TrainError,
)
from train_fn.recovery.error_text import (
    is_of_process,
    message_of,
    plain_message,
    text_of,
    user_place,
    with_full_disk,
    with_open_files,
    with_place,
)
from train_fn.recovery.links import Pairs, as_json, pairs_of

# ---------------------------------------------------------------- rank error

# Carry a rank's error from the process that raised it to the verdict.
#
# ``describe_error`` turns the exception into a RankError, with its kind. StepFailed carries that
# out of the training function; it survives pickling, and needs no module that the other side lacks.

TRACEBACK_CHARS = 20_000
"""Longest traceback that travels; the middle of a longer one is cut out."""


@dataclass(frozen=True)
class RankError:
    """Why one rank stopped, as that rank saw it. ``at`` is unix seconds; ``step`` counts steps
    done."""

    rank: int
    kind: ErrorKind
    type: str
    message: str
    traceback: str
    step: int | None
    phase: str | None
    at: float
    snapshot_step: int | None = None
    """Step of the state that the rank left on its node, if any."""
    memory: str | None = None
    """Summary of its GPU's memory, if that ran out."""
    device: dict[str, Any] | None = None
    """What its node says of its GPU, after an error of the device (``node/device.py``)."""
    unheard: tuple[str, ...] = ()
    """Addresses of hosts from which nothing was heard although the rank waited for them."""
    place: str | None = None
    """Innermost line of uploaded code, ``task.py, line 12, in loss``; None if the traceback has
    none."""

    @property
    def collateral(self) -> bool:
        """Return whether the error only follows from the failure of another rank."""
        return self.kind is ErrorKind.COLLECTIVE

    @property
    def signature(self) -> str:
        """Return a text that is equal for two occurrences of one bug: type, message without numbers
        and addresses, and innermost frame."""
        message = re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "#", self.message)
        frames = re.findall(r'File "([^"]+)", line (\d+)', self.traceback)
        where = ":".join(frames[-1]) if frames else ""
        return f"{self.type}|{message}|{where}"

    @property
    def summary(self) -> str:
        """Return type and message."""
        return f"{self.type}: {self.message}" if self.message else self.type


class StepFailed(Exception):
    """Replaces the exception that ended a rank's attempt, once the rank has left its peers.

    It holds text instead of a traceback: the frames would keep the broken process group alive, and
    with it every peer that waits in a collective.
    """

    def __init__(self, error: RankError, snapshot_problem: str | None = None) -> None:
        super().__init__(f"rank {error.rank} stopped at step {error.step}: {error.summary}")
        self.error = error
        self.snapshot_problem = snapshot_problem
        """Why the rank left no snapshot on its node; None if it did."""

    def __reduce__(self) -> tuple[Any, ...]:
        return StepFailed, (self.error, self.snapshot_problem)


def describe_error(exc: BaseException, rank: int) -> RankError:
    """Return the rank's error for an exception, classified. A StepFailed keeps the error it
    carries."""
    if isinstance(exc, StepFailed):
        return exc.error
    trace = "".join(traceback.format_exception(exc))
    place = user_place(trace)
    kind = kind_of(exc)
    used_up = next(filter(is_of_process, _chain(exc)), None)
    message = plain_message(message_of(used_up or exc))[:1600]
    if kind is ErrorKind.USER:
        message = with_full_disk(message, exc)[:1700]
    if used_up is not None:
        message = with_open_files(message)
    step = getattr(exc, "step", None) if isinstance(exc, TrainError) else None
    return RankError(
        rank=rank,
        kind=kind,
        type=type(used_up or exc).__name__,
        message=written_out(with_place(message, place and place.partition(", in ")[0])[:2000]),
        traceback=written_out(_shorten(trace)),
        step=step,
        phase=None,
        at=head_clock.now(),
        place=None if place is None else written_out(place),
    )


def _shorten(text: str) -> str:
    if len(text) <= TRACEBACK_CHARS:
        return text
    half = TRACEBACK_CHARS // 2
    return f"{text[:half]}\n… {len(text) - TRACEBACK_CHARS} characters left out …\n{text[-half:]}"


# ---------------------------------------------------------------- evidence

_DETAIL_CHARS = 4000
_STACK_CHARS = 8000


@dataclass(frozen=True)
class RankReport:
    """What is known about one rank once its group has shut down."""

    rank: int
    node_id: str
    pid: int
    node_alive: bool = True
    """Whether its node's raylet accepted a connection."""
    node_draining: bool = False
    died: bool = False
    """Its process is gone, and the controller did not kill it."""
    death: str | None = None
    """Ray's description of that death."""
    preempted: bool = False
    """Ray says that the node was taken away as announced."""
    unresponsive: bool = False
    """Its process lives but answers no call: it is stopped, or stuck outside Python."""
    is_unproven: bool = False
    """It was killed to free the others, and nothing shows that it is the one that hung."""
    stack: str | None = None
    """Its stack when the rank was taken for hung."""
    hang: str | None = None
    """Why it was taken for hung: the limit that it exceeded, and the setting that allows more."""
    still_running: bool = False
    """Its training thread had not ended when the wait for it was over."""
    held_up: bool = False
    """That thread was waiting in a collective that had not failed yet."""
    kept_step: int | None = None
    """Step whose state was left on its node before that thread was freed."""
    state_bytes: int = 0
    """How large the state is that the rank leaves on its node."""
    unheard: tuple[str, ...] = ()
    """Ids of the nodes from which it heard nothing although it waited for them."""
    error: RankError | None = None

    @property
    def state(self) -> str:
        """How the rank ended, in one or two words."""
        if self.died:
            return "died"
        if self.unresponsive:
            return "unresponsive"
        if self.still_running:
            return "held up" if self.held_up else "still running"
        if self.error is None:
            return "left"
        return "collateral" if self.error.collateral else "raised"

    @property
    def left_step(self) -> int | None:
        """Return the step of the state that the rank has left on its node; None for none."""
        return self.kept_step if self.error is None else self.error.snapshot_step


@dataclass(frozen=True)
class Evidence:
    """One failure of an attempt: each rank's report, or why the group could not start."""

    attempt: int
    noticed_at: float
    """Unix seconds."""
    ranks: tuple[RankReport, ...] = ()
    last_step: int | None = None
    """Most steps done, as far as any rank or the journal knows."""
    worked_s: float | None = None
    """How long a script that reports no steps had been running; None for other runs."""
    control_error: str | None = None
    """An error of the controller or of the group's start, not of a training function."""

    @property
    def pairs(self) -> Pairs:
        """Return the pairs of nodes that do not hear each other; none if a rank has died, since its
        host may be gone."""
        if any(report.died for report in self.ranks):
            return frozenset()
        unheard: dict[str, set[str]] = {}
        for report in self.ranks:
            unheard.setdefault(report.node_id, set()).update(report.unheard)
        return pairs_of(unheard)

    def detail(self, first: RankReport | None) -> dict[str, Any]:
        """Return the evidence as JSON: the first failing rank in full, others in one line each."""
        detail = with_few_ranks({"ranks": [_line(report) for report in self.ranks]})
        if self.pairs:
            detail["pairs"] = as_json(self.pairs)
        if self.worked_s is not None:
            detail["worked_s"] = round(self.worked_s, 3)
        if self.control_error:
            detail["control_error"] = self.control_error[-_DETAIL_CHARS:]
        if first is not None:
            detail |= {"pid": first.pid, "node_alive": first.node_alive}
            if first.stack:
                detail["stack"] = first.stack[-_STACK_CHARS:]
            if first.death:
                detail["death"] = first.death[-_DETAIL_CHARS:]
            if first.error:
                detail |= _error_detail(first.error)
        return detail


def _error_detail(error: RankError) -> dict[str, Any]:
    detail: dict[str, Any] = {
        "kind": error.kind.value,
        "signature": error.signature,
        "traceback": error.traceback,
        "phase": error.phase,
    }
    if error.place:
        detail["place"] = error.place
    if error.device:
        detail["device"] = error.device
    if error.memory:
        detail["memory"] = error.memory[-_STACK_CHARS:]
    return detail


def _line(report: RankReport) -> dict[str, Any]:
    error = report.error
    return {
        "rank": report.rank,
        "node_id": report.node_id,
        "state": report.state,
        "error": error.summary[:500] if error else None,
        "step": error.step if error else None,
        "snapshot_step": error.snapshot_step if error else report.kept_step,
        "at": error.at if error else None,
        **({"stack": report.stack[-_DETAIL_CHARS:]} if report.stack else {}),
        **({"unheard": list(report.unheard)} if report.unheard else {}),
    }


# ---------------------------------------------------------------- error kinds

# Classify an exception once, in the process that raised it, by one table.
#
# ``kind_of`` looks at the class and its bases, then at the explicit cause. Torch raises a plain
# RuntimeError for several system failures; only for these the message decides. The kind travels
# with the rank's error, so nothing reads the class or the message again. Ray reports a death as
# text, which ``kind_of_death`` reads.

VERDICT_OF_KIND: Final[Mapping[ErrorKind, Verdict]] = MappingProxyType(
    {
        ErrorKind.USER: Verdict.USER_ERROR,
        ErrorKind.OUT_OF_MEMORY: Verdict.OUT_OF_MEMORY,
        ErrorKind.DEVICE_MEMORY: Verdict.OUT_OF_MEMORY,
        ErrorKind.DEVICE: Verdict.HARDWARE,
        ErrorKind.STORAGE: Verdict.STORAGE,
        ErrorKind.STORAGE_NOT_SHARED: Verdict.STORAGE,
        ErrorKind.NODE: Verdict.NODE_LOST,
        ErrorKind.EXITED: Verdict.WORKER_LOST,
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

_HOST_MEMORY_WORDS = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory")
"""Torch raises a plain RuntimeError where the host has no more memory, in words that depend on the
system."""

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


def _raised_in_storage(exc: BaseException) -> bool:
    """Return whether Everstep's storage code raised an OSError.

    The same error in user code is a user error: a run that fills its own disk must not wait until
    somebody frees it.
    """
    frames = traceback.walk_tb(exc.__traceback__)
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return any(module.partition(".")[0] == "storage" for module in modules)


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
    _Row(ErrorKind.OUT_OF_MEMORY, RuntimeError, _HOST_MEMORY_WORDS),
    _Row(ErrorKind.USER, RuntimeError, _DEVICE_MISUSE_WORDS),
    _Row(ErrorKind.DEVICE, RuntimeError, _DEVICE_WORDS),
    _Row(ErrorKind.CORRUPTION, RanksApart),
    _Row(ErrorKind.CORRUPTION, Miscomputed),
    _Row(ErrorKind.EXCHANGE, StepNotWhole),
    _Row(ErrorKind.EXCHANGE, StateNotWhole),
    _Row(ErrorKind.EXITED, EndedItself),
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
    if any(map(is_of_process, _chain(exc))):  # whoever met it first: storage code may
        return ErrorKind.USER
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
