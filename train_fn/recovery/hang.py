"""Detect that an attempt makes no progress, and which of its ranks the others are waiting for."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from everstep.wire.events import EventKind
from train_fn.recovery.links import SLOW_RATIO, SlowRank, Speeds
from train_fn.recovery.settings import RecoverySettings

# ---------------------------------------------------------------- collective trace

# Find the rank that did not enter the collective in which the others wait, from the counts that
# torch's flight recorder keeps on every rank.
#
# The host of a GPU runs ahead: it may have enqueued a collective that the device has not started.

TRAINING_THREAD = "TrainingThread"
"""Ray Train's name for the thread that runs the training function, and ours for that of a rank."""

UNKNOWN = -1
_OF_ALL_RANKS = ("default_pg", "")
"""torch's description of the process group of all ranks, and under its wrapper for debugging."""


@dataclass(frozen=True)
class CollectiveCounts:
    """How far one rank is in the collectives of the group of all ranks."""

    enqueued: int
    """Number of the last collective that the rank called."""
    started: int = UNKNOWN
    """Number of the last one that the device has started; gloo does not record it."""


def read_counts(enqueued: int, dump: bytes | str) -> CollectiveCounts | None:
    """Return the counts of the group of all ranks; None if they cannot be told from the dump.

    The recorder keeps groups that ended in this process, and numbers groups anew in each process.
    So the group is that of the newest collective, if this has the number that the group says. gloo
    numbers sends and receives like collectives, and records only collectives. Ranks may differ in
    those numbers, so they count for nothing.

    Args:
        enqueued: number of the group's last collective, as the group itself says.
        dump: what the flight recorder holds (version 2, as JSON).
    """
    if enqueued == 0:
        return CollectiveCounts(0)
    try:
        found = json.loads(dump)
        entries = [each for each in found["entries"] if each["process_group"][1] in _OF_ALL_RANKS]
        last = entries[-1]
        numbers = {each["collective_seq_id"] for each in entries if each["pg_id"] == last["pg_id"]}
        started = int(found["pg_status"][str(last["pg_id"])]["last_started_collective"])
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    if last["collective_seq_id"] != enqueued:
        return None
    if last["profiling_name"].startswith("gloo:") and len(numbers) <= enqueued - min(numbers):
        return None
    return CollectiveCounts(enqueued, started)


def find_late(counts: Mapping[int, CollectiveCounts | None]) -> list[int]:
    """Return the ranks that did not enter the last collective of the others; none if that is not
    known, or if all ranks are equally far.

    A rank whose host called fewer collectives is late. If all hosts are equally far, a rank whose
    device started fewer is.

    Args:
        counts: the counts of every rank; None for a rank that did not tell them.
    """
    known = {rank: each for rank, each in counts.items() if each is not None}
    if len(known) < max(2, len(counts)):
        return []
    late = _behind({rank: each.enqueued for rank, each in known.items()})
    return late or _behind({rank: each.started for rank, each in known.items()})


def _behind(numbers: Mapping[int, int]) -> list[int]:
    if UNKNOWN in numbers.values():
        return []
    least, most = min(numbers.values()), max(numbers.values())
    return [rank for rank, number in sorted(numbers.items()) if number == least < most]


# ---------------------------------------------------------------- progress

# Follow an attempt's progress by the events of its ranks: its phase, its step, and when it last
# advanced.

_STEPS_KEPT = 512
_BESIDE_TRAINING = frozenset(
    {
        EventKind.GPU_USE,
        EventKind.RANK_USE,
        EventKind.STACKS,
        EventKind.STACKS_ORDERED,
        EventKind.PROFILE_ORDERED,
        EventKind.PROFILE_DONE,
        EventKind.PROFILE_FAILED,
    }
)
"""Sent by threads that keep running while training hangs, so they are no sign of progress."""

_MOVES = frozenset(
    {
        EventKind.ATTEMPT_STARTED,
        EventKind.RESTORED,
        EventKind.TRAINING_STARTED,
        EventKind.EPOCH_COMPLETED,
        EventKind.EVALUATED,
    }
)


def moved_at(kind: EventKind, at: float, data: dict[str, Any]) -> float | None:
    """Return when training advanced, in unix seconds, according to one event; None if the event
    does not say.

    A step counts when it ended, not when it was reported. Events of threads beside training do not
    count.
    """
    if kind is EventKind.METRICS:
        return max((float(point["at"]) for point in data["points"]), default=None)
    return at if kind in _MOVES else None


