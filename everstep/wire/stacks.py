"""What the ranks of a run do now: the Python stacks of their training threads."""

from __future__ import annotations

from everstep.wire.base import Answer, Time


class RankStack(Answer):
    rank: int
    node_id: str
    does: str
    """What it does, in words: ``waits in ray.train.report (train.py, line 12)``."""
    stack: str | None
    """The Python stacks of its process, its training thread last; null if it does not answer.
    Values of secrets are removed."""


class StackReport(Answer):
    """The ranks at one moment: because somebody asked, or because nothing had moved for a while."""

    id: str | None
    """Of the request; null for a report that nobody asked for."""
    at: Time
    attempt: int
    complete: bool
    """Whether the ranks' stacks are there. If not, the request has not been carried out yet."""
    quiet_s: float | None = None
    """Seconds for which nothing had moved then."""
    step: int | None = None
    """Steps done then; null before the first."""
    summary: str | None = None
    """What the ranks do, and what to change where that is known."""
    ranks: tuple[RankStack, ...] = ()
