"""What a provider, or who pretends to be one, cannot make the service accept."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

from service.annexes.access import provider as provider_module
from service.annexes.access.provider import (
    KNOWN_S,
    Flow,
    LogInRefused,
    Person,
    Provider,
    ProviderUnavailable,
)
from service.model.operator_rules import GrantRule, ProviderRule

ISSUER = "https://login.example.org/realms/ml"
NOW = 1_780_000_000.0
FLOW = Flow("the-state", "the-nonce", "the-verifier", "/runs")
KEY = RSAKey.generate_key(2048, {"kid": "first"})
OTHER_KEY = RSAKey.generate_key(2048, {"kid": "second"})


def encoded(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


class Server:
    """A provider whose answers a test sets."""

    def __init__(self, **rule: Any) -> None:
        self.keys: list[Any] = [KEY]
        self.claims: dict[str, Any] = {
            "iss": ISSUER,
            "aud": "everstep",
            "sub": "u-1",
            "nonce": "the-nonce",
            "iat": NOW,
            "exp": NOW + 300,
            "email": "ada@example.org",
            "email_verified": True,
            "groups": ["ml"],
        }
        self.metadata: dict[str, Any] = {
            "issuer": ISSUER,
            "authorization_endpoint": f"{ISSUER}/auth",
            "token_endpoint": f"{ISSUER}/token",
            "jwks_uri": f"{ISSUER}/keys",
            "userinfo_endpoint": f"{ISSUER}/userinfo",
        }
        self.userinfo: dict[str, Any] = {"sub": "u-1"}
        self.id_token: Callable[[], str] = lambda: self.signed(KEY)
        self.token_answer: tuple[int, dict[str, Any]] | None = None
        self.requests: list[httpx.Request] = []
        self.now = NOW
        fields: dict[str, Any] = {
            "issuer": ISSUER,
            "client_id": "everstep",
            "client_secret": "s:e/c",
            "scopes": "openid",
            "groups_claim": "groups",
            "grants": GrantRule.of(["ml=admin"]),
            "lasts_s": 60.0,
            "label": "x",
        }
        self.provider = Provider(
            ProviderRule(**{**fields, **rule}),
            "https://everstep.example.org/login/oidc/callback",
            lambda: self.now,
            httpx.MockTransport(self._answer),
        )

    def signed(self, key: Any, algorithm: str = "RS256", **header: Any) -> str:
        kid = {} if key.kid is None else {"kid": key.kid}
        return jwt.encode({"alg": algorithm, **kid, **header}, self.claims, key, [algorithm])

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        name = request.url.path.rsplit("/", 1)[-1]
        if name == "openid-configuration":
            return httpx.Response(200, json=self.metadata)
        if name == "keys":
            return httpx.Response(200, json={"keys": [key.as_dict(False) for key in self.keys]})
        if name == "token":
            status, body = self.token_answer or (200, {"id_token": self.id_token()})
            return httpx.Response(status, json={"access_token": "at", **body})
        assert (name, request.headers["authorization"]) == ("userinfo", "Bearer at")
        return httpx.Response(200, json=self.userinfo)

    def count(self, name: str) -> int:
        return sum(request.url.path.endswith(f"/{name}") for request in self.requests)

    async def identity(self, **query: str) -> Person:
        return await self.provider.identity(FLOW, {"code": "c", "state": "the-state", **query})


async def test_a_sound_answer_names_the_person() -> None:
    server = Server()
    assert await server.identity(iss=ISSUER) == Person("u-1", "ada@example.org", ("ml",))
    [token] = [each for each in server.requests if each.url.path.endswith("/token")]
    assert dict(parse_qsl(token.content.decode()))["code_verifier"] == "the-verifier"
    assert token.headers["authorization"] == "Basic " + base64.b64encode(
        b"everstep:s%3Ae%2Fc"
    ).decode("ascii")
    assert server.count("userinfo") == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nonce": "another"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"aud": "grafana"}, "aud"),
        ({"aud": ["everstep", "grafana"]}, "several audiences"),
        ({"aud": ["everstep", "grafana"], "azp": "grafana"}, "another client"),
        ({"azp": "grafana"}, "another client"),
        ({"iss": "https://login.example.org/realms/other"}, "iss"),
        ({"iss": ISSUER + "/"}, "iss"),
        ({"exp": NOW - 61}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": float("nan")}, "exp"),
        ({"iat": NOW + 61}, "future"),
        ({"nbf": NOW + 61}, "not yet valid"),
        ({"sub": ""}, "sub"),
        ({"sub": 7}, "sub"),
        *(
            ({"email_verified": value}, "not verified")
            for value in (False, "false", "False", "", 0, 1, None)
        ),
        ({"groups": {"ml": True}}, "not a list of groups"),
        ({"sub": "x" * 256}, "over 255 characters"),
    ],
)
async def test_wrong_claims_are_refused(change: dict[str, Any], why: str) -> None:
    server = Server()
    server.claims |= change
    with pytest.raises(LogInRefused, match=why):
        await server.identity()


@pytest.mark.parametrize("change", [{"exp": NOW - 59}, {"iat": NOW + 59}, {"nbf": NOW + 59}])
async def test_clocks_may_differ_by_a_minute(change: dict[str, Any]) -> None:
    server = Server()
    server.claims |= change
    assert (await server.identity()).subject == "u-1"


async def test_a_token_without_a_signature_is_refused() -> None:
    server = Server()
    server.id_token = lambda: f"{encoded({'alg': 'none'})}.{encoded(server.claims)}."
    with pytest.raises(LogInRefused, match="not valid"):
        await server.identity()


async def test_a_token_signed_with_the_public_key_as_a_secret_is_refused() -> None:
    server = Server()
    head = f"{encoded({'alg': 'HS256', 'kid': 'first'})}.{encoded(server.claims)}"
    mac = hmac.new(KEY.as_pem(private=False), head.encode(), hashlib.sha256).digest()
    signature = base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
    server.id_token = lambda: f"{head}.{signature}"
    with pytest.raises(LogInRefused, match="not valid"):
        await server.identity()


async def test_a_key_that_comes_with_the_token_is_not_used() -> None:
    server = Server()
    forged = RSAKey.generate_key(2048)
    server.id_token = lambda: server.signed(forged, jwk=forged.as_dict(False), kid="first")
    with pytest.raises(LogInRefused, match="not valid"):
        await server.identity()


async def test_changed_claims_break_the_signature() -> None:
    server = Server()
    header, _, signature = server.signed(KEY).split(".")
    claims = {**server.claims, "groups": ["ops"]}
    server.id_token = lambda: f"{header}.{encoded(claims)}.{signature}"
    with pytest.raises(LogInRefused, match="not valid"):
        await server.identity()


async def test_keys_rotate_and_a_withdrawn_one_is_refused() -> None:
    server = Server()
    await server.identity()
    server.keys, server.id_token = [OTHER_KEY], lambda: server.signed(OTHER_KEY)
    with pytest.raises(LogInRefused):
        await server.identity()
    assert server.count("keys") == 1, "whoever sends nonsense cannot make it fetch keys each time"
    server.now += 5
    assert (await server.identity()).subject == "u-1" and server.count("keys") == 2
    server.now += KNOWN_S
    server.id_token = lambda: server.signed(KEY)
    server.claims |= {"exp": server.now + 300}
    with pytest.raises(LogInRefused):
        await server.identity()


async def test_elliptic_keys_and_keys_of_unknown_kinds() -> None:
    server = Server()
    key = ECKey.generate_key("P-256", {"kid": "e"})
    server.keys, server.id_token = [key], lambda: server.signed(key, "ES256")
    assert (await server.identity()).subject == "u-1"


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({"state": "another"}, "not begun in this browser"),
        ({"state": "é"}, "not begun in this browser"),
        ({"iss": "https://evil.example"}, "another identity provider"),
        ({"error": "access_denied"}, "refused: access_denied"),
        ({"code": ""}, "no code"),
    ],
)
async def test_a_wrong_answer_asks_for_nothing(query: dict[str, str], why: str) -> None:
    server = Server()
    with pytest.raises(LogInRefused, match=why):
        await server.identity(**query)
    assert server.requests == []


async def test_claims_that_the_token_leaves_out_come_from_userinfo() -> None:
    server = Server(groups_claim="realm_access.roles")
    del server.claims["email"]
    server.userinfo |= {
        "email": "ada@example.org",
        "realm_access": {"roles": ["ml"]},
        "nonce": "x",
    }
    assert await server.identity() == Person("u-1", "ada@example.org", ("ml",))
    server.userinfo["sub"] = "u-2"
    with pytest.raises(LogInRefused, match="another person"):
        await server.identity()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"issuer": "https://evil.example"}, "calls itself"),
        ({"token_endpoint": "http://login.example.org/token"}, "no https URL"),
        ({"jwks_uri": None}, "no https URL"),
    ],
)
async def test_a_description_of_another_provider_is_refused(
    change: dict[str, Any], why: str
) -> None:
    server = Server()
    server.metadata |= change
    with pytest.raises(ProviderUnavailable, match=why):
        await server.provider.address(FLOW)


async def test_an_answer_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    server, sent = Server(), b" " * (1 << 20)

    async def answer(_: httpx.Request) -> httpx.Response:
        async def body() -> AsyncIterator[bytes]:
            while True:
                yield sent
                await asyncio.sleep(0.01)

        return httpx.Response(200, content=body())

    monkeypatch.setattr(server.provider, "_transport", httpx.MockTransport(answer))
    async with asyncio.timeout(10):
        with pytest.raises(ProviderUnavailable, match="more than 1048576 bytes"):
            await server.provider.address(FLOW)
        monkeypatch.setattr(provider_module, "TIMEOUT_S", 0.2)
        sent = b" "
        with pytest.raises(ProviderUnavailable, match="does not answer"):
            await server.provider.address(FLOW)


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        ((400, {"error": "invalid_grant"}), LogInRefused, "invalid_grant"),
        ((401, {"error": "invalid_client"}), ProviderUnavailable, "EVERSTEP_OIDC_CLIENT_SECRET"),
        ((500, {}), ProviderUnavailable, "answered 500"),
        ((302, {"error": "x"}), ProviderUnavailable, "answered 302"),
        ((200, {}), LogInRefused, "no ID token"),
    ],
)
async def test_what_the_token_endpoint_refuses_is_told(
    answer: tuple[int, dict[str, Any]], error: type[Exception], why: str
) -> None:
    server = Server()
    server.token_answer = answer
    with pytest.raises(error, match=why):
        await server.identity()


def test_a_damaged_cookie_is_no_log_in() -> None:
    assert Flow.read(FLOW.cookie()) == FLOW
    for cookie in ("", "x", FLOW.cookie()[:-3], encoded({"state": "s"}), encoded({}), "é"):
        assert Flow.read(cookie) is None
    empty = {"state": "", "nonce": "", "verifier": "", "target": "/"}
    assert Flow.read(encoded(empty)) is None, "an empty state would match an empty query"
