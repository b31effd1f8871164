"""Person providers: discovery, keys, the code exchange and the check of ID tokens.

Imports model, and the options' check of URLs. Knows neither the database nor the pages.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final, Self
from urllib.parse import quote, urlencode

import httpx
from joserfc import jwt
from joserfc.errors import InvalidClaimError, JoseError
from joserfc.jwk import JWKRegistry, Key, KeySet

from everstep.options.serve import is_confidential_url
from everstep.spec.plain_text import printable
from service.model.operator_rules import ProviderRule
from service.model.rows import NAME_CHARS, past

# ---------------------------------------------------------------- problems

# Why a log-in at an identity provider ends without a session.


class LogInRefused(Exception):
    """This person or this answer is not accepted. The message says why, without secrets."""


class ProviderUnavailable(Exception):
    """The provider does not answer, or not as it should. The message is for the operator, too."""


# ---------------------------------------------------------------- subject

# Who an ID token is about: subject, e-mail address and groups.

_SUBJECT_CHARS: Final = 255


@dataclass(frozen=True)
class Person:
    """A person at the provider."""

    subject: str
    name: str
    """E-mail address; without one the provider's name of the user, or else the subject."""
    groups: tuple[str, ...]


def identity_of(claims: Mapping[str, Any], rule: ProviderRule) -> Person:
    """Return the person of verified claims. Raises LogInRefused for unusable ones."""
    subject = claims["sub"]
    if len(subject) > _SUBJECT_CHARS:
        raise LogInRefused(f"the provider's id of this user is over {_SUBJECT_CHARS} characters")
    email, verified = claims.get("email"), claims.get("email_verified", True)
    # Some providers send a text or a number; only what says yes counts.
    if email and verified is not True and verified != "true":
        raise LogInRefused(
            f"the provider has not verified the address {email!r}; confirm it there first"
        )
    name = next(
        (
            each
            for each in (email, claims.get("preferred_username"), claims.get("name"), subject)
            if isinstance(each, str) and each.strip()
        ),
        subject,
    )
    return Person(subject, printable(name)[:NAME_CHARS], _groups(claims, rule.groups_claim))


def _groups(claims: Mapping[str, Any], path: str) -> tuple[str, ...]:
    found = _at(claims, path)
    if found is None:
        return ()
    if isinstance(found, str):
        return (found,)
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        return tuple(found)
    raise LogInRefused(
        f"the claim {path} is not a list of groups; the operator must check "
        "EVERSTEP_OIDC_GROUPS_CLAIM"
    )


def _at(claims: Mapping[str, Any], path: str) -> Any:
    """Return a claim by its name, or by a path of names with dots."""
    if path in claims:
        return claims[path]
    node: Any = claims
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


# ---------------------------------------------------------------- id token

# The check of an ID token: its signature, and whom, what and when it is for.

LEEWAY_S: Final = 60
"""Difference of the two clocks that is allowed."""
ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
)
"""Signatures with a key pair: neither ``none``, nor HMAC with a key that is public."""


def claims_of(
    id_token: str, keys: KeySet, rule: ProviderRule, nonce: str, now: float
) -> dict[str, Any]:
    """Return the claims of a valid ID token.

    Args:
        id_token: the signed token.
        keys: the provider's keys.
        rule: issuer and client that it must name.
        nonce: the value that this log-in sent.
        now: unix seconds.

    Raises JoseError.
    """
    token = jwt.decode(id_token, keys, algorithms=ALGORITHMS)
    registry = jwt.JWTClaimsRegistry(
        now=int(now),
        leeway=LEEWAY_S,
        iss={"essential": True, "value": rule.issuer},
        aud={"essential": True, "value": rule.client_id},
        sub={"essential": True},
        exp={"essential": True},
        iat={"essential": True},
        nonce={"essential": True, "value": nonce},
    )
    registry.validate(token.claims)
    audience, party = token.claims["aud"], token.claims.get("azp")
    if party is None and isinstance(audience, list) and len(audience) > 1:
        raise InvalidClaimError("azp", "a token for several audiences must name its party")
    if party not in (None, rule.client_id):
        raise InvalidClaimError("azp", "the token was issued to another client")
    return token.claims


def key_set(found: Mapping[str, Any]) -> KeySet:
    """Return the keys of a JWKS. Those of an unknown kind or for encryption are left out."""
    listed = found.get("keys")
    keys: list[Key] = []
    for each in listed if isinstance(listed, list) else []:
        if not isinstance(each, dict) or each.get("kty") == "oct" or each.get("use") == "enc":
            continue
        with suppress(JoseError, ValueError, TypeError, KeyError):
            keys.append(JWKRegistry.import_key(each))
    return KeySet(keys)


# ---------------------------------------------------------------- flow

# One log-in on its way through the provider: what the browser keeps until it returns.

FLOW_LASTS_S: Final = 600
"""Longest time that a person may take at the provider."""
_RANDOM_BYTES: Final = 32


