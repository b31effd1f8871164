"""A network interface that is not there is named before anybody waits for peers."""

from __future__ import annotations

import pytest

from train_fn.network_settings import interface_problem

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
    assert "names no network interface" in str(interface_problem({"GLOO_SOCKET_IFNAME": "lo0"}, nccl=False))
    assert interface_problem({"GLOO_SOCKET_IFNAME": "lo0"}, nccl=True) is None, "NCCL does not read it"
