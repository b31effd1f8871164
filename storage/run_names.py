"""Names in a run's directory: checkpoints and logs of ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

Origin = tuple[int, int]
"""Submission and attempt: later ones compare as greater."""


ATTEMPT_LOGS = re.compile(r"s([0-9]{3,})-a([0-9]{3,})")


RANK_LOG = re.compile(r"(?:rank-([0-9]+)|driver)(?:\.([0-9]+))?(\.jsonl)?")


_CHECKPOINT = re.compile(r"step-([0-9]{9,})\.s([0-9]{3,})(?:\.a([0-9]{3,}))?")


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
    attempt: int = 0
    """Attempt that writes it; 0 in names of older versions (``step-000000150.s002``), which have
    only the submission."""

    def __str__(self) -> str:
        attempt = f".a{self.attempt:03d}" if self.attempt else ""
        return f"step-{self.step:09d}.s{self.submission:03d}{attempt}"

    @property
    def origin(self) -> Origin:
        return self.submission, self.attempt

    @staticmethod
    def parse(name: str) -> CheckpointName | None:
        """Parse a name. Return None if it is not a checkpoint's, or not in canonical form."""
        match = _CHECKPOINT.fullmatch(name)
        found = CheckpointName(int(match[1]), int(match[2]), int(match[3] or 0)) if match else None
        return found if str(found) == name else None