class Phase(StrEnum):
    """What an attempt is doing. Each phase has its own limit for time without progress."""

    START = "start"
    """From the start of the group until training is set up."""
    FIRST_STEP = "first_step"
    """The first step of an attempt: it compiles, warms up and allocates."""
    STEP = "step"
    EVALUATION = "evaluation"
    """Between two epochs: the evaluation, and the task's ``on_epoch_end``."""
    FINISH = "finish"
    """After the last step: evaluation and the final checkpoint."""


@dataclass(frozen=True)
class AttemptProgress:
    """The progress of the newest attempt."""

    attempt: int = 0
    phase: Phase = Phase.START
    num_signs: int = 0
    """Events of its ranks so far that show progress."""
    last_step: int | None = None
    """Most steps done, as far as any event of the submission says."""
    told_step: int | None = None
    """Newest step up to which the journals have the metrics of all; None if none has any."""
    step_p99_s: float | None = None
    """99th percentile of recent step times in seconds; None for fewer than 20 steps."""
    quiet_s: float = 0.0
    """Seconds since the last such event arrived."""
    moved_at: float | None = None
    """When it last advanced, in unix seconds, mostly its newest committed step; None before it has
    begun."""
    step: int = 0
    """Steps that the newest attempt has done, with those that it began with."""
    total_steps: int | None = None
    """Steps of the whole run, as a rank has last reported them; None if none has."""
    is_written: bool = True
    """Whether the journal could write what its ranks told last. If not, what they do is unknown."""
    speeds: Speeds = field(default_factory=Speeds)


