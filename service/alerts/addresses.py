"""Which addresses the service may call for a URL that somebody has entered.

Origins that the operator named may be called wherever they are. Any other host must have public
addresses only: else a URL could reach the cloud's metadata, this machine, or the network behind it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any, Final

import httpx

from everstep.options.serve import OPTIONS
from service.submission_rules.webhooks import NotifyRule, origin_of

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_VARIABLE: Final = OPTIONS["notify_origins"].variable


class NotAllowed(Exception):
    """The service does not call this URL. The message says why and what to do."""


def is_public(address: Address) -> bool:
    """Return whether an address, and any IPv4 address inside it, is one of the public internet.

    >>> is_public(ipaddress.ip_address("169.254.169.254"))
    False
    """
    inner = [address, *_embedded(address)]
    return all(each.is_global and not each.is_multicast for each in inner)


def _embedded(address: Address) -> list[Address]:
    """Return the IPv4 addresses to which packets to an IPv6 address may go."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour]
    found += list(address.teredo or ())
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in found if each is not None]


def check_url(url: str, rule: NotifyRule) -> None:
    """Raise NotAllowed for a URL that is never called, whatever its host resolves to."""
    try:
        origin = origin_of(url)
    except httpx.InvalidURL as exc:
        raise NotAllowed("is not a URL that can be called; use https://HOST/PATH") from exc
    if origin in rule.origins:
        return
    if not origin.startswith("https://"):
        raise NotAllowed(
            f"is not https; use https, or ask the operator to add {origin} to {_VARIABLE}"
        )
    literal = _literal(httpx.URL(url).host)
    if literal is not None and not is_public(literal):
        raise _refused(origin, literal)


async def reachable(url: str, rule: NotifyRule) -> tuple[httpx.URL, dict[str, str], dict[str, Any]]:
    """Return the URL to call, the headers and httpx's extensions that make it reach ``url``.

    A host is resolved once, and the connection goes to the address that was checked: between two
    look-ups a name may change. Raises NotAllowed, OSError if the name does not resolve.
    """
    check_url(url, rule)
    parsed = httpx.URL(url)
    if origin_of(url) in rule.origins:
        return parsed, {}, {}
    port = parsed.port or 443
    found = await asyncio.get_running_loop().getaddrinfo(parsed.host, port, type=socket.SOCK_STREAM)
    address = _checked(origin_of(url), [str(each[4][0]) for each in found])
    name = parsed.raw_host.decode("ascii")
    host = f"[{name}]" if ":" in name else name
    headers = {"Host": host if parsed.port is None else f"{host}:{port}"}
    return parsed.copy_with(host=str(address)), headers, {"sni_hostname": name}


def _checked(origin: str, texts: Sequence[str]) -> Address:
    """Return the first address of a host. Raises NotAllowed if any of them is not public."""
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    for address in addresses:
        if not is_public(address):
            raise _refused(origin, address)
    return addresses[0]


def _refused(origin: str, address: Address) -> NotAllowed:
    return NotAllowed(
        f"{origin} is at {address}, which is not a public address; ask the operator to add "
        f"{origin} to {_VARIABLE} if the service may call it"
    )


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
