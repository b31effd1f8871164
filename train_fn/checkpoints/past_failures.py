"""Read from a run's journals how often it failed, to estimate the time between failures."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from everstep.wire import Verdict
from everstep.wire.events import EventKind
from storage.errors import StorageError
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from train_fn import clock as head_clock

ASSUMED_MTBF_S = 24 * 3600.0
"""Mean seconds between failures that are assumed before the first one. It weighs as much as one
observed failure."""
READ_BATCH = 5000

_NO_RISK = frozenset({Verdict.USER_ERROR.value, Verdict.PREEMPTION.value})
"""Failures that more frequent checkpoints do not help against: code that raises again, and moves
to other nodes, which save first."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObservedFailures:
    """Hold a run's failures and training time so far."""

    num_failures: int = 0
    trained_s: float = 0.0
    """Seconds in which a worker group existed, over all attempts."""

    def mtbf_s(self) -> float:
        """Return the estimated mean seconds between failures: those observed, together with one
        failure in ASSUMED_MTBF_S."""
        return (self.trained_s + ASSUMED_MTBF_S) / (self.num_failures + 1)


def observed_failures(run_dir: RunDir, now: float) -> ObservedFailures:
    """Return the failures and seconds of training in the run's journals. ``now`` is Unix time in
    seconds. Raise StorageError if they cannot be read."""
    num_failures, trained_s, began = 0, 0.0, None
    for submission in run_dir.submissions():
        cursor: str | None = None
        while True:
            events, cursor = read_journal(run_dir, submission, cursor, READ_BATCH, past_damage=True)
            for event in events:
                if event.kind is EventKind.ATTEMPT_STARTED:
                    began = event.at
                elif (
                    event.kind in (EventKind.ATTEMPT_ENDED, EventKind.FAILURE) and began is not None
                ):
                    trained_s, began = trained_s + max(0.0, event.at - began), None
                if event.kind is EventKind.FAILURE and event.data.get("verdict") not in _NO_RISK:
                    num_failures += 1
            if not events:
                break
    if began is not None:
        trained_s += max(0.0, now - began)
    return ObservedFailures(num_failures, trained_s)


class PastFailures:
    """Return a run's failures and training time until now, and read the journals only once: the
    present attempt has had no failure yet."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._read: tuple[float, ObservedFailures] | None = None

    def observed(self) -> ObservedFailures:
        """Return the failures so far; none if the journals cannot be read. The next call then tries
        again."""
        now = head_clock.now()
        if self._read is None:
            try:
                self._read = (now, observed_failures(self._run_dir, now))
            except StorageError as exc:
                logger.warning(
                    "cannot read the run's failures from its journals; the next save tries again: "
                    "%s",
                    exc,
                )
                return ObservedFailures()
        at, past = self._read
        return replace(past, trained_s=past.trained_s + now - at)
