"""Administration of access: projects, tokens, sessions, the audit log, single sign-on.

Who may call is decided in the core (`service/api/auth.py`): nothing is served without that.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Final

from service.annex import Annex
from service.annexes.access import account, routes, single_sign_on
from service.annexes.access.provider import CALLBACK_PATH, Provider
from service.api.answers import ServiceLinks
from service.parts import ServiceParts
from service.settings import Settings


def page_values(parts: ServiceParts) -> Mapping[str, Any]:
    """Return the name of the identity provider for the page to log in."""
    provider = parts.find(Provider)
    return {"provider": provider.rule.label if provider is not None else None}


def opened(parts: ServiceParts) -> nullcontext[Provider] | None:
    """Return the identity provider at which people log in; None for tokens only."""
    rule = parts[Settings].provider
    if rule is None:
        return None
    return nullcontext(Provider(rule, f"{parts[ServiceLinks].public_url}{CALLBACK_PATH}"))


ACCESS: Final = Annex(
    "access",
    routers=(routes.router,),
    pages=(account.router, single_sign_on.router),
    package="service.annexes.access",
    slots={"log_in": "provider_log_in.html", "who": "account_link.html"},
    page_values=page_values,
    opened=opened,
)
