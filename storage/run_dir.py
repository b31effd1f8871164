"""A run's directory: with ``run_control`` and ``run_names`` the only place that knows its
layout.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.errors import CorruptFile, InvalidStorage, StorageNotFound
from storage.files.protocol import Files
from storage.filesystem import Storage
from storage.run_control import NAME, RunControl

if TYPE_CHECKING:
    from everstep.spec.run_spec import RunSpec

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SUBMISSION = re.compile(r"s([0-9]{3,})(\.jsonl)?")
_RUNS = "runs"
DRIVER_ATTEMPT = 0


@dataclass(frozen=True)
class RunDir(RunControl):
    """One run's directory, ``STORAGE/runs/RUN_ID``, whether or not it exists. Picklable. Ray Train
    uses it as its experiment directory."""

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
        """Return the URI of the directory."""
        return self.storage.child_uri(self._path())

    @property
    def parent_uri(self) -> str:
        """Return the URI of the directory of all runs. Ray Train gets it as ``storage_path``, with
        ``run_id`` as ``name``."""
        return self.storage.child_uri("runs")

    @property
    def local_path(self) -> str | None:
        """Return the directory's path on this machine; None on an object store."""
        return self.files.path(self._path()) if self.storage.is_local else None

    @property
    def work_path(self) -> str | None:
        """Return the working directory of a user's script on this machine; None on an object
        store."""
        return self.files.path(self._path("workdir")) if self.storage.is_local else None

    def tensorboard_path(self, name: str) -> str:
        return self._path(f"tensorboard/{name}")

    def wandb_path(self, name: str) -> str:
        """Return where W&B's files lie, and ``run.json``, which says what became of them."""
        return self._path(f"wandb/{name}")

    def write_spec(self, spec: RunSpec) -> None:
        """Write the resolved spec."""
        self.files.write(self._path("spec.json"), spec.model_dump_json(indent=2).encode())

    def read_spec(self) -> RunSpec:
        """Return the resolved spec. Raises StorageNotFound; CorruptFile if it is not a valid
        spec."""
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

    def trace_path(self, profile_id: str) -> str:
        """Return the path of a profile's trace, gzipped JSON."""
        if not NAME.fullmatch(profile_id):
            raise InvalidStorage(f"{profile_id!r} cannot name a profile")
        return self._path(f"profiles/{profile_id}.json.gz")

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
            attempt = ATTEMPT_LOGS.fullmatch(directory.name)
            if attempt:
                found |= set(self.rank_logs_of(int(attempt[1]), int(attempt[2])))
        return sorted(found)

    def rank_logs_of(self, submission: int, attempt: int) -> list[RankLog]:
        """Return every part of every rank's log in one attempt, by rank and part. Attempt 0 has the
        driver's."""
        entries = self.files.list(self._path(f"logs/s{submission:03d}-a{attempt:03d}"))
        matches = {match for entry in entries if (match := RANK_LOG.fullmatch(entry.name))}
        return sorted(
            {
                RankLog(submission, attempt, int(match[1]) if match[1] else -1, int(match[2] or 1))
                for match in matches
            }
        )

    def checkpoints_path(self, name: str = "") -> str:
        return self._path(f"checkpoints/{name}" if name else "checkpoints")

    def holds_path(self, name: str = "") -> str:
        return self._path(f"control/holds/{name}" if name else "control/holds")

    def claim_path(self, origin: Origin) -> str:
        """Return the path of an attempt's claim; attempt 0 is the claim of the submission."""
        submission, attempt = origin
        return self._path(
            f"control/claims/s{submission:03d}" + (f".a{attempt:03d}" if attempt else "") + ".json"
        )

    def _path(self, relpath: str = "") -> str:
        return f"{_RUNS}/{self.run_id}/{relpath}" if relpath else f"{_RUNS}/{self.run_id}"


# ---------------------------------------------------------------- run names

# Names in a run's directory: checkpoints and logs of ranks.

Origin = tuple[int, int]
"""Submission and attempt: later ones compare as greater."""


ATTEMPT_LOGS = re.compile(r"s([0-9]{3,})-a([0-9]{3,})")


RANK_LOG = re.compile(r"(?:rank-([0-9]+)|driver)(?:\.([0-9]+))?(\.jsonl)?")


_CHECKPOINT = re.compile(r"step-([0-9]{9,})\.s([0-9]{3,})\.a([0-9]{3,})")


@dataclass(frozen=True, order=True)
class RankLog:
    """One part of a rank's log in one attempt. The driver has ``rank`` -1 and attempt 0. Parts are
    numbered from 1."""

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
    """A parsed name such as ``step-000000150.s002.a003``, whether or not the checkpoint exists.
    Ordered by step."""

    step: int
    submission: int
    attempt: int
    """Attempt that writes it."""

    def __str__(self) -> str:
        return f"step-{self.step:09d}.s{self.submission:03d}.a{self.attempt:03d}"

    @property
    def origin(self) -> Origin:
        return self.submission, self.attempt

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        """Parse a name. Return None if it is not a checkpoint's, or not in canonical form."""
        match = _CHECKPOINT.fullmatch(name)
        found = CheckpointName(int(match[1]), int(match[2]), int(match[3])) if match else None
        return found if str(found) == name else None
