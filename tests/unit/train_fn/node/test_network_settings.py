"""A network interface that is not there is named before anybody waits for peers."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch.distributed import DistError

from tests.support.service_process import free_port
from train_fn.node.network import (
    interface_problem,
    meet_at_the_given_address,
    meet_on_the_clusters_network,
)

UP = ("lo", "eth0", "eth1", "ib0")


@pytest.mark.parametrize(
    ("variable", "value", "fits"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "ens,ib", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth1", True),
        ("NCCL_SOCKET_IFNAME", "ens3", False),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,ib", False),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", True),
        ("GLOO_SOCKET_IFNAME", "", True),
        ("OTHER", "ens3", True),
    ],
)
def test_what_a_variable_lets_through(variable: str, value: str, fits: bool) -> None:
    problem = interface_problem({variable: value}, nccl=variable != "GLOO_SOCKET_IFNAME", up=UP)
    assert (problem is None) is fits
    if problem is not None:
        assert problem.startswith(f"{variable}={value} names no network interface of node ")
        assert f"it has eth0, eth1, ib0, lo. Set env.{variable} in the spec" in problem


def test_this_machine_is_asked_where_nothing_is_given() -> None:
    assert interface_problem({"GLOO_SOCKET_IFNAME": "lo"}, nccl=False) is None
    assert "names no network interface" in str(
        interface_problem({"GLOO_SOCKET_IFNAME": "lo0"}, nccl=False)
    )
    assert interface_problem({"GLOO_SOCKET_IFNAME": "lo0"}, nccl=True) is None, (
        "NCCL does not read it"
    )


@pytest.mark.parametrize(
    ("ip", "before", "after"),
    [("127.0.0.1", None, "lo"), ("127.0.0.1", "eth7", "eth7"), ("192.0.2.1", None, None)],
)
def test_gloo_listens_where_ray_does_unless_it_is_told_otherwise(
    ip: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {} if before is None else {"GLOO_SOCKET_IFNAME": before}
    monkeypatch.setattr("os.environ", environ)
    meet_on_the_clusters_network(ip)
    assert environ.get("GLOO_SOCKET_IFNAME") == after


# ---------------------------------------------------------------- torch's own rendezvous


def listens_at(port: int) -> set[str]:
    return {
        each.laddr.ip.removeprefix("::ffff:")
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's module, as it was afterwards."""
    module = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "_create_c10d_store", module._create_c10d_store)
    meet_at_the_given_address()
    meet_at_the_given_address()  # by each attempt
    return module


def test_the_rendezvous_listens_only_where_it_is_told(rendezvous: Any) -> None:
    wait = timedelta(seconds=20)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(rendezvous._create_c10d_store, "127.0.0.1", port, rank, 2, wait)
            for rank in (0, 1)
        ]
        server, client = (each.result(60) for each in both)
    server.set("word", "met")
    assert client.get("word") == b"met" and listens_at(port) == {"127.0.0.1"}
    again = rendezvous._create_c10d_store("127.0.0.1", port, 0, 1, wait, use_libuv=True)
    assert again.get("word") == b"met", "a second group at the same port, as torch has it"


def test_a_rendezvous_at_an_address_of_another_node_is_left_to_torch(rendezvous: Any) -> None:
    with pytest.raises(DistError):
        rendezvous._create_c10d_store("192.0.2.1", free_port(), 0, 1, timedelta(seconds=1))
