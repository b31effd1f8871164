"""Who an ID token is about: subject, e-mail address and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from everstep.spec.plain_text import printable
from service.identity.problems import LogInRefused
from service.model.provider_rule import ProviderRule
from service.model.rows import NAME_CHARS

_SUBJECT_CHARS: Final = 255


@dataclass(frozen=True)
class Identity:
    """A person at the provider."""

    subject: str
    name: str
    """E-mail address; without one the provider's name of the user, or else the subject."""
    groups: tuple[str, ...]


def lacks_claims(claims: Mapping[str, Any], groups_claim: str) -> bool:
    """Return whether the ID token leaves something out that userinfo may have."""
    return _at(claims, groups_claim) is None or "email" not in claims


def identity_of(claims: Mapping[str, Any], rule: ProviderRule) -> Identity:
    """Return the person of verified claims. Raises LogInRefused for unusable ones."""
    subject = claims["sub"]
    if len(subject) > _SUBJECT_CHARS:
        raise LogInRefused(f"the provider's id of this user is over {_SUBJECT_CHARS} characters")
    email = claims.get("email")
    if email and claims.get("email_verified") is False:
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
    return Identity(subject, printable(name)[:NAME_CHARS], _groups(claims, rule.groups_claim))


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
