"""Which nodes a run does without for a while: such as do not hear each other, and slow ones.

A rank reports the hosts from which nothing came although it waited for an acknowledgement. A peer
that died or left has closed its connection instead, and is not reported. So a report shows that the
path between two nodes is broken, but not which of them is at fault: nobody is cordoned for it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from train_fn.recovery.sizing import NodeView

Pair = frozenset[str]
"""Ids of two nodes."""
Pairs = frozenset[Pair]

MOVED_AFTER = 2
"""Number of failures of one pair after which one of the two gives way to another node."""
ENDED_AFTER = 5
"""Number of them without a new step after which the run ends, if there is no other node."""
MOST_PAIRS = 256
"""Pairs of one failure that its event names: a torn network has them by the square of its nodes."""

WHAT_TO_CHECK = (
    "Check the network between them: an MTU that is too large for the path, a firewall that closes "
    "the ports of ranks, the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
)


def pairs_of(unheard: Mapping[str, Iterable[str]]) -> Pairs:
    """Return the pairs of nodes of which at least one did not hear the other.

    Args:
        unheard: for each node, the nodes that it did not hear.
    """
    return frozenset(
        frozenset((node, other))
        for node, others in unheard.items()
        for other in others
        if other != node
    )


def node_to_move(pairs: Pairs, past: Sequence[Pairs], dispensable: Collection[str]) -> str | None:
    """Return the node that should give way to another one; None while no pair has failed
    ``MOVED_AFTER`` times, or if the run cannot do without either node.

    Of the nodes of such pairs, the one in most failures is chosen. Ties go to the greatest id, so
    that the choice is the same each time.

    Args:
        pairs: of this failure.
        past: of each earlier failure of the run.
        dispensable: nodes without which the run still has enough room.
    """
    repeated = [
        pair for pair in pairs if sum(pair in earlier for earlier in past) + 1 >= MOVED_AFTER
    ]
    seen = Counter(node for found in (*past, pairs) for pair in found for node in pair)
    candidates = {node for pair in repeated for node in pair} & set(dispensable)
    return max(candidates, key=lambda node: (seen[node], node), default=None)


def times_in_a_row(pairs: Pairs, past: Sequence[tuple[Pairs, int | None]], step: int | None) -> int:
    """Return how often a pair of this failure has failed since the run last took a step, this
    failure included. Failures of another kind do not count, and do not interrupt the row.

    Args:
        past: the pairs of each earlier failure, and the steps done by then; None if unknown.
        step: the steps done now; None if unknown.
    """
    count = 1
    for earlier, earlier_step in reversed(past):
        if step is not None and earlier_step is not None and step > earlier_step:
            break
        count += bool(pairs & earlier)
    return count


def words(pairs: Pairs) -> str:
    """Return a phrase that names the nodes of each pair by the first letters of their ids."""
    named = [" and ".join(node[:8] for node in pair) for pair in as_json(pairs)[:8]]
    others = f" and {len(pairs) - 8} more pairs" if len(pairs) > 8 else ""
    return f"nodes {', '.join(named)}{others} do not hear each other"


def as_json(pairs: Pairs) -> list[list[str]]:
    """Return the pairs for an event, ``MOST_PAIRS`` at most."""
    return sorted(sorted(pair) for pair in pairs)[:MOST_PAIRS]


def from_json(value: object) -> Pairs:
    """Return the pairs of an event; none if it names none."""
    return frozenset(map(frozenset, value)) if isinstance(value, list) else frozenset()


# ---------------------------------------------------------------- partition

# Exclude nodes that the head can reach but other nodes cannot.
#
# A group whose ranks cannot all reach each other never starts. So each node tries to connect to the
# others before the process group is created. Nodes that are cut off are excluded for a while,
# longer each time.

LONGEST_TIMES = 16
"""Longest exclusion, as a multiple of the first one."""


def nodes_to_exclude(unreached: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the nodes to exclude so that all others can reach each other.

    The node with the most broken pairs is excluded first. Ties go to the greatest id, so that the
    choice is the same each time.

    Args:
        unreached: For each node, the nodes that it could not reach.
    """
    broken: dict[str, set[str]] = {}
    for node, others in unreached.items():
        for other in others:
            broken.setdefault(node, set()).add(other)
            broken.setdefault(other, set()).add(node)
    out: list[str] = []
    while broken:
        worst = max(broken, key=lambda node: (len(broken[node]), node))
        out.append(worst)
        for other in broken.pop(worst) - {worst}:
            broken[other].discard(worst)
            if not broken[other]:
                del broken[other]
    return out


