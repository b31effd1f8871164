"""Names in a run's directory: of checkpoints, and of ranks' logs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


Origin = tuple[int, int]
"""Submission and attempt: later ones compare as greater."""


ATTEMPT_LOGS = re.compile(r"s([0-9]{3,})-a([0-9]{3,})")


RANK_LOG = re.compile(r"(?:rank-([0-9]+)|driver)(?:\.([0-9]+))?(\.jsonl)?")


_CHECKPOINT = re.compile(r"step-([0-9]{9,})\.s([0-9]{3,})(?:\.a([0-9]{3,}))?")


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
