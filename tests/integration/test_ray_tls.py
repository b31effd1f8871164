"""Ray's own channels under TLS, by the certificate that deploy/secrets.sh makes: a run outlives a
node, and strangers stay out."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.util import get_node_ip_address

from everstep.wire.events import EventKind
from tests.integration.driven_run import DrivenRun, spec
from tests.integration.ray_cluster import REPOSITORY, RayCluster, ray_cluster

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""What a client of gRPC says first; the server answers with its settings."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Certificate and key of a cluster in this machine's subnet."""
    directory = tmp_path_factory.mktemp("deploy") / "secrets"
    subnet = f"{get_node_ip_address().rpartition('.')[0]}.0/24"
    script = [str(REPOSITORY / "deploy/secrets.sh"), str(directory)]
    subprocess.run(script, env={**os.environ, "EVERSTEP_SUBNET": subnet}, check=True)
    return str(directory / "ray_certificate"), str(directory / "ray_key")


@pytest.fixture(scope="module")
def cluster(certificate: tuple[str, str]) -> Iterator[RayCluster]:
    chain, key = certificate
    with ray_cluster(
        2, RAY_USE_TLS="1", RAY_TLS_SERVER_CERT=chain, RAY_TLS_SERVER_KEY=key, RAY_TLS_CA_CERT=chain
    ) as found:
        yield found


def answer_of(address: str, context: ssl.SSLContext | None) -> bytes:
    """The first bytes that Ray's head says to a client; nothing where it hangs up."""
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=5)
    with context.wrap_socket(plain, server_hostname=host) if context else plain as connection:
        try:
            connection.sendall(PREFACE)
            return connection.recv(9)
        except (ssl.SSLError, ConnectionResetError):
            return b""


def test_only_who_has_the_key_is_let_in(cluster: RayCluster, certificate: tuple[str, str]) -> None:
    address, (chain, key) = cluster.env["RAY_ADDRESS"], certificate
    stranger, member = (ssl.create_default_context(cafile=chain) for _ in range(2))
    member.load_cert_chain(chain, key)
    for context in (stranger, member):
        context.set_alpn_protocols(["h2"])
    assert answer_of(address, member)[3:4] == b"\x04", "a frame of settings"
    assert answer_of(address, stranger) == b""
    assert answer_of(address, None) == b""


@pytest.mark.chaos
def test_a_killed_node_costs_no_step(cluster: RayCluster, tmp_path: Path) -> None:
    run = DrivenRun(cluster, tmp_path, spec(train={"epochs": 10, "global_batch_size": 128}))
    try:
        run.start()
        run.wait_for_step(20)
        cluster.kill_node(cluster.node_ids()[-1])
        assert run.wait_for_end() == 0, run.describe()
    finally:
        run.stop()
    [failure] = run.of(EventKind.FAILURE)
    assert failure.data["verdict"] == "node_lost"
    assert run.last(EventKind.RECOVERED).data["steps_lost"] == 0
    assert run.steps()[-1][0] == run.last(EventKind.TRAINING_STARTED).data["total_steps"]
