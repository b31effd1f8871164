"""A deployment for the tests of a module, and the same with all of its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.deployment import Deployment, deployed
from tests.hosts.trial import NUM_WORKERS
from tests.support.service_process import ASK_S, wait_for


@pytest.fixture(scope="module")
def hosts() -> Iterator[Deployment]:
    with deployed(NUM_WORKERS) as deployment:
        yield deployment


@pytest.fixture
def whole(hosts: Deployment) -> Deployment:
    for node in hosts.api("GET", "/v1/cluster")["nodes"]:
        if node["state"] == "CORDONED":  # runs of three tests have lost a rank there
            hosts.api("POST", f"/v1/cluster/nodes/{node['id']}/uncordon", json={})
    wait_for(lambda: len(hosts.live_nodes()) == NUM_WORKERS, 300, "a whole cluster", every_s=ASK_S)
    return hosts