class ProgressTracker:
    """Takes a submission's events in journal order and keeps the progress of its newest attempt."""

    def __init__(self, told_step: int | None = None) -> None:
        """Begin with what earlier submissions have told: metrics up to ``told_step``."""
        self._told_step = told_step
        self._attempt = 0
        self._phase = Phase.START
        self._num_signs = 0
        self._has_stepped = False
        """Whether the attempt has done a step."""
        self._step = 0
        """Its current step; an earlier attempt may have been further."""
        self._last_step: int | None = None
        self._total_steps: int | None = None
        self._reported_total: int | None = None
        """The newest total of any attempt. A user's function begins each without one."""
        self._step_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._sign_at = time.monotonic()
        self._moved_at: float | None = None
        self._unwritten: set[str] = set()
        """Sources whose last signs of progress could not be written."""
        self._slow: dict[int, SlowRank] = {}
        self._num_even = 0

    def note_unwritten(self, source: str, events: Iterable[tuple[EventKind, int]]) -> None:
        """Record that events of a source, each a kind and an attempt, could not be written."""
        if any(
            attempt == self._attempt and kind not in _BESIDE_TRAINING for kind, attempt in events
        ):
            self._unwritten.add(source)

    def note_written(self, source: str) -> None:
        """Record that all events which a source has sent are written."""
        self._unwritten.discard(source)

    def note(self, kind: EventKind, attempt: int, data: dict[str, Any], at: float = 0.0) -> None:
        """Record one event; ``at`` is its time in unix seconds."""
        self._note_steps(kind, data)
        if kind is EventKind.ATTEMPT_STARTED:
            if attempt > self._attempt:
                self._attempt, self._phase, self._num_signs = attempt, Phase.START, 0
                self._sign_at, self._moved_at = time.monotonic(), at
                self._unwritten.clear()
                self._slow, self._num_even = {}, 0
            return
        if attempt != self._attempt:
            return
        moved = moved_at(kind, at, data)
        if moved is not None:
            self._moved_at = max(self._moved_at or moved, moved)
        if kind in _BESIDE_TRAINING:
            return
        self._note_speeds(kind, data)
        self._num_signs += 1
        self._sign_at = time.monotonic()
        if kind is EventKind.RESTORED and isinstance(data.get("step"), int):
            self._step = data["step"]
        elif kind is EventKind.TRAINING_STARTED:
            self._total_steps = data.get("total_steps")
            if self._total_steps is not None:
                self._reported_total = self._total_steps
            self._has_stepped = False
            self._phase = Phase.EVALUATION if data.get("rests") else self._after_step()
        elif kind is EventKind.METRICS:
            self._has_stepped = True
            self._step = max([self._step, *(point["step"] for point in data["points"])])
            self._phase = self._after_step()
        elif (
            self._phase is not Phase.START
            and kind is EventKind.EPOCH_COMPLETED
            and data.get("rests", True)
        ):
            self._phase = Phase.EVALUATION
        elif self._phase is not Phase.START and (
            kind is EventKind.EPOCH_HOOK_DONE
            or (kind is EventKind.EVALUATED and not data.get("rests", False))
        ):
            self._phase = self._after_step()

    def progress(self) -> AttemptProgress:
        """Return the progress as of the last event."""
        p99 = (
            sorted(self._step_s)[int(len(self._step_s) * 0.99)] if len(self._step_s) >= 20 else None
        )
        quiet_s = time.monotonic() - self._sign_at
        return AttemptProgress(
            self._attempt,
            self._phase,
            self._num_signs,
            self._last_step,
            self._told_step,
            p99,
            quiet_s,
            self._moved_at,
            self._step,
            self._reported_total,
            not self._unwritten,
            Speeds(tuple(self._slow.values()), self._num_even),
        )

    def _after_step(self) -> Phase:
        if self._total_steps is not None and self._step >= self._total_steps:
            return Phase.FINISH
        return Phase.STEP if self._has_stepped else Phase.FIRST_STEP

    def _note_speeds(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.STRAGGLER and data["slow"]:
            self._slow[data["rank"]] = SlowRank(data["rank"], data["node_id"], data["skew"])
        elif kind is EventKind.STRAGGLER:
            self._slow.pop(data["rank"], None)
        elif kind is EventKind.RANK_TIMES:
            is_even = all(each["skew"] < SLOW_RATIO for each in data["ranks"])
            self._num_even = self._num_even + 1 if is_even else 0

    def _note_steps(self, kind: EventKind, data: dict[str, Any]) -> None:
        if kind is EventKind.METRICS:
            for point in data["points"]:
                self._last_step = max(self._last_step or 0, point["step"])
                self._told_step = max(self._told_step or 0, point["step"])
                step_s = point["values"].get("step_s")
                if step_s is not None:
                    self._step_s.append(step_s)
        elif kind in {
            EventKind.RESTORED,
            EventKind.CHECKPOINT_COMMITTED,
            EventKind.EVALUATED,
        } and isinstance(data.get("step"), int):
            self._last_step = max(self._last_step or 0, data["step"])
        if kind is EventKind.RESTORED and isinstance(data.get("step"), int):
            # Steps beyond it are made again.
            self._told_step = min(self._told_step or 0, data["step"])


# ---------------------------------------------------------------- hang

_SILENCE_S = 3.0
"""If two polls are further apart than this, the journal was silent, not necessarily the ranks.
Longer if polls are rarer. A poll without a reply since the last one sees nothing."""

SILENT_S = 1.5
"""While a group shuts down, a rank that does not answer for this long is stopped or stuck outside
Python."""

ABORTING_SILENT_S = 10.0
"""The same while ranks abort their collectives: an abort may hold Python up."""

WAITING_FILES = (
    *("/torch/distributed/", "/torch/autograd/graph.py", "/train_fn/elastic/"),
    *("/ray/_private/", "/ray/train/", "/ray/util/"),
    *(
        "/train_fn/loop/own_step.py",
        "/train_fn/loop/replica.py",
        "/train_fn/loop/step.py",
        "/train_fn/snapshots/whole.py",
        "/train_fn/user_code/packages.py",
    ),
    *("/train_fn/protect/commits.py", "/train_fn/protect/changes.py"),
    "/train_fn/user_code/script_run.py",
    *("/train_fn/step/report_sums.py", "/train_fn/step/peers.py", "/train_fn/step/buffers.py"),
)
"""Parts of the paths of source files whose code waits for other ranks: collectives, a backward that
ends with one, a barrier of Ray Train."""

_TAKES_LONG = {
    Phase.START: "the set-up of an attempt",
    Phase.FIRST_STEP: "the first step",
    Phase.STEP: "a step",
    Phase.EVALUATION: "an evaluation, or on_epoch_end,",
    Phase.FINISH: "the last evaluation or checkpoint",
}


class HangWatch:
    """Detects that an attempt made no progress for longer than its phase allows.

    The caller passes the time, in monotonic seconds.
    """

    def __init__(self, settings: RecoverySettings, hang_timeout_s: float | None) -> None:
        self._settings = settings
        self._silence_s = max(_SILENCE_S, 2 * settings.quiet_poll_s)
        self._hang_timeout_s = hang_timeout_s
        self._seen: tuple[int, int] | None = None
        self._moved_at = 0.0
        self._looked_at = float("-inf")
        self.due_at = float("inf")
        """When the attempt is overdue if it makes no progress until then, in monotonic seconds."""

    def overdue_s(self, progress: AttemptProgress, now: float) -> float | None:
        """Return the seconds without progress if they exceed the limit, else None.

        Call it with every reply of the journal. While the journal cannot write what ranks tell, no
        time counts: they may train on, and no later attempt could begin.
        """
        seen = (progress.attempt, progress.num_signs)
        if now - self._looked_at > self._silence_s or not progress.is_written:
            self._seen, self._moved_at = seen, now
        elif seen != self._seen:
            self._seen, self._moved_at = seen, now - progress.quiet_s
        self._looked_at = now
        self.due_at = self._moved_at + self.limit_s(progress)
        return now - self._moved_at if now > self.due_at else None

    def quiet_s(self, now: float) -> float:
        """Return the seconds since the attempt last moved, as far as is known at ``now``."""
        return 0.0 if self._seen is None else now - self._moved_at

    def reason(self, progress: AttemptProgress, overdue_s: float) -> str:
        """Return why the ranks are taken for hung, and which setting of the spec allows more."""
        set_s = self._hang_timeout_s
        setting = "is not set" if set_s is None else f"is {set_s:g}"
        return (
            f"no sign of life for {overdue_s:.1f} s in phase {progress.phase}; the limit is "
            f"{self.limit_s(progress):g} s (recovery.hang_timeout_s {setting}). If "
            f"{_TAKES_LONG[progress.phase]} really takes this long, set recovery.hang_timeout_s "
            "to more"
        )

    def limit_s(self, progress: AttemptProgress) -> float:
        """Return how many seconds the current phase may take without progress."""
        settings = self._settings
        if progress.phase is Phase.STEP:
            if self._hang_timeout_s is not None:
                return self._hang_timeout_s
            return max(settings.hang_min_s, settings.hang_factor * (progress.step_p99_s or 0.0))
        allowed = {
            Phase.START: settings.hang_start_s,
            Phase.FIRST_STEP: settings.hang_first_step_s,
            Phase.EVALUATION: settings.hang_evaluation_s,
            Phase.FINISH: settings.hang_evaluation_s,
        }
        return max(allowed[progress.phase], self._hang_timeout_s or 0.0)


def find_stuck(stacks: Mapping[int, str | None]) -> list[int]:
    """Return the ranks that the others are waiting for.

    A rank is stuck if it does not answer, or if it runs code that waits for nobody. If all ranks
    wait for each other in collectives, the last one is given up to free the others, since rank 0
    reports.

    Args:
        stacks: Each rank's training stack, innermost frame last; None for one that did not answer.
    """
    silent = [rank for rank, stack in stacks.items() if stack is None]
    if silent:
        return silent
    busy = [
        rank for rank, stack in stacks.items() if stack is not None and not waits_for_others(stack)
    ]
    return busy or [max(stacks)]


def is_known_who_hangs(stacks: Mapping[int, str | None]) -> bool:
    """Return whether the stacks show who holds up the others: not where all wait for each other, as
    ranks on GPUs do whatever happens."""
    return any(stack is None or not waits_for_others(stack) for stack in stacks.values())


def find_silent(
    asked_at: Mapping[int, float],
    stacks: Mapping[int, str | None],
    waiting: Collection[int],
    now: float,
    silent_s: float = SILENT_S,
) -> list[int]:
    """Return the ranks to kill while a group shuts down: those that do not answer, if another rank
    that does is blocked in a collective.

    Without such a rank, killing would free nobody: a rank that is busy writing its state may be
    slow to answer.

    Args:
        asked_at: When each rank was last asked, in monotonic seconds.
        stacks: Stacks of ranks that answered and are still in their step.
        waiting: Ranks that have not ended.
        now: Monotonic seconds.
        silent_s: How long a rank may not answer.
    """
    silent = silent_ranks(asked_at, waiting, now, silent_s)
    if not silent:
        return []
    answering = {*waiting}.difference(silent)
    held_up = any(_cannot_leave(stacks.get(rank) or "") for rank in answering)
    return silent if held_up else []


def silent_ranks(
    asked_at: Mapping[int, float],
    waiting: Collection[int],
    now: float,
    silent_s: float = SILENT_S,
) -> list[int]:
    """Return the ranks in ``waiting`` that have not answered for ``silent_s``; the arguments are
    those of ``find_silent``."""
    return [rank for rank in sorted(waiting) if now - asked_at[rank] > silent_s]


def may_still_leave(stacks: Mapping[int, str | None], waiting: Collection[int]) -> bool:
    """Return whether one of the ranks in ``waiting`` runs code that waits for nobody, so that it
    will come to its next collective, leave there, and keep its state.

    Args:
        stacks: stacks of ranks that answered and are still in their step.
        waiting: ranks that have not ended, and answer.
    """
    return any((stack := stacks.get(rank)) and not _cannot_leave(stack) for rank in waiting)


def _cannot_leave(stack: str) -> bool:
    """Return whether a rank waits for others, or for its connections to them to close."""
    return waits_for_others(stack) or stack.rstrip().rpartition("File ")[2].partition("\n")[
        0
    ].endswith(", in leave")


def waits_for_others(stack: str) -> bool:
    """Return whether a training stack ends in code that waits for other ranks."""
    files = re.findall(r'File "([^"]+)", line \d+', stack)
    return bool(files) and any(part in files[-1] for part in WAITING_FILES)
