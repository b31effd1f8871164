"""Check the network interface that collectives are set to use, before they wait for peers that
cannot connect through it. Keep what this process serves on the cluster's network."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, Final

import psutil
from torch._C._distributed_c10d import TCPStore

from everstep.doctor.interface_choice import GLOO_VARIABLE, NCCL_VARIABLE, lets_through
from train_fn.node.silent_peers import interface_of

_rendezvous: Final[Any] = importlib.import_module("torch.distributed.rendezvous")
"""A module: ``torch.distributed.rendezvous`` as an attribute is a function."""


def interface_problem(
    env: Mapping[str, str], *, nccl: bool, up: Collection[str] | None = None
) -> str | None:
    """Return why collectives could not connect through the interface that ``env`` names; None if
    they could, or if none is named.

    Args:
        nccl: whether NCCL is used, else gloo. Each reads a variable of its own.
        up: names of this machine's interfaces that are up and have an address; by default they are
            looked up.
    """
    variable = NCCL_VARIABLE if nccl else GLOO_VARIABLE
    value = env.get(variable, "").strip()
    if not value:
        return None
    known = _interfaces_up() if up is None else up
    if lets_through(variable, value, known):
        return None
    return (
        f"{variable}={value} names no network interface of node {os.uname().nodename} that is up "
        "and has an address; it has "
        f"{', '.join(sorted(known)) or 'none'}. Set env.{variable} in the spec to one that every "
        "node has, or leave it out"
    )


def meet_on_the_clusters_network(ip: str) -> None:
    """Let gloo listen at this node's address ``ip``, as Ray does, and not where the host's name
    resolves to.

    A variable that is set already stays.
    """
    interface = interface_of(ip)
    if interface is not None:
        os.environ.setdefault(GLOO_VARIABLE, interface)


def store_at(ip: str, timeout: timedelta) -> TCPStore:
    """Open a store that listens on this address only, at a free port. By itself torch's would
    listen on every address of the node."""
    with _listening(ip, 0) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            ip,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def meet_at_the_given_address() -> None:
    """Let torch's own rendezvous listen only at the address that it is given (MASTER_ADDR), in this
    process. By itself it listens on every address of the node.

    If the address is not this node's, or the port is taken, torch does as ever.
    """
    original = getattr(_rendezvous, "_create_c10d_store", None)
    if original is None or getattr(original, "__module__", None) == __name__:
        return  # a version of torch without it; or an earlier attempt has been here

    def create(
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *more: Any,
        **named: Any,
    ) -> Any:
        given = (hostname, port, rank, world_size, timeout)
        if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return original(*given, *more, **named)
        try:
            listening = _listening(hostname, port)
        except OSError:
            return original(*given, *more, **named)
        with listening:
            return TCPStore(
                hostname,
                port,
                world_size,
                is_master=True,
                timeout=timeout,
                multi_tenant=True,
                master_listen_fd=listening.detach(),
            )

    _rendezvous._create_c10d_store = create


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def _interfaces_up() -> set[str]:
    internet = (socket.AF_INET, socket.AF_INET6)
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name
        for name, found in psutil.net_if_addrs().items()
        if name in up and any(one.family in internet for one in found)
    }
