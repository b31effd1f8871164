"""The check of an ID token: its signature, and whom, what and when it is for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import InvalidClaimError, JoseError
from joserfc.jwk import JWKRegistry, Key, KeySet

from service.model.provider_rule import ProviderRule

_SIZES: Final = (256, 384, 512)
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
