"""What the operator sets: who may log in at the identity provider, with which rights; the mail
server; prices."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, cast
from urllib.parse import unquote, urlsplit

from everstep.options.serve import SMTP_PORTS
from service.model.rows import RANK, Role

EVERYONE: Final = "*"
"""In place of a group: everyone whom the provider lets in. In place of a project: all of them."""
_RIGHTS: Final = re.compile(r"(viewer|submitter|admin)(?::([a-z0-9][a-z0-9_-]{0,62}|\*))?")
_FORM: Final = (
    "give GROUP=admin, GROUP=submitter:PROJECT, GROUP=viewer:PROJECT or GROUP=viewer:* for all "
    "projects; the group * is everyone"
)


@dataclass(frozen=True)
class Grant:
    """Rights of a user: a role in one project; ``project`` None is all of them."""

    role: Role
    project: str | None

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the grant that a setting names. Raises ValueError."""
        found = _RIGHTS.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a role and its project; {_FORM}")
        role, project = cast(Role, found[1]), found[2]
        if role == "admin" and project is not None:
            raise ValueError(f"{text!r}: an admin has access to every project; {_FORM}")
        if role == "submitter" and project in (None, EVERYONE):
            raise ValueError(f"{text!r}: a submitter belongs to one project; {_FORM}")
        if role == "viewer" and project is None:
            raise ValueError(f"{text!r}: a viewer belongs to a project; {_FORM}")
        return cls(role, None if project in (None, EVERYONE) else project)

    def covers(self, role: Role, project: str | None) -> bool:
        """Return whether these rights include ``role`` in ``project``."""
        return self.project in (None, project) and RANK[self.role] >= RANK[role]


@dataclass(frozen=True)
class GrantRule:
    """Which groups give which rights.

    >>> GrantRule.of(["ml=submitter:vision", "*=viewer:vision"]).grants(["ml"])
    (Grant(role='submitter', project='vision'),)
    """

    by_group: Mapping[str, tuple[Grant, ...]]

    @classmethod
    def of(cls, items: Sequence[str]) -> Self:
        """Return the rule from items ``GROUP=ROLE:PROJECT``. Raises ValueError."""
        found: dict[str, tuple[Grant, ...]] = {}
        for item in items:
            group, separator, rights = item.rpartition("=")
            if not separator or not group.strip():
                raise ValueError(f"{item!r} names no group; {_FORM}")
            grant = Grant.of(rights.strip())
            found[group.strip()] = (*found.get(group.strip(), ()), grant)
        return cls(found)

    def grants(self, groups: Collection[str]) -> tuple[Grant, ...]:
        """Return the rights of someone in these groups, the highest role first; none for nobody.

        Rights that another grant includes are left out.
        """
        named = {*groups, EVERYONE} & set(self.by_group)
        found = {grant for group in named for grant in self.by_group[group]}
        kept = [
            grant
            for grant in found
            if not any(
                other != grant and other.covers(grant.role, grant.project) for other in found
            )
        ]
        return tuple(sorted(kept, key=lambda each: (-RANK[each.role], each.project or "")))


@dataclass(frozen=True)
class ProviderRule:
    """The identity provider, this service's registration there, and the rights that it gives."""

    issuer: str
    client_id: str
    client_secret: str
    """Empty for a public client."""
    scopes: str
    groups_claim: str
    """Claim with the groups; dots lead into objects, as in ``realm_access.roles``."""
    grants: GrantRule
    lasts_s: float
    """Longest time between two log-ins."""
    label: str
    """Name of the provider on the log-in page."""


# ---------------------------------------------------------------- mail server

# The operator's mail server, from its URL.


@dataclass(frozen=True)
class MailServer:
    """Where mail is handed in, and by whom."""

    scheme: str
    """``smtps``, ``smtp`` (with STARTTLS) or ``smtp+plain``."""
    host: str
    port: int
    sender: str
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of(cls, url: str, sender: str) -> Self:
        """Return the server of a URL that ``everstep.options`` has checked."""
        parts = urlsplit(url)
        return cls(
            parts.scheme,
            str(parts.hostname),
            parts.port or SMTP_PORTS[parts.scheme],
            sender,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )


# ---------------------------------------------------------------- prices

# What an hour of a resource costs.


@dataclass(frozen=True)
class Prices:
    """What an hour costs the operator's users; None is not priced."""

    gpu_hour: float | None
    cpu_hour: float | None
    currency: str

    @property
    def any(self) -> bool:
        return self.gpu_hour is not None or self.cpu_hour is not None


NO_PRICES: Final = Prices(None, None, "")
