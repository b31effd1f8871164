"""Pass bytes between nodes before a group starts, if ranks of an earlier attempt could not.

Nodes that merely connect to each other may still not train together: a path may lose large packets,
or a firewall may close the ports of ranks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from train_fn.ray_train.start_checks import ExcludeNodes, LinksBroken, first_on_nodes, prepared
from train_fn.recovery.links import WHAT_TO_CHECK, Pair, Pairs, pairs_of, words
from train_fn.recovery.partition import nodes_to_exclude
from train_fn.recovery.settings import RecoverySettings

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Timeout in seconds for a block of bytes between two nodes."""
MOST_NODES = 6
"""Largest group whose pairs are all checked. Of a larger one, each node and the next are."""


class LinkChecks:
    """Remember which pairs of nodes are suspect, and check them at the next start.

    Args:
        settings: the timeout of a start.
        exclude: called with nodes that get no ranks for a while.
    """

    def __init__(self, settings: RecoverySettings, exclude: ExcludeNodes) -> None:
        self._settings = settings
        self._exclude = exclude
        self._suspects: Pairs = frozenset()
        self._all = False

    def suspect(self, pairs: Pairs) -> None:
        """Check these pairs at the next start; all, if it is unknown which pair failed."""
        self._suspects |= pairs
        self._all |= not pairs

    def run(self, actors: Sequence[Any], metas: Sequence[Any]) -> None:
        """Check the suspect pairs among a starting group's nodes. A pair that passes is suspect no
        more.

        Raise LinksBroken if no bytes pass between two nodes. One of the two is excluded.
        """
        firsts = first_on_nodes(metas)
        ips = {node_id: str(metas[number].node_ip) for node_id, number in firsts.items()}
        if len(set(ips.values())) < max(2, len(ips)):
            return  # nodes that share a machine
        chosen = {node_id: actors[number] for node_id, number in firsts.items()}
        unheard: dict[str, list[str]] = {}
        for pair in self._to_check(sorted(ips)):
            for listener in self._deaf(pair, chosen, ips):
                unheard.setdefault(listener, []).extend(pair - {listener})
        self._suspects, self._all = pairs_of(unheard), False
        if unheard:
            out = nodes_to_exclude(unheard)
            self._exclude(out)
            raise LinksBroken(
                f"{words(pairs_of(unheard))}: they connect, but no bytes pass within "
                f"{TIMEOUT_S:g} s; excluded for now: {', '.join(out)}. {WHAT_TO_CHECK}",
                unheard,
            )

    def _to_check(self, node_ids: list[str]) -> list[Pair]:
        here = set(node_ids)
        found = {pair for pair in self._suspects if pair <= here}
        if self._all and len(node_ids) <= MOST_NODES:
            found |= {frozenset(pair) for pair in itertools.combinations(node_ids, 2)}
        elif self._all:
            found |= {frozenset(pair) for pair in itertools.pairwise([*node_ids, node_ids[0]])}
        return sorted(found, key=sorted)

    def _deaf(self, pair: Pair, actors: Mapping[str, Any], ips: Mapping[str, str]) -> list[str]:
        """Return the nodes of a pair to which the other one could pass no bytes."""
        one, other = sorted(pair)
        ends = prepared(
            [actors[node_id].take_in.remote(ips[node_id], TIMEOUT_S) for node_id in (one, other)],
            self._settings,
        )
        times = prepared(
            [
                actors[other].pass_time.remote(ends[0], TIMEOUT_S),
                actors[one].pass_time.remote(ends[1], TIMEOUT_S),
            ],
            self._settings,
        )
        return [
            node_id for node_id, seconds in zip((one, other), times, strict=True) if seconds is None
        ]
