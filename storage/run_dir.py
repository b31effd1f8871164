"""A run's directory: the only module that knows where its files are (contract, "Files in a run
directory")."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from everstep.spec import plain_text
from everstep.wire.drills import DrillKind
from storage.errors import CorruptFile, InvalidStorage, StorageNotFound
from storage.files.protocol import Files
from storage.filesystem import Storage

if TYPE_CHECKING:
    from everstep.spec.run_spec import RunSpec

T = TypeVar("T")
Stop = Literal["cancel", "pause"]
Origin = tuple[int, int]
"""Submission and attempt: later ones compare as greater."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SUBMISSION = re.compile(r"s([0-9]{3,})(\.jsonl)?")
_ATTEMPT_LOGS = re.compile(r"s([0-9]{3,})-a([0-9]{3,})")
_RANK_LOG = re.compile(r"(?:rank-([0-9]+)|driver)(?:\.([0-9]+))?(\.jsonl)?")
_CHECKPOINT = re.compile(r"step-([0-9]{9,})\.s([0-9]{3,})(?:\.a([0-9]{3,}))?")
_RUNS = "runs"
_DEADLINE, _KEPT, _WORKERS = "deadline.json", "kept.json", "workers.json"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_PROBE_BYTES = 4096
_MAX_CONTROL_BYTES = 1 << 20
DRIVER_ATTEMPT = 0
DRIVER_PROBE = "driver"
STOPS: tuple[Stop, ...] = ("cancel", "pause")


@dataclass(frozen=True, order=True)
class RankLog:
    """One rank's log in one attempt. ``rank`` -1 is the driver's, whose attempt is 0. A long log
    has several parts, counted from 1."""

    submission: int
    attempt: int
    rank: int
    part: int = 1

    @property
    def name(self) -> str:
        """Return the name of its file or directory, without suffix."""
        whose = "driver" if self.rank < 0 else f"rank-{self.rank}"
        return whose if self.part == 1 else f"{whose}.{self.part}"