@dataclass(frozen=True)
class Flow:
    """The secrets of one log-in. They lie in a cookie of the browser that began it, so any replica
    can finish it, and no other browser can."""

    state: str
    """Ties the provider's redirect to this browser."""
    nonce: str
    """Ties the ID token to this log-in."""
    verifier: str
    """PKCE: ties the code to this log-in."""
    target: str
    """Page that the person wanted."""

    @classmethod
    def new(cls, target: str) -> Self:
        state, nonce, verifier = (secrets.token_urlsafe(_RANDOM_BYTES) for _ in range(3))
        return cls(state, nonce, verifier, target)

    @property
    def challenge(self) -> str:
        """Return PKCE's S256 challenge."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def cookie(self) -> str:
        """Return the cookie's value."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).rstrip(b"=").decode()

    @classmethod
    def read(cls, cookie: str) -> Self | None:
        """Return the log-in of a cookie; None if it has none or is damaged."""
        try:
            found = json.loads(base64.urlsafe_b64decode(cookie + "=" * (-len(cookie) % 4)))
            values = [found[field.name] for field in fields(cls)]
        except (ValueError, TypeError, KeyError):
            return None
        return cls(*values) if all(isinstance(each, str) and each for each in values) else None


# ---------------------------------------------------------------- provider

# An OpenID Connect provider: where a log-in begins, and who has come back from it.

CALLBACK_PATH: Final = "/login/oidc/callback"
"""This service's page to which the provider sends people back."""
TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 1 << 20
KNOWN_S: Final = 600.0
"""Time for which the provider's description and keys are kept. A key that it withdraws is refused
after that."""
FETCH_AGAIN_S: Final = 5.0
"""Shortest time between two looks for new keys, which any caller can provoke."""


@dataclass(frozen=True)
class _Description:
    """What the provider says of itself."""

    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None
    by_header: bool
    """Whether it takes the client's secret in a header, as all must by default."""


