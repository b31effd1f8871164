"""Control files of a run: requests from the service to the driver and the ranks, in
``control/``."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from everstep.spec import plain_text
from everstep.wire.drills import DrillKind
from everstep.wire.events import WRONG_BITS
from storage.errors import CorruptFile, InvalidStorage, StorageNotFound
from storage.files.protocol import Files

T = TypeVar("T")
Stop = Literal["cancel", "pause"]
_DEADLINE, _KEPT, _WORKERS = "deadline.json", "kept.json", "workers.json"
_DISTRUSTED = "distrusted.json"
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_PROBE_BYTES = 4096
_MAX_CONTROL_BYTES = 1 << 20
DRIVER_PROBE = "driver"
STOPS: tuple[Stop, ...] = ("cancel", "pause")


@dataclass(frozen=True)
class DrillOrder:
    """A drill that the service requests from a submission's driver."""

    id: str
    kind: DrillKind
    rank: int
    attempt: int
    """Attempt to hit; no other one may be."""


@dataclass(frozen=True)
class ProfileOrder:
    """A profile that the service requests from a rank."""

    id: str
    rank: int
    steps: int
    attempt: int
    """Attempt to profile; the same rank of another attempt is not recorded."""


@dataclass(frozen=True)
class StackOrder:
    """A request of the service for the stacks of the ranks of an attempt."""

    id: str
    attempt: int


@dataclass(frozen=True)
class Distrust:
    """States after ``step`` that this attempt or an older one left may hold wrong bits."""

    submission: int
    attempt: int
    step: int

    def covers(self, origin: tuple[int, int], step: int) -> bool:
        """Return whether a state of this submission and attempt, and of this step, is meant."""
        return origin <= (self.submission, self.attempt) and step > self.step

    @property
    def problem(self) -> str:
        """Return why such a state is not used."""
        return (
            f"ranks of attempt {self.attempt} went apart: states after step {self.step} "
            f"{WRONG_BITS}"
        )


def struck_by(
    distrusted: Iterable[Distrust], origin: tuple[int, int], step: int
) -> Distrust | None:
    """Return the entry that forbids to begin from a state of this submission and attempt, and of
    this step; None if none does."""
    return next((entry for entry in distrusted if entry.covers(origin, step)), None)


@dataclass(frozen=True)
class Kept:
    """What the service tells a run's retention about its checkpoints."""

    steps: frozenset[int] = frozenset()
    """Steps of checkpoints that other runs will start from."""
    corrupt: frozenset[str] = frozenset()
    """Names of checkpoints that were corrupt when they were read back."""