class ExcludedNodes:
    """Remembers which nodes are excluded, and until when (monotonic seconds)."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._until: dict[str, float] = {}
        self._times: Counter[str] = Counter()

    def exclude(self, nodes: Iterable[str], now: float) -> None:
        """Exclude ``nodes`` for a while, starting at ``now``."""
        for node in nodes:
            self._until[node] = now + self._first_s * min(2.0 ** self._times[node], LONGEST_TIMES)
            self._times[node] += 1

    def mark(self, nodes: Iterable[NodeView], now: float) -> tuple[NodeView, ...]:
        """Return the nodes with excluded ones marked as cordoned."""
        return tuple(
            dataclasses.replace(node, cordoned=True)
            if self._until.get(node.node_id, now) > now
            else node
            for node in nodes
        )


# ---------------------------------------------------------------- slow nodes

# Decide when a run leaves a node because a rank is slow there. The caller has the clock.
#
# A slow rank holds up all others. Somewhere else it may be as fast as they are, or not, if it is
# its work that takes so long: then nothing moves any more.

SLOW_RATIO = 1.5
"""A slow rank takes at least this many times as long as its peers for the same work."""
AWAY_S = 3600.0
"""Seconds for which a run stays away from a node that it has left, and for which nothing moves
where a move did not help."""
EVEN_LOOKS = 2
"""Looks at the times of all ranks, of one a minute, that must find no slow rank before the node
that was left is to blame."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that has held its peers up for a minute, as rank 0 has reported it."""

    rank: int
    node_id: str
    skew: float
    """How many times as long as its peers it takes for its share of a step."""


@dataclass(frozen=True)
class Speeds:
    """What is known of the ranks' speeds in one attempt."""

    slow: tuple[SlowRank, ...] = ()
    num_even: int = 0
    """Looks at the times of all ranks in a row, of one a minute, that found none slow."""


@dataclass(frozen=True)
class NodeMove:
    """A move away from a node. ``attempt`` is the one in which the rank was slow."""

    slow: SlowRank
    attempt: int
    stays: bool | None = None
    """Whether the slowness stayed with the node; None while nobody knows."""


class SlowNodes:
    """Remembers which nodes a run has left. One move at a time: the next one waits until it is
    known whether the last one helped. None are made without ``moves``."""

    def __init__(self, *, moves: bool) -> None:
        self._moves = moves
        self._until: dict[str, float] = {}
        self._rests_until = float("-inf")
        self._open: NodeMove | None = None

    def leave(
        self, speeds: Speeds, attempt: int, now: float, has_room: Callable[[str], bool]
    ) -> NodeMove | None:
        """Return the move to make now, and count it as made; None if no rank is slow, or none may
        move.

        Args:
            attempt: the one that trains, whose speeds these are.
            now: monotonic seconds.
            has_room: returns whether all ranks fit on the cluster without a node.
        """
        waits = self._open is not None and self._open.slow.node_id in self.away(now)
        if not self._moves or waits or now < self._rests_until:
            return None
        for slow in sorted(speeds.slow, key=lambda each: -each.skew):
            if self._until.get(slow.node_id, now) <= now and has_room(slow.node_id):
                self._until[slow.node_id] = now + AWAY_S
                self._open = NodeMove(slow, attempt)
                return self._open
        return None

    def judge(self, speeds: Speeds, attempt: int, now: float) -> NodeMove | None:
        """Return the last move with what a later attempt shows about it, once; None as long as
        that shows nothing."""
        move = self._open
        if move is None or attempt <= move.attempt:
            return None
        follows = any(each.node_id != move.slow.node_id for each in speeds.slow)
        if not follows and speeds.num_even < EVEN_LOOKS:
            return None
        self._open = None
        if follows:
            self._rests_until = now + AWAY_S
        return dataclasses.replace(move, stays=not follows)

    def away(self, now: float) -> frozenset[str]:
        """Return the nodes that the run stays away from."""
        return frozenset(node for node, until in self._until.items() if now < until)

    def forgive(self) -> None:
        """Use all nodes again: a slow one is better than none."""
        self._until.clear()

    def mark(self, nodes: Iterable[NodeView], now: float) -> tuple[NodeView, ...]:
        """Return the nodes, with those to stay away from as draining."""
        away = self.away(now)
        return tuple(
            dataclasses.replace(node, draining=True) if node.node_id in away else node
            for node in nodes
        )
