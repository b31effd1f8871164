"""A real OpenID Connect provider: Django with django-oauth-toolkit, in a process of its own.

``python -m tests.support.oidc_server PORT DATABASE KEY`` serves it. ``POST /control`` takes what a
test sets: a user's groups, the client's redirect URI.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

CLIENT_ID = "everstep"
CLIENT_SECRET = "not/so:secret+but odd"
PASSWORD = "correct horse battery staple"
LOGIN = """<form method="post">{% csrf_token %}{{ form }}<button>Log in</button></form>"""


class Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        return


def configure(port: int, database: Path, key: str) -> None:
    import django
    from django.conf import settings

    settings.configure(
        DEBUG=False,
        SECRET_KEY="of tests" * 8,
        ALLOWED_HOSTS=["127.0.0.1"],
        ROOT_URLCONF="tests.support.oidc_server_urls",
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
        LOGIN_URL="/accounts/login/",
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
        INSTALLED_APPS=[
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "oauth2_provider",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "OPTIONS": {
                    "loaders": [
                        (
                            "django.template.loaders.locmem.Loader",
                            {"registration/login.html": LOGIN},
                        )
                    ]
                },
            }
        ],
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True,
            "OIDC_RSA_PRIVATE_KEY": key,
            "OIDC_ISS_ENDPOINT": f"http://127.0.0.1:{port}/o",
            "OAUTH2_VALIDATOR_CLASS": "tests.support.oidc_server_urls.Validator",
            "PKCE_REQUIRED": True,
            "SCOPES": {"openid": "who you are", "email": "address", "profile": "name"},
        },
    )
    django.setup()


def prepare() -> None:
    """Make tables, users and the client, unless an earlier start has."""
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from oauth2_provider.models import Application

    call_command("migrate", verbosity=0)
    for name in ("ada", "bob"):
        if not User.objects.filter(username=name).exists():
            User.objects.create_user(name, f"{name}@example.org", PASSWORD)
    if not Application.objects.exists():
        Application.objects.create(
            client_id=CLIENT_ID,
            client_secret=CLIENT_SECRET,
            client_type=Application.CLIENT_CONFIDENTIAL,
            authorization_grant_type=Application.GRANT_AUTHORIZATION_CODE,
            redirect_uris="http://127.0.0.1/none",
            algorithm=Application.RS256_ALGORITHM,
            skip_authorization=True,
        )


def control(wanted: dict[str, Any]) -> None:
    """Set groups of a user, or the client's redirect URI."""
    from django.contrib.auth.models import Group, User
    from oauth2_provider.models import Application

    if "user" in wanted:
        groups = [Group.objects.get_or_create(name=name)[0] for name in wanted["groups"]]
        User.objects.get(username=wanted["user"]).groups.set(groups)
    if "redirect_uri" in wanted:
        Application.objects.update(redirect_uris=wanted["redirect_uri"])


def main() -> None:
    port, database, key = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]).read_text()
    configure(port, database, key)
    prepare()
    from django.core.wsgi import get_wsgi_application

    application = get_wsgi_application()
    with make_server("127.0.0.1", port, application, handler_class=Silent) as server:
        print(json.dumps({"ready": port}), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