@dataclass(frozen=True, order=True)
class CheckpointName:
    """A parsed name such as ``step-000000150.s002.a003``, whether or not there is such a
    checkpoint. Ordered by step."""

    step: int
    submission: int
    attempt: int = 0
    """Who writes it; 0 in the names of older versions (``step-000000150.s002``), which say only the
    submission."""

    def __str__(self) -> str:
        attempt = f".a{self.attempt:03d}" if self.attempt else ""
        return f"step-{self.step:09d}.s{self.submission:03d}{attempt}"

    @property
    def origin(self) -> Origin:
        return self.submission, self.attempt

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        """Parse a name; None where it is not a checkpoint's, or not in the form that is written."""
        match = _CHECKPOINT.fullmatch(name)
        found = CheckpointName(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None
        return found if str(found) == name else None


@dataclass(frozen=True)
class DrillOrder:
    """A drill that the service orders from a submission's driver."""

    id: str
    kind: DrillKind
    rank: int
    attempt: int
    """The attempt that is meant; no other one may be hit."""


@dataclass(frozen=True)
class ProfileOrder:
    """A profile that the service orders from a rank."""

    id: str
    rank: int
    steps: int
    attempt: int
    """The attempt that is meant; the same rank of another one is not recorded."""


@dataclass(frozen=True)
class Kept:
    """What the service tells a run's retention about its checkpoints."""

    steps: frozenset[int] = frozenset()
    """Steps of the checkpoints that other runs are to begin from."""
    corrupt: frozenset[str] = frozenset()
    """Names of checkpoints that were damaged when they were read back."""


@dataclass(frozen=True)
class RunDir:
    """One run's directory below ``STORAGE/runs/``, whether or not it exists. Picklable. It is also
    Ray Train's experiment directory."""

    storage: Storage
    run_id: str

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise InvalidStorage(f"run id {self.run_id!r} cannot name a directory")

    def __reduce__(self) -> tuple[object, ...]:
        return RunDir, (self.storage, self.run_id)

    @property
    def files(self) -> Files:
        return self.storage.files

    @property
    def uri(self) -> str:
        """Return the URI of the run's directory."""
        return self.storage.child_uri(self._path())

    @property
    def parent_uri(self) -> str:
        """Return the URI of the directory of all runs: Ray Train's ``storage_path``, with
        ``run_id`` as its ``name``."""
        return self.storage.child_uri("runs")

    @property
    def local_path(self) -> str | None:
        """Return the directory's path on this machine; None on an object store."""
        return self.files.path(self._path()) if self.storage.is_local else None

    def tensorboard_path(self, name: str) -> str:
        return self._path(f"tensorboard/{name}")

    def write_spec(self, spec: RunSpec) -> None:
        """Write the resolved spec."""
        self.files.write(self._path("spec.json"), spec.model_dump_json(indent=2).encode())

    def read_spec(self) -> RunSpec:
        """Return the resolved spec. Raises StorageNotFound, or CorruptFile if it is not a spec."""
        from pydantic import ValidationError

        from everstep.spec.run_spec import RunSpec

        path = self._path("spec.json")
        try:
            return RunSpec.model_validate_json(self.files.read(path))
        except ValidationError as exc:
            raise CorruptFile(f"{self.files.path(path)} is not a run's spec: {exc}") from exc

    def submissions(self) -> list[int]:
        """Return the submissions that have a journal, oldest first."""
        matches = (
            _SUBMISSION.fullmatch(entry.name) for entry in self.files.list(self._path("events"))
        )
        return sorted({int(match[1]) for match in matches if match})

    def request_stop(self, submission: int, stop: Stop) -> None:
        """Ask a submission's driver to stop. A pause may become a cancel, never the reverse."""
        if stop == "pause" and self.stop_requested(submission) == "cancel":
            return
        self._write_control(_stop_file(submission), {"stop": stop})

    def stop_requested(self, submission: int) -> Stop | None:
        """Return the stop that was requested of a submission's driver. Raises CorruptFile."""

        def read(found: Any) -> Stop:
            for stop in STOPS:
                if found == {"stop": stop}:
                    return stop
            raise ValueError(repr(found)[:80])

        return self._read_control(_stop_file(submission), read, "is not a stop request")

    def order_drill(self, submission: int, order: DrillOrder) -> None:
        """Order a drill from a submission's driver. It replaces an earlier order."""
        self._write_control(_drill_file(submission), asdict(order))

    def drill_ordered(self, submission: int) -> DrillOrder | None:
        """Return the newest drill ordered from a submission's driver, also if it was carried out.
        Raises CorruptFile."""

        def read(found: Any) -> DrillOrder:
            return DrillOrder(
                str(found["id"]),
                DrillKind(found["kind"]),
                int(found["rank"]),
                int(found["attempt"]),
            )

        return self._read_control(_drill_file(submission), read, "is not a drill")

    def order_profile(self, submission: int, order: ProfileOrder) -> None:
        """Order a profile from a submission's ranks. It replaces an earlier order."""
        self._write_control(_profile_file(submission), asdict(order))

    def profile_ordered(self, submission: int) -> ProfileOrder | None:
        """Return the newest profile ordered, also if it is done. Raises CorruptFile."""

        def read(found: Any) -> ProfileOrder:
            return ProfileOrder(
                str(found["id"]), int(found["rank"]), int(found["steps"]), int(found["attempt"])
            )

        return self._read_control(_profile_file(submission), read, "is not an order for a profile")

    def trace_path(self, profile_id: str) -> str:
        """Return the path of a profile's trace, gzipped JSON."""
        if not _NAME.fullmatch(profile_id):
            raise InvalidStorage(f"{profile_id!r} cannot name a profile")
        return self._path(f"profiles/{profile_id}.json.gz")

    def write_deadline(self, at: float) -> None:
        """Write when the run must have ended, in unix seconds. Its driver keeps to it also while
        the service is down."""
        self._write_control(_DEADLINE, {"at": at})

    def deadline(self) -> float | None:
        """Return when the run must have ended, in unix seconds; None for a run without a deadline.
        Raises CorruptFile."""
        return self._read_control(
            _DEADLINE, lambda found: float(found["at"]), "does not hold a deadline"
        )

    def keep_steps(self, steps: Collection[int], corrupt: Collection[str] = ()) -> None:
        """Make retention keep the checkpoints of exactly these steps, from which other runs are to
        begin.

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

    def kept_steps(self) -> frozenset[int]:
        """Return the steps of ``kept``. Raises CorruptFile."""
        return self.kept().steps

    def write_probe(self, submission: int, name: str) -> None:
        """Write a file by which other nodes check that they see the same storage. ``name`` is a
        node's id or DRIVER_PROBE."""
        self.files.write(self._probe_path(submission, name), probe_bytes(self, submission, name))

    def read_probe(self, submission: int, name: str) -> bytes:
        """Return a probe, which should equal ``probe_bytes``. Raises StorageNotFound where this
        node does not see it."""
        return self.files.read(self._probe_path(submission, name), _PROBE_BYTES)

    def write_workers_limit(self, limit: int | None) -> None:
        """Limit the run to fewer ranks than its spec asks for; None is no limit."""
        self._write_control(_WORKERS, {"limit": limit})

    def workers_limit(self) -> int | None:
        """Return how many ranks the run may use; None for as many as its spec asks for. Raises
        CorruptFile."""

        def read(found: Any) -> int | None:
            return None if found["limit"] is None else int(found["limit"])

        return self._read_control(_WORKERS, read, "does not hold a limit of workers")

    def delete(self) -> None:
        """Delete the directory with everything in it, durably."""
        self.files.delete_dir(self._path())
        with suppress(StorageNotFound):  # no run was ever written there
            self.files.sync_dir(_RUNS)

    def journal_stem(self, submission: int) -> str:
        return self._path(f"events/s{submission:03d}")

    def rank_log_stem(self, log: RankLog) -> str:
        return self._path(f"logs/s{log.submission:03d}-a{log.attempt:03d}/{log.name}")

    def rank_logs(self) -> list[RankLog]:
        """Return every part of every rank's log, by submission, attempt, rank and part."""
        found: set[RankLog] = set()
        for directory in self.files.list(self._path("logs")):
            attempt = _ATTEMPT_LOGS.fullmatch(directory.name)
            if attempt:
                found |= set(self.rank_logs_of(int(attempt[1]), int(attempt[2])))
        return sorted(found)

    def rank_logs_of(self, submission: int, attempt: int) -> list[RankLog]:
        """Return every part of every rank's log of one attempt, by rank and part; the driver's for
        attempt 0."""
        entries = self.files.list(self._path(f"logs/s{submission:03d}-a{attempt:03d}"))
        matches = {match for entry in entries if (match := _RANK_LOG.fullmatch(entry.name))}
        return sorted(
            {
                RankLog(submission, attempt, int(match[1]) if match[1] else -1, int(match[2] or 1))
                for match in matches
            }
        )

    def checkpoints_path(self, name: str = "") -> str:
        return self._path(f"checkpoints/{name}" if name else "checkpoints")

    def _write_control(self, name: str, content: Mapping[str, Any]) -> None:
        self.files.write(self._path(f"control/{name}"), json.dumps(content).encode())

    def _read_control(self, name: str, read: Callable[[Any], T], problem: str) -> T | None:
        """Return what ``read`` makes of a small JSON file's content; None where there is no file.

        Raises CorruptFile, with ``problem`` in its text, where ``read`` raises ValueError, KeyError
        or TypeError.
        """
        path = self._path(f"control/{name}")
        try:
            return read(plain_text.parse_json(self.files.read(path, _MAX_CONTROL_BYTES)))
        except StorageNotFound:
            return None
        except (ValueError, KeyError, TypeError) as exc:
            raise CorruptFile(f"{self.files.path(path)} {problem}: {exc}") from exc

    def holds_path(self, name: str = "") -> str:
        return self._path(f"control/holds/{name}" if name else "control/holds")

    def claim_path(self, origin: Origin) -> str:
        """Return the path of an attempt's claim, or with attempt 0 of a submission's."""
        submission, attempt = origin
        return self._path(
            f"control/claims/s{submission:03d}" + (f".a{attempt:03d}" if attempt else "") + ".json"
        )

    def _probe_path(self, submission: int, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise InvalidStorage(f"{name!r} cannot name a node's probe")
        return self._path(f"control/s{submission:03d}.probes/{name}")

    def _path(self, relpath: str = "") -> str:
        return f"{_RUNS}/{self.run_id}/{relpath}" if relpath else f"{_RUNS}/{self.run_id}"


def probe_bytes(run_dir: RunDir, submission: int, name: str) -> bytes:
    """Return a probe's content, which every reader can compute."""
    return hashlib.shake_128(f"{run_dir.run_id} {submission} {name}".encode()).digest(_PROBE_BYTES)


def _stop_file(submission: int) -> str:
    return f"s{submission:03d}.stop.json"


def _profile_file(submission: int) -> str:
    return f"s{submission:03d}.profile.json"


def _drill_file(submission: int) -> str:
    return f"s{submission:03d}.drill.json"
