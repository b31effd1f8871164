"""Check nodes before a run's ranks first run there. A node that fails, or is far slower than the
others, gets no ranks.

Computation, memory and storage are checked on each node alone. Speeds of these and of links are
compared between nodes, but only if they are different machines. Each node times one link, to the
next node of a ring, so a slow node shows on both of its links.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from everstep.wire import ErrorKind
from everstep.wire.events import NODE_UNFIT
from train_fn.node.fitness import Figures, unfit, wrong
from train_fn.ray_train.start_checks import ExcludeNodes, LinksBroken, first_on_nodes, prepared
from train_fn.recovery.evidence import RankReport
from train_fn.recovery.partition import nodes_to_exclude
from train_fn.recovery.rank_error import RankError
from train_fn.recovery.settings import RecoverySettings

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 10.0
"""Timeout in seconds for one block to pass a link."""


class PreflightChecks:
    """Check nodes once, and remember those that ran a submission's ranks or passed the check.

    Args:
        settings: ``preflight`` turns the checks on.
        known: ids of nodes that ran ranks before.
        exclude: called with nodes that get no ranks for a while.
    """

    def __init__(
        self, settings: RecoverySettings, known: Iterable[str], exclude: ExcludeNodes
    ) -> None:
        self._settings = settings
        self._known = set(known)
        self._exclude = exclude

    def run(self, actors: Sequence[Any], metas: Sequence[Any]) -> tuple[RankReport, ...]:
        """Check a starting group's nodes. Return a report on the first rank of each unfit node.

        Raise WorkerGroupStartupFailedError if no bytes pass between two nodes, or if a process does
        not answer.
        """
        firsts = first_on_nodes(metas)
        if not self._settings.preflight or firsts.keys() <= self._known:
            return ()
        began = time.monotonic()
        node_ids = sorted(firsts)
        chosen = [actors[firsts[node_id]] for node_id in node_ids]
        found: list[Figures] = prepared(
            [actor.check_node.remote(n) for n, actor in enumerate(chosen)], self._settings
        )
        ips = [metas[firsts[node_id]].node_ip for node_id in node_ids]
        if len(set(ips)) == len(ips) > 1:
            self._time_links(chosen, dict(zip(node_ids, ips, strict=True)), found)
            problems = unfit(found)
        else:
            problems = wrong(found)
        logger.info(
            "checked %d nodes in %.2f s; unfit: %s",
            len(node_ids),
            time.monotonic() - began,
            problems or "none",
        )
        out = {node_ids[number]: found_problems for number, found_problems in problems.items()}
        self._known |= firsts.keys() - out.keys()
        self._exclude(list(out))
        return tuple(
            _report(firsts[node_id], metas[firsts[node_id]], found_problems)
            for node_id, found_problems in out.items()
        )

    def _time_links(
        self, actors: Sequence[Any], ips: Mapping[str, str], found: Sequence[Figures]
    ) -> None:
        """Add the time of the faster of a node's two links to its figures."""
        node_ids, count = list(ips), len(ips)
        listening = [
            actor.take_in.remote(ip, LINK_TIMEOUT_S)
            for actor, ip in zip(actors, ips.values(), strict=True)
        ]
        ends = prepared(listening, self._settings)
        passing = [
            actor.pass_time.remote(ends[(number + 1) % count], LINK_TIMEOUT_S)
            for number, actor in enumerate(actors)
        ]
        times: list[float | None] = prepared(passing, self._settings)
        silent = [number for number, seconds in enumerate(times) if seconds is None]
        excluded = nodes_to_exclude(
            {node_ids[number]: [node_ids[(number + 1) % count]] for number in silent}
        )
        if excluded:
            self._exclude(excluded)
            raise LinksBroken(
                f"no bytes pass to or from nodes {', '.join(excluded)}; excluded for now",
                {node_ids[(number + 1) % count]: [node_ids[number]] for number in silent},
            )
        for number, figures in enumerate(found):
            figures.seconds["link"] = min(
                seconds for seconds in (times[number], times[number - 1]) if seconds is not None
            )


def _report(number: int, meta: Any, problems: Sequence[str]) -> RankReport:
    error = RankError(
        number, ErrorKind.NODE, NODE_UNFIT, "; ".join(problems), "", None, "start", time.time()
    )
    return RankReport(number, meta.node_id, meta.pid, error=error)
