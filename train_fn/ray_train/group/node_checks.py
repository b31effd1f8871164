"""Checks of nodes before ranks train there: versions and network, speed, links between nodes,
and processes that only seem alive.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.wire import ErrorKind
from everstep.wire.events import NODE_UNFIT
from train_fn.node.node_check import versions
from train_fn.node.preflight import NodeFigures, unfit, wrong
from train_fn.ray_train.ray_internals import WorkerGroupStartupFailedError
from train_fn.ray_train.worker_actor import RankReady
from train_fn.recovery.evidence import RankError, RankReport
from train_fn.recovery.links import WHAT_TO_CHECK, Pair, Pairs, nodes_to_exclude, pairs_of, words
from train_fn.recovery.settings import RecoverySettings
from train_fn.recovery.sizing import NodeView

ExcludeNodes = Callable[[list[str]], None]
"""Called with the ids of nodes that get no ranks for a while."""


class LinksBroken(WorkerGroupStartupFailedError):  # type: ignore[misc]
    """Nodes of a starting group cannot talk to each other.

    Args:
        message: for people.
        unheard: for each node, the nodes that it does not hear or reach.
    """

    def __init__(self, message: str, unheard: Mapping[str, Sequence[str]]) -> None:
        super().__init__(message)
        self.unheard = {node_id: tuple(others) for node_id, others in unheard.items() if others}


def link_reports(broken: LinksBroken, metas: Sequence[Any]) -> tuple[RankReport, ...]:
    """Return reports on the first rank of each node that say which nodes it does not hear."""
    return tuple(
        RankReport(number, node_id, metas[number].pid, unheard=broken.unheard.get(node_id, ()))
        for node_id, number in first_on_nodes(metas).items()
    )


def prepared(
    calls: Sequence[Any], settings: RecoverySettings, nodes: Sequence[str] = ()
) -> list[Any]:
    """Return the answers of a starting group's processes. Raise WorkerGroupStartupFailedError if
    one does not answer in time, with the ``nodes`` that did not, if they are given."""
    try:
        return list(ray.get(list(calls), timeout=settings.group_start_s))
    except RayError as exc:
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
        late = [node for call, node in zip(calls, nodes, strict=False) if call not in ready]
        where = f" on node {', '.join(late)}" if late else ""
        raise WorkerGroupStartupFailedError(
            f"a rank's process{where} did not start: {exc}"
        ) from exc


def first_on_nodes(metas: Sequence[Any]) -> dict[str, int]:
    """Return the number of the first rank's process on each node, by node id."""
    return {meta.node_id: number for number, meta in reversed(list(enumerate(metas)))}


def check_versions(ready: Sequence[RankReady], metas: Sequence[Any], exclude: ExcludeNodes) -> None:
    """Check that every node runs the versions of the driver's node. Raise
    WorkerGroupStartupFailedError if not, so that other nodes are tried next."""
    own = versions()
    others = {
        meta.node_id: rank.versions
        for rank, meta in zip(ready, metas, strict=True)
        if rank.versions != own
    }
    if others:
        exclude(list(others))
        found = "; ".join(f"node {node_id} runs {theirs}" for node_id, theirs in others.items())
        raise WorkerGroupStartupFailedError(
            f"{found}; the driver's node runs {own}. Install the same versions on every node"
        )


def network_reports(ready: Sequence[RankReady], metas: Sequence[Any]) -> tuple[RankReport, ...]:
    """Return reports on ranks whose node lacks the network that the spec names. The spec is wrong
    then, and this is reported before any rank waits."""
    reports = []
    for number, (rank, meta) in enumerate(zip(ready, metas, strict=True)):
        if rank.problem is not None:
            error = RankError(
                number, ErrorKind.USER, "NetworkSetting", rank.problem, "", 0, "start", time.time()
            )
            reports.append(RankReport(number, meta.node_id, meta.pid, error=error))
    return tuple(reports)


