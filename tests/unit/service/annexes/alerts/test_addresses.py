"""Which addresses a URL may lead to: none of this machine, its network or its cloud."""

from __future__ import annotations

import ast
import asyncio
import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.annexes.alerts.sender import NotAllowed, check_url, is_public, reachable
from service.submission_rules.allowed import NOBODY, NotifyRule

ROOT = Path(__file__).parents[5]
RULE = NotifyRule(frozenset({"http://10.0.0.1:9000"}))


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "169.254.170.2",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "::1",
        "::",
        "fe80::1",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "64:ff9b:1::808:808",
        "::808:808",
        "::ffff:0:808:808",
        "5f00::1",
        "3fff::1",
        "fec0::1",
        "168.63.129.16",
        "::ffff:168.63.129.16",
    ],
)
def test_no_address_inside_is_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_the_internet_is_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://hooks.example.org/x", "is not https"),
        ("https://127.0.0.1/x", "not a public address"),
        ("https://[::1]:8443/x", "not a public address"),
        ("https://169.254.169.254/latest/meta-data", "not a public address"),
        ("https://user@hooks.example.org/", "is not a URL"),
        ("ftp://hooks.example.org/", "is not a URL"),
        ("http://10.0.0.1:9001/", "EVERSTEP_NOTIFY_ORIGINS"),
    ],
)
def test_a_url_is_refused_with_the_way_out(url: str, words: str) -> None:
    with pytest.raises(NotAllowed, match=words):
        check_url(url, RULE)


def _resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append((host, port))
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    return asked


async def test_the_address_that_was_checked_is_the_one_that_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = _resolving(monkeypatch, "8.8.8.8", "2606:4700::1111")
    url, headers, extensions = await reachable("https://hooks.example.org:8443/a?b=c", NOBODY)
    assert str(url) == "https://8.8.8.8:8443/a?b=c" and asked == [("hooks.example.org", 8443)]
    assert headers == {"Host": "hooks.example.org:8443"}
    assert extensions == {"sni_hostname": "hooks.example.org"}, "the certificate is the host's"


async def test_a_name_with_one_address_inside_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _resolving(monkeypatch, "8.8.8.8", "169.254.169.254")
    with pytest.raises(NotAllowed, match=r"is at 169\.254\.169\.254"):
        await reachable("https://rebinding.example.org/", NOBODY)


async def test_numbers_that_only_a_resolver_reads_are_found_out() -> None:
    with pytest.raises(NotAllowed, match=r"is at 127\.0\.0\.1"):
        await reachable("https://2130706433/", NOBODY)


async def test_an_origin_of_the_operator_is_called_where_it_is() -> None:
    url, headers, extensions = await reachable("http://10.0.0.1:9000/x", RULE)
    assert (str(url), headers, extensions) == ("http://10.0.0.1:9000/x", {}, {})


OPENS_CONNECTIONS = re.compile(
    r"httpx\.(AsyncClient|Client|get|head|post|put|request|stream)"
    r"|urllib\.request\.\w+|urllib3\..+|requests\.\w+|aiohttp\..+|http\.client\.\w+|ftplib\..+"
    r"|smtplib\.SMTP(_SSL)?|socket\.create_connection|asyncio\.open_connection"
    r"|websockets\..+\.connect|pyarrow\.fs\.(Gcs|S3)FileSystem|sqlalchemy\.create_engine"
    r"|fsspec\..+|boto3\..+"
)


def calls_of(file: Path) -> Iterator[str]:
    """Yield the full name of everything that a module calls."""
    tree, full = ast.parse(file.read_text()), dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            full |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = ast.unparse(node.func).partition(".")
            yield full.get(head, head) + dot + rest


def test_nothing_else_in_the_service_calls_anybody() -> None:
    """A new caller needs a row of its own, which says whose text leads it."""
    found = {
        str(file.relative_to(ROOT))
        for house in ("service", "storage")
        for file in (ROOT / house).rglob("*.py")
        if any(OPENS_CONNECTIONS.fullmatch(call) for call in calls_of(file))
    }
    page = (ROOT / "docs" / "security.md").read_text()
    _, _, section = page.partition("### Whom the service calls")
    told = re.findall(r"`((?:service|storage)/[^`]+\.py)`", section.partition("\n## ")[0])
    assert found == set(told)
