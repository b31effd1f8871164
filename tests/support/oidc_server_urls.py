"""Addresses and claims of the provider in oidc_server.py; Django imports this by name."""

from __future__ import annotations

import json
from typing import Any

from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt
from oauth2_provider.oauth2_validators import OAuth2Validator

from tests.support import oidc_server


class Validator(OAuth2Validator):  # type: ignore[misc]
    """Puts address and groups into ID tokens."""

    oidc_claim_scope = None

    def get_additional_claims(self, request: Any) -> dict[str, Any]:
        return {
            "email": request.user.email,
            "email_verified": True,
            "groups": sorted(request.user.groups.values_list("name", flat=True)),
        }


@csrf_exempt
def control(request: HttpRequest) -> HttpResponse:
    oidc_server.control(json.loads(request.body))
    return HttpResponse(status=204)


urlpatterns = [
    path("o/", include("oauth2_provider.urls", namespace="oauth2_provider")),
    path("accounts/login/", LoginView.as_view()),
    path("control", control),
]
