"""How NCCL and gloo interpret the variables that select a network interface."""

from __future__ import annotations

from collections.abc import Iterable

NCCL_VARIABLE, GLOO_VARIABLE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


def lets_through(variable: str, value: str, interfaces: Iterable[str]) -> bool:
    """Return whether the variable's value allows any of these interfaces.

    Gloo compares names. NCCL compares prefixes, names after ``=``, and excludes prefixes after
    ``^``.
    """
    return any(_chooses(variable, value, name) for name in interfaces)


def _chooses(variable: str, value: str, name: str) -> bool:
    if variable == GLOO_VARIABLE:
        return name in value.split(",")
    if value.startswith("^"):
        return not _begins(value[1:], name)
    return _begins(value, name)


def _begins(value: str, name: str) -> bool:
    if value.startswith("="):
        return name in value[1:].split(",")
    return any(part and name.startswith(part) for part in value.split(","))