class RunControl(ABC):
    """The control files of a run: stop requests, drills, profiles, deadline, limits and storage
    probes."""

    run_id: str

    @property
    @abstractmethod
    def files(self) -> Files:
        """Return the files of the storage."""

    @abstractmethod
    def _path(self, relpath: str = "") -> str:
        """Return a path in the run's directory as the storage names it."""

    def request_stop(self, submission: int, stop: Stop) -> None:
        """Ask a submission's driver to stop. A pause may become a cancel, never the reverse."""
        if stop == "pause" and self.stop_requested(submission) == "cancel":
            return
        self._write_control(_file(submission, "stop"), {"stop": stop})

    def stop_requested(self, submission: int) -> Stop | None:
        """Return the stop requested from a submission's driver; None if there is none. Raises
        CorruptFile."""

        def read(found: Any) -> Stop:
            for stop in STOPS:
                if found == {"stop": stop}:
                    return stop
            raise ValueError(repr(found)[:80])

        return self._read_control(_file(submission, "stop"), read, "is not a stop request")

    def order_drill(self, submission: int, order: DrillOrder) -> None:
        """Request a drill from a submission's driver. It replaces an earlier request."""
        self._write_control(_file(submission, "drill"), asdict(order))

    def drill_ordered(self, submission: int) -> DrillOrder | None:
        """Return the last drill requested from a submission's driver, even if already carried out.
        Raises CorruptFile."""

        def read(found: Any) -> DrillOrder:
            return DrillOrder(
                str(found["id"]),
                DrillKind(found["kind"]),
                int(found["rank"]),
                int(found["attempt"]),
            )

        return self._read_control(_file(submission, "drill"), read, "is not a drill")

    def order_profile(self, submission: int, order: ProfileOrder) -> None:
        """Request a profile from a submission's ranks. It replaces an earlier request."""
        self._write_control(_file(submission, "profile"), asdict(order))

    def profile_ordered(self, submission: int) -> ProfileOrder | None:
        """Return the last profile requested, even if already recorded. Raises CorruptFile."""

        def read(found: Any) -> ProfileOrder:
            return ProfileOrder(
                str(found["id"]), int(found["rank"]), int(found["steps"]), int(found["attempt"])
            )

        return self._read_control(
            _file(submission, "profile"), read, "is not an order for a profile"
        )

    def order_stacks(self, submission: int, order: StackOrder) -> None:
        """Request the stacks of a submission's ranks. It replaces an earlier request."""
        self._write_control(_file(submission, "stacks"), asdict(order))

    def stacks_ordered(self, submission: int) -> StackOrder | None:
        """Return the last request for stacks, even if already carried out. Raises CorruptFile."""

        def read(found: Any) -> StackOrder:
            return StackOrder(str(found["id"]), int(found["attempt"]))

        return self._read_control(_file(submission, "stacks"), read, "is not an order for stacks")

    def write_deadline(self, at: float) -> None:
        """Write the time (unix seconds) by which the run must have ended. Its driver enforces it
        while the service is down."""
        self._write_control(_DEADLINE, {"at": at})

    def deadline(self) -> float | None:
        """Return the time (unix seconds) by which the run must have ended; None for no deadline.
        Raises CorruptFile."""
        return self._read_control(
            _DEADLINE, lambda found: float(found["at"]), "does not hold a deadline"
        )

    def keep_steps(self, steps: Collection[int], corrupt: Collection[str] = ()) -> None:
        """Make retention keep the checkpoints of exactly these steps, which other runs will start
        from.

        Args:
            corrupt: names of checkpoints that retention must not count as sound.
        """
        self._write_control(_KEPT, {"steps": sorted(steps), "corrupt": sorted(corrupt)})

    def kept(self) -> Kept:
        """Return what ``keep_steps`` wrote last. Raises CorruptFile."""

        def read(found: Any) -> Kept:
            corrupt = frozenset(str(name) for name in found.get("corrupt", ()))
            return Kept(frozenset(int(step) for step in found["steps"]), corrupt)

        return self._read_control(_KEPT, read, "does not say which steps to keep") or Kept()

    def distrust(self, entry: Distrust) -> None:
        """Record which states no attempt may begin from. Several ranks may record the same."""
        known = self.distrusted()
        if entry not in known:
            entries = [asdict(each) for each in (*known, entry)]
            self._write_control(_DISTRUSTED, {"states": entries})

    def distrusted(self) -> tuple[Distrust, ...]:
        """Return what ``distrust`` recorded. Raises CorruptFile."""

        def read(found: Any) -> tuple[Distrust, ...]:
            return tuple(
                Distrust(int(each["submission"]), int(each["attempt"]), int(each["step"]))
                for each in found["states"]
            )

        return self._read_control(_DISTRUSTED, read, "does not say which states are wrong") or ()

    def write_probe(self, submission: int, name: str) -> None:
        """Write a file with which other nodes verify that they see the same storage. ``name`` is a
        node id or DRIVER_PROBE."""
        self.files.write(self._probe_path(submission, name), probe_bytes(self, submission, name))

    def read_probe(self, submission: int, name: str) -> bytes:
        """Return a probe, to compare with ``probe_bytes``. Raises StorageNotFound if this node does
        not see it."""
        return self.files.read(self._probe_path(submission, name), _PROBE_BYTES)

    def write_workers_limit(self, limit: int | None) -> None:
        """Limit the run to fewer ranks than its spec allows; None is no limit."""
        self._write_control(_WORKERS, {"limit": limit})

    def workers_limit(self) -> int | None:
        """Return the maximum number of ranks; None for the spec's own. Raises CorruptFile."""

        def read(found: Any) -> int | None:
            return None if found["limit"] is None else int(found["limit"])

        return self._read_control(_WORKERS, read, "does not hold a limit of workers")

    def _write_control(self, name: str, content: Mapping[str, Any]) -> None:
        self.files.write(self._path(f"control/{name}"), json.dumps(content).encode())

    def _read_control(self, name: str, read: Callable[[Any], T], problem: str) -> T | None:
        """Return what ``read`` makes of a small JSON file; None if the file does not exist.

        Raises CorruptFile, with ``problem`` in its text, if ``read`` raises ValueError, KeyError or
        TypeError.
        """
        path = self._path(f"control/{name}")
        try:
            return read(plain_text.parse_json(self.files.read(path, _MAX_CONTROL_BYTES)))
        except StorageNotFound:
            return None
        except (ValueError, KeyError, TypeError) as exc:
            raise CorruptFile(f"{self.files.path(path)} {problem}: {exc}") from exc

    def _probe_path(self, submission: int, name: str) -> str:
        if not NAME.fullmatch(name):
            raise InvalidStorage(f"{name!r} cannot name a node's probe")
        return self._path(f"control/s{submission:03d}.probes/{name}")


def probe_bytes(run: RunControl, submission: int, name: str) -> bytes:
    """Return the content of a probe, which every reader can compute."""
    return hashlib.shake_128(f"{run.run_id} {submission} {name}".encode()).digest(_PROBE_BYTES)


def _file(submission: int, what: str) -> str:
    return f"s{submission:03d}.{what}.json"