class Provider:
    """The provider of a rule.

    Args:
        rule: the operator's settings.
        redirect_uri: this service's page to which the provider sends people back.
        clock: unix seconds.
        transport: httpx's transport, for tests.
    """

    def __init__(
        self,
        rule: ProviderRule,
        redirect_uri: str,
        clock: Callable[[], float] = time.time,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.rule = rule
        self._redirect_uri = redirect_uri
        self._clock = clock
        self._transport = transport
        self._description: _Description | None = None
        self._described_at = 0.0
        self._keys: KeySet | None = None
        self._keys_at = 0.0
        self._fetching = asyncio.Lock()

    @cached_property
    def _authorities(self) -> ssl.SSLContext:
        """Return the trusted authorities, which take longer to load than a request takes."""
        return httpx.create_ssl_context()

    async def address(self, flow: Flow) -> str:
        """Return the provider's page at which a log-in begins. Raises ProviderUnavailable."""
        description = await self._described()
        query = urlencode(
            {
                "response_type": "code",
                "client_id": self.rule.client_id,
                "redirect_uri": self._redirect_uri,
                "scope": self.rule.scopes,
                "state": flow.state,
                "nonce": flow.nonce,
                "code_challenge": flow.challenge,
                "code_challenge_method": "S256",
            }
        )
        separator = "&" if "?" in description.authorization_endpoint else "?"
        return f"{description.authorization_endpoint}{separator}{query}"

    async def identity(self, flow: Flow, query: Mapping[str, str]) -> Person:
        """Return who logged in, from the query with which the provider sent the browser back.

        Raises LogInRefused, ProviderUnavailable.
        """
        if not hmac.compare_digest(query.get("state", "").encode(), flow.state.encode()):
            raise LogInRefused("this log-in was not begun in this browser")
        if query.get("iss", self.rule.issuer) != self.rule.issuer:
            raise LogInRefused("the answer came from another identity provider")
        if "error" in query:
            why = query.get("error_description") or query["error"]
            raise LogInRefused(f"the identity provider refused: {why[:300]}")
        if not query.get("code"):
            raise LogInRefused("the identity provider sent no code")
        description = await self._described()
        answer = await self._exchanged(description, query["code"], flow.verifier)
        claims = await self._verified(description, answer.get("id_token"), flow.nonce)
        lacks_claims = _at(claims, self.rule.groups_claim) is None or "email" not in claims
        if lacks_claims and description.userinfo_endpoint:
            more = await self._userinfo(description.userinfo_endpoint, answer)
            if more.get("sub") != claims["sub"]:
                raise LogInRefused("the provider's userinfo is about another person")
            claims = {**more, **claims}
        return identity_of(claims, self.rule)

    async def _exchanged(
        self, description: _Description, code: str, verifier: str
    ) -> dict[str, Any]:
        """Exchange a code for tokens."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": verifier,
        }
        client_id, secret = self.rule.client_id, self.rule.client_secret
        auth = None
        if secret and description.by_header:
            auth = httpx.BasicAuth(quote(client_id, safe=""), quote(secret, safe=""))
        else:
            form |= {"client_id": client_id} | ({"client_secret": secret} if secret else {})
        status, answer = await self._json("POST", description.token_endpoint, auth, form)
        if status == 200:
            return answer
        if status in (400, 401) and isinstance(answer.get("error"), str):
            if answer["error"] == "invalid_client":
                raise ProviderUnavailable(
                    "the identity provider does not know this service; the operator must check "
                    "EVERSTEP_OIDC_CLIENT_ID and EVERSTEP_OIDC_CLIENT_SECRET"
                )
            raise LogInRefused(f"the identity provider refused the code: {answer['error'][:100]}")
        raise ProviderUnavailable(f"the identity provider answered {status} to a code")

    async def _verified(
        self, description: _Description, id_token: object, nonce: str
    ) -> dict[str, Any]:
        """Return the claims of an ID token. A signature that no known key fits is checked again
        with the provider's current keys, since it may have rotated them."""
        if not isinstance(id_token, str):
            raise LogInRefused("the identity provider sent no ID token")
        now = self._clock()
        keys = await self._current_keys(description, KNOWN_S)
        try:
            return claims_of(id_token, keys, self.rule, nonce, now)
        except JoseError:
            keys = await self._current_keys(description, FETCH_AGAIN_S)
        try:
            return claims_of(id_token, keys, self.rule, nonce, now)
        except JoseError as exc:
            raise LogInRefused(f"the ID token is not valid ({str(exc)[:200]})") from exc

    async def _userinfo(self, endpoint: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        token = answer.get("access_token")
        if not isinstance(token, str):
            raise LogInRefused("the identity provider sent no access token")
        status, found = await self._json(
            "GET", endpoint, headers={"Authorization": f"Bearer {token}"}
        )
        if status != 200:
            raise ProviderUnavailable(f"the identity provider's userinfo answered {status}")
        return found

    async def _described(self) -> _Description:
        """Return the provider's description, at most some minutes old."""
        async with self._fetching:
            now = self._clock()
            if self._description is None or now - past(self._described_at, now) >= KNOWN_S:
                url = f"{self.rule.issuer.rstrip('/')}/.well-known/openid-configuration"
                status, found = await self._json("GET", url)
                if status != 200:
                    raise ProviderUnavailable(f"{url} answered {status}")
                self._description = _description(found, self.rule)
                self._described_at = self._clock()
            return self._description

    async def _current_keys(self, description: _Description, at_most_s: float) -> KeySet:
        """Return the provider's keys, at most ``at_most_s`` old."""
        async with self._fetching:
            now = self._clock()
            if self._keys is None or now - past(self._keys_at, now) >= at_most_s:
                status, found = await self._json("GET", description.jwks_uri)
                keys = key_set(found)
                if status != 200 or not keys:
                    raise ProviderUnavailable(
                        f"{description.jwks_uri} answered {status} without usable keys"
                    )
                self._keys, self._keys_at = keys, self._clock()
            return self._keys

    async def _json(
        self,
        method: str,
        url: str,
        auth: httpx.Auth | None = None,
        form: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Return status and JSON object of an answer; {} if it is none. Follows no redirect."""
        try:
            accepted = {"Accept": "application/json", **(headers or {})}
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(
                    timeout=TIMEOUT_S, transport=self._transport, verify=self._authorities
                ) as client,
                client.stream(method, url, auth=auth, data=form, headers=accepted) as response,
            ):
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _MOST_BYTES:
                        raise ProviderUnavailable(f"{url} answered more than {_MOST_BYTES} bytes")
        except (httpx.HTTPError, TimeoutError) as exc:
            raise ProviderUnavailable(
                f"the identity provider does not answer at {url}: {exc or type(exc).__name__}"
            ) from exc
        try:
            found = json.loads(body)
        except ValueError:
            found = {}
        return response.status_code, found if isinstance(found, dict) else {}


def _description(found: Mapping[str, Any], rule: ProviderRule) -> _Description:
    """Return what a provider's metadata says.

    Raises ProviderUnavailable for another issuer, and for an address to which secrets would travel
    in the clear.
    """
    if found.get("issuer") != rule.issuer:
        raise ProviderUnavailable(
            f"the identity provider calls itself {found.get('issuer')!r}, but EVERSTEP_OIDC_ISSUER "
            f"is {rule.issuer!r}; the operator must set it to exactly that"
        )
    names = ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint")
    urls = {name: found.get(name) for name in names}
    for name, url in urls.items():
        if url is None and name == "userinfo_endpoint":
            continue
        if not isinstance(url, str) or not is_confidential_url(url):
            raise ProviderUnavailable(f"the identity provider's {name} {url!r} is no https URL")
    methods = found.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
    return _Description(
        authorization_endpoint=str(urls["authorization_endpoint"]),
        token_endpoint=str(urls["token_endpoint"]),
        jwks_uri=str(urls["jwks_uri"]),
        userinfo_endpoint=urls["userinfo_endpoint"],
        by_header="client_secret_basic" in methods,
    )
