"""Which alerts hold for a run. A pure function of facts: what triggers and what is resolved follows
from the incidents that are open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from everstep.wire import RunStatus
from everstep.wire.alerts import AlertWhen

HOUR_S: Final = 3600.0
WHOLE_RUN: Final = "run"
"""Subject of an incident that is not about one rank."""
_WORKING: Final = frozenset({RunStatus.STARTING, RunStatus.RUNNING, RunStatus.RECOVERING})
"""Statuses in which a run should make steps."""


class Rule(Protocol):
    """When an alert triggers."""

    @property
    def when(self) -> AlertWhen: ...
    @property
    def more_than(self) -> int | None: ...
    @property
    def stalled_s(self) -> float | None: ...


@dataclass(frozen=True)
class RunFacts:
    """What rules depend on. Times are unix seconds."""

    status: RunStatus
    recovered_at: tuple[float, ...] = ()
    """Recoveries, at least those of the last hour."""
    slow_ranks: frozenset[int] = frozenset()
    """Ranks of the current attempt that slow their peers down."""
    progressed_at: float | None = None
    """The last step, or the start of work after a queue or pause. None if the run reports no
    steps."""


@dataclass(frozen=True)
class Changes:
    """Incidents, by subject, that begin and end now."""

    triggered: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()


def holding(rule: Rule, facts: RunFacts, now: float) -> frozenset[str]:
    """Return the subjects for which the rule holds now.

    What holds for a run that has ended is final: ``failed`` and ``finished`` are never resolved.
    """
    match rule.when:
        case "failed":
            holds = facts.status is RunStatus.FAILED
        case "finished":
            holds = facts.status.terminal
        case "recovered":
            recent = sum(now - HOUR_S < at for at in facts.recovered_at)
            holds = not facts.status.terminal and recent > (rule.more_than or 0)
        case "stalled":
            silent_s = 0.0 if facts.progressed_at is None else now - facts.progressed_at
            holds = facts.status in _WORKING and silent_s >= (rule.stalled_s or HOUR_S)
        case "straggler":
            slow = facts.slow_ranks if facts.status in _WORKING else ()
            return frozenset(f"rank {rank}" for rank in slow)
    return frozenset({WHOLE_RUN} if holds else ())


def changes(rule: Rule, facts: RunFacts, now: float, open_ones: frozenset[str]) -> Changes:
    """Return what triggers and what is resolved, given the subjects of the open incidents."""
    holds = holding(rule, facts, now)
    return Changes(tuple(sorted(holds - open_ones)), tuple(sorted(open_ones - holds)))
