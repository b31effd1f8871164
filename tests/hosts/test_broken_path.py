"""A path between two worker hosts that stays broken, and a run that needs both of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.wire import ReasonCode
from tests.hosts.compose_file import is_possible
from tests.hosts.deployment import Deployment, deployed
from tests.hosts.trial import Trial, host_of
from tests.support.service_process import ASK_S, wait_for
from train_fn.recovery.links import ENDED_AFTER, WHAT_TO_CHECK

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not is_possible(), reason="network namespaces need root on Linux"),
]

RANKS = 2
NEEDS_BOTH = {
    "scaling": {"min_workers": RANKS, "max_workers": RANKS},
    "checkpoint": {"every_steps": None, "every_s": 900},
}
SOON = {"EVERSTEP_RECOVERY_APART_S": "1"}
"""A node that was left out may come back after a second, then 2, 4 and 8."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Deployment]:
    with deployed(RANKS, {"head": SOON}) as deployment:
        yield deployment


def test_the_fifth_failure_of_a_pair_ends_the_run_and_names_both(hosts: Deployment) -> None:
    """The first one breaks the training, the others the starts after it. No step is lost, no node
    is blamed, and once the path is mended the same two nodes train again."""
    wait_for(lambda: len(hosts.live_nodes()) == RANKS, 300, "both nodes", every_s=ASK_S)
    trial = Trial.begun(hosts, "apart for good", 500, RANKS, NEEDS_BOTH)
    run = trial.run
    one, other = (hosts.hosts[host_of(trial, rank)].cable for rank in range(RANKS))
    pair = sorted(worker.node_id for worker in run.attempts()[-1].workers)
    named = f"nodes {pair[0][:8]} and {pair[1][:8]} do not hear each other"
    with one.loses_large_packets_to(other), other.loses_large_packets_to(one):
        assert hosts.hosts[host_of(trial, 0)].reaches(other.ip)
        wait_for(lambda: run.refresh().status.terminal, 600, "the end of the run", every_s=ASK_S)

    failures = run.failures()
    assert [failure.evidence["pairs"] for failure in failures] == [[pair]] * ENDED_AFTER
    assert {(failure.first_rank, failure.node_id) for failure in failures} == {(None, None)}
    verdicts = [failure.verdict for failure in failures]
    assert verdicts == ["unknown"] + ["control_plane"] * (ENDED_AFTER - 1)
    reason = run.run.reason
    assert (run.status, reason and reason.code) == ("FAILED", ReasonCode.NO_PROGRESS)
    assert reason is not None and f"{named}: {ENDED_AFTER} attempts in a row" in reason.message
    assert WHAT_TO_CHECK in reason.message
    assert run.step == failures[0].step, "no attempt made a step"
    assert run.checkpoint("latest").step == run.step, "its newest state is kept"
    nodes = hosts.api("GET", "/v1/cluster")["nodes"]
    assert {node["state"] for node in nodes} == {"ALIVE"}, "nobody is cordoned"

    mended = Trial.begun(hosts, "together again", 20, RANKS, NEEDS_BOTH)
    record = mended.finish()
    assert (record["failures"], record["steps_lost"]) == ([], 0)