def check_reach(
    actors: Sequence[Any],
    metas: Sequence[Any],
    nodes: Mapping[str, NodeView],
    settings: RecoverySettings,
    exclude: ExcludeNodes,
) -> None:
    """Let every node try to connect to the others. Raise LinksBroken if some cannot reach each
    other."""
    first_on = {node_id: actors[number] for node_id, number in first_on_nodes(metas).items()}
    places = {
        node_id: (nodes[node_id].ip, nodes[node_id].port)
        for node_id in first_on
        if node_id in nodes
    }
    if len({ip for ip, _ in places.values()}) < 2:
        return
    tries = [
        first_on[node_id].reach.remote(list(places.values()), settings.probe_timeout_s)
        for node_id in places
    ]
    unreached = {
        node_id: [other for other, reached in zip(places, answer, strict=True) if not reached]
        for node_id, answer in zip(places, prepared(tries, settings), strict=True)
    }
    excluded = nodes_to_exclude(unreached)
    if excluded:
        exclude(excluded)
        broken = "; ".join(
            f"{node_id} does not reach {', '.join(others)}"
            for node_id, others in unreached.items()
            if others
        )
        raise LinksBroken(
            f"nodes do not reach each other ({broken}); excluded for now: {', '.join(excluded)}",
            unreached,
        )


# ---------------------------------------------------------------- preflight checks

# Check nodes before a run's ranks first run there. A node that fails, or is far slower than the
# others, gets no ranks.
#
# Computation, memory and storage are checked on each node alone. Speeds of these and of links are
# compared between nodes, but only if they are different machines. Each node times one link, to the
# next node of a ring, so a slow node shows on both of its links.

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
        found: list[NodeFigures] = prepared(
            [actor.check_node.remote(n) for n, actor in enumerate(chosen)],
            self._settings,
            node_ids,
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
        self, actors: Sequence[Any], ips: Mapping[str, str], found: Sequence[NodeFigures]
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


# ---------------------------------------------------------------- link checks

# Pass bytes between nodes before a group starts, if ranks of an earlier attempt could not.
#
# Nodes that merely connect to each other may still not train together: a path may lose large
# packets, or a firewall may close the ports of ranks.

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


# ---------------------------------------------------------------- stopped processes

# Find processes on other nodes that seem alive to the peers that wait for them: stopped ones
# (SIGSTOP, a debugger, a frozen container), which are woken or ended.

_ANSWER_S = 10.0


def find_stopped(processes: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return those (node, process) pairs whose process is stopped. Nodes that do not answer in time
    are left out."""
    return _ask_nodes(stopped, processes)


def wake_stopped(processes: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """Continue those processes that are stopped, and return them."""
    return _ask_nodes(signalled, processes, signal.SIGCONT)


def end_stopped(processes: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """End those processes that are stopped, by SIGKILL, and return them. Ray may have failed to: it
    first asks the process itself, and takes one that cannot be connected to for dead."""
    return _ask_nodes(signalled, processes, signal.SIGKILL)


def _ask_nodes(
    question: Callable[..., list[int]],
    processes: Iterable[tuple[str, int]],
    *arguments: Any,
) -> set[tuple[str, int]]:
    pids_by_node: dict[str, list[int]] = {}
    for node_id, pid in processes:
        pids_by_node.setdefault(node_id, []).append(pid)
    asked = {
        ray.remote(num_cpus=0, max_retries=0)(question)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(tuple(pids), *arguments): node_id
        for node_id, pids in pids_by_node.items()
    }
    answered, _ = (
        ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    )
    found = set()
    for ref in answered:
        try:
            found |= {(asked[ref], pid) for pid in ray.get(ref)}
        except RayError as exc:
            logger.warning(
                "node %s did not report which of its ranks are stopped: %s", asked[ref], exc
            )
    return found


def stopped(pids: Collection[int]) -> list[int]:
    """Return those of this node's processes that exist and are stopped."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def signalled(pids: Collection[int], number: signal.Signals) -> list[int]:
    """Send a signal to those of this node's processes that are stopped, and return them."""
    found = stopped(pids)
    for pid in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)
    return found
