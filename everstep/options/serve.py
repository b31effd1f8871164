"""Every option of ``everstep serve``.

A field has a type, bounds, a default, and a docstring that is its help text. EVERSTEP_RATE_PER_S
sets ``rate_per_s``. An ``Option`` says what else is to be known of a field, such as its flag.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from everstep.options.model import (
    DEFAULT_HOME,
    FlagValue,
    Option,
    OptionsModel,
    SettingsError,
    default_of,
    home_directory,
    options_of,
)
from everstep.wire.alerts import is_mail_address

# ---------------------------------------------------------------- checks

# Checks of single values of options. Each raises ValueError with the value and what to do.

MIN_TOKEN_CHARS: Final = 32
SMTP_PORTS: Final = {"smtps": 465, "smtp": 587, "smtp+plain": 25}
"""Scheme of a mail server -> its port."""


def path_of(value: Any) -> Any:
    """Return text as an absolute path; other values as they are."""
    return home_directory({"EVERSTEP_HOME": value}) if isinstance(value, str) else value


def absolute(path: Path) -> Path:
    """Return an absolute path."""
    if not path.is_absolute():
        raise ValueError(f"{str(path)!r} is not absolute; give a path that begins with /")
    return path


def items_of(value: Any) -> Any:
    """Split text at commas; text that begins with ``[`` is a JSON list."""
    if not isinstance(value, str):
        return value
    if not value.startswith("["):
        items = tuple(item for item in map(str.strip, value.split(",")) if item)
        if not items:
            raise ValueError(f"{value!r} has no item; name one, or unset it")
        return items
    try:
        return tuple(json.loads(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a JSON list; separate items by commas") from None


def variable_name(pattern: str) -> str:
    """Return the name of a variable; ``*`` may end it."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", pattern):
        raise ValueError(
            f"{pattern!r} is not the name of a variable; give for example HF_TOKEN or HF_*"
        )
    return pattern


def dashboard_url(address: str) -> str:
    """Return the base URL of a Ray dashboard from ``host:port`` or a URL, without a final slash.

    Raises ValueError for an address of Ray's other protocols (GCS, Ray Client) or without a host.
    """
    scheme, separator, rest = address.strip().rpartition("://")
    if separator and scheme not in ("http", "https"):
        raise ValueError(
            f"{address!r} is not a dashboard URL; give the cluster's dashboard, for example "
            "http://head:8265 (the port of `ray start --dashboard-port`, not the GCS or the Ray "
            "Client port)"
        )
    host = rest.rstrip("/")
    if not host or host.startswith(":"):
        raise ValueError(
            f"{address!r} names no host; give the dashboard, for example http://head:8265"
        )
    return f"{scheme or 'http'}://{host}"


def valid_public_url(url: str) -> str:
    """Return an HTTP URL without a final slash; empty text is allowed."""
    if url and not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a URL; give for example https://everstep.example.org")
    return url.rstrip("/")


def issuer_url(url: str) -> str:
    """Return the issuer of an identity provider, as it is: the provider's own tokens name it with
    or without a final slash."""
    if not is_confidential_url(url):
        raise ValueError(
            f"{url!r} is not an issuer; give an https URL, for example https://login.example.org "
            "(http only on this machine)"
        )
    return url


def scopes(text: str) -> str:
    """Return scopes of OpenID Connect, separated by single spaces."""
    words = text.split()
    if not text.isascii() or "openid" not in words:
        raise ValueError(f"{text!r} lacks openid; give for example: openid email profile")
    return " ".join(words)


def is_confidential_url(url: str) -> bool:
    """Return whether nobody on the way reads what is sent to a URL: https, or http to this
    machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if not host or parts.username is not None or parts.fragment:
        return False
    local = host in ("localhost", "127.0.0.1", "::1")
    return parts.scheme == "https" or (parts.scheme == "http" and local)


def valid_smtp_url(url: str) -> str:
    """Return the URL of a mail server; empty text is allowed. The error shows no password."""
    form = (
        "use smtps://USER:PASSWORD@HOST, smtp://… for STARTTLS, or smtp+plain://HOST without "
        "encryption and password"
    )
    if not url:
        return url
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(f"is not a URL; {form}") from None
    if parts.scheme not in SMTP_PORTS or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"is not a mail server; {form}")
    if bool(parts.username) != bool(parts.password):
        raise ValueError("has a user without a password, or a password alone; set both")
    if parts.username and parts.scheme == "smtp+plain":
        raise ValueError("sends a password without encryption; use smtps:// or smtp://")
    return url


def mail_address(text: str) -> str:
    """Return an e-mail address; empty text is allowed."""
    if text and not is_mail_address(text):
        raise ValueError(f"{text!r} is not an e-mail address; give NAME@HOST")
    return text


def valid_metrics_token(secret: str) -> str:
    """Return a secret that is hard to guess, or empty text. The error does not show it."""
    is_word = secret.isascii() and len(secret.split()) == 1
    if secret and (len(secret) < MIN_TOKEN_CHARS or not is_word):
        raise ValueError(
            f"must hold one word of at least {MIN_TOKEN_CHARS} ASCII characters; make one with "
            "`openssl rand -hex 32`"
        )
    return secret


def lower(value: Any) -> Any:
    """Return text in small letters; other values as they are."""
    return value.lower() if isinstance(value, str) else value


# ---------------------------------------------------------------- serve

DEFAULT_CORDON_RUNS = 3
DEFAULT_CORDON_FAILURES = 5
DEFAULT_CORDON_WINDOW_S = 3600.0
DEFAULT_RATE_PER_S = 1000.0

Items: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(items_of)]
VariableName: TypeAlias = Annotated[str, AfterValidator(variable_name)]


class ServeOptions(OptionsModel):
    """Every option of ``everstep serve``.

    >>> ServeOptions.read({"EVERSTEP_NODES": "3"}).nodes
    3
    >>> ServeOptions.read({"EVERSTEP_NODES": "3"}, {"nodes": "4"}).nodes
    4
    """

    home: Annotated[
        Path,
        BeforeValidator(path_of),
        AfterValidator(absolute),
        Option(default=DEFAULT_HOME),
    ] = Field(default_factory=lambda: home_directory({}))
    """Directory of everything that the service keeps on this machine."""
    host: Annotated[str, Option(flag="--host", metavar="HOST")] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Option("EVERSTEP_PORT_NUMBER", "--port", "PORT")] = Field(
        default=8000, ge=0, le=65535
    )
    """TCP port to listen on; 0 takes a free one."""
    public_url: Annotated[
        str,
        AfterValidator(valid_public_url),
        Option(default="the address that it listens on"),
    ] = ""
    """Base URL of links to pages, for example https://everstep.example.org."""
    tls_cert: Path | None = None
    """PEM file with the certificate and its chain. The service then speaks TLS and nothing else,
    and EVERSTEP_PUBLIC_URL must begin with https://."""
    tls_key: Path | None = None
    """PEM file with the certificate's key."""
    nodes: Annotated[int, Option(flag="--nodes", metavar="NUMBER")] = Field(default=2, ge=1)
    """Worker nodes of the embedded Ray cluster. Its head trains nothing."""
    cpus_per_node: Annotated[int, Option(flag="--cpus-per-node", metavar="NUMBER")] = Field(
        default=1, ge=1
    )
    """CPUs that each worker node of the embedded cluster offers."""
    node_return_s: Annotated[float, Option(flag="--node-return-s", metavar="SECONDS")] = Field(
        default=15.0, ge=0, le=3600
    )
    """Seconds after which a dead node of the embedded cluster is started again; twice as many each
    time that it dies again within ten minutes, at most 300. 0 leaves it dead."""
    cluster_env: Annotated[
        tuple[VariableName, ...],
        BeforeValidator(items_of),
        Option(flag="--cluster-env", metavar="NAME"),
    ] = ()
    """Further variables that the embedded cluster inherits, and the code of each run can read.
    NAME* names all that begin so. Secrets and cloud credentials of the service stay out by
    default."""
    drills: Annotated[bool, Option(flag="--drills")] = False
    """Allow failure drills through the API."""
    ray_address: Annotated[
        Annotated[str, AfterValidator(dashboard_url)] | None,
        Option(flag="--ray-address", metavar="URL", default="the embedded cluster"),
    ] = None
    """Dashboard URL of an existing Ray cluster, for example http://head:8265. The service reads its
    token from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."""
    database_url: Annotated[
        str,
        Option(
            "EVERSTEP_DATABASE",
            "--database",
            "URL",
            file="EVERSTEP_DATABASE_FILE",
            default="SQLite in EVERSTEP_HOME",
        ),
    ] = Field(
        default_factory=lambda given: f"sqlite:///{given['home'] / 'everstep.db'}", repr=False
    )
    """Database: postgresql+psycopg://… or sqlite:///…. Set a URL with a password by the environment
    or a file, so that no list of processes shows it."""
    storage_uri: Annotated[
        str,
        Option("EVERSTEP_STORAGE", "--storage", "URI", default="a directory in EVERSTEP_HOME"),
    ] = Field(default_factory=lambda given: str(given["home"] / "storage"))
    """Directory or s3://… for runs, the same for all nodes."""
    adopt_storage: Annotated[str, Option(flag="--adopt-storage", metavar="STORAGE_ID")] = ""
    """Id of a storage to take over, if it belongs to the database of another service and this one's
    has never used a storage. End the other service first."""
    storage_roots: Annotated[
        Items, Option(flag="--storage-root", metavar="URI", default="anywhere")
    ] = ()
    """Directory or s3://bucket/prefix below which storage and the data of runs must lie."""
    allow_pip: str = ""
    """Packages that runs may bring: PACKAGE or PROJECT:PACKAGE, separated by commas; 1 allows all
    packages to all projects."""
    price_gpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a GPU for an hour, shown with every run."""
    price_cpu_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of a CPU for an hour, shown with every run."""
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")
    """Currency of the prices: three letters, such as EUR."""
    rate_per_s: float = Field(default=DEFAULT_RATE_PER_S, ge=0)
    """Requests a second of one token on one replica, twice as many at once. The service answers
    further ones with 429 and Retry-After. 0 is no limit."""
    max_upload_bytes: int = Field(default=256 << 20, ge=1)
    """Largest upload of code. Each other body has at most 1 MiB and 20,000 values."""
    max_code_bytes: int = Field(default=4 << 30, ge=0)
    """Bytes of all code archives of one project. A further one is refused with 409 quota_exceeded.
    0 is no limit."""
    notify_origins: Items = ()
    """Origins that webhooks may call, for example https://hooks.example.org,http://10.0.0.1:9000.
    Alerts may call them although they are not public."""
    notify_secret: Annotated[str, Option(verbatim=True)] = Field(default="", repr=False)
    """Key of the signatures of webhooks, at least 16 characters."""
    smtp_url: Annotated[
        str, AfterValidator(valid_smtp_url), Option(file="EVERSTEP_SMTP_URL_FILE")
    ] = Field(default="", repr=False)
    """Server for the e-mails of alerts: smtps://USER:PASSWORD@HOST, smtp://… for STARTTLS, or
    smtp+plain://HOST without encryption and password. Special characters are percent-encoded."""
    smtp_from: Annotated[str, AfterValidator(mail_address)] = ""
    """Sender of these e-mails, for example everstep@example.org."""
    metrics_token: Annotated[
        str, AfterValidator(valid_metrics_token), Option("", file="EVERSTEP_METRICS_TOKEN_FILE")
    ] = Field(default="", repr=False)
    """File with a secret of at least 32 characters. It becomes a viewer's token of all projects,
    for Prometheus. Another secret in the file replaces it at the next start."""
    oidc_issuer: Annotated[
        Annotated[str, AfterValidator(issuer_url)] | None,
        Option(default="log in with tokens only"),
    ] = None
    """OpenID Connect provider at which people log in: its issuer, for example
    https://login.example.org/realms/ml. Register EVERSTEP_PUBLIC_URL/login/oidc/callback there."""
    oidc_client_id: str = ""
    """Id of this service at the provider."""
    oidc_client_secret: Annotated[
        str, Option(file="EVERSTEP_OIDC_CLIENT_SECRET_FILE", default="a public client")
    ] = Field(default="", repr=False)
    """Secret of this service at the provider."""
    oidc_grants: Items = ()
    """Rights of the provider's groups: GROUP=admin, GROUP=submitter:PROJECT, GROUP=viewer:PROJECT
    or GROUP=viewer:* for all projects. The group * is everyone who can log in there."""
    oidc_scopes: Annotated[str, AfterValidator(scopes)] = "openid email profile"
    """Scopes that the log-in asks for, separated by spaces."""
    oidc_groups_claim: str = "groups"
    """Claim with a user's groups; dots lead into objects, as in realm_access.roles."""
    oidc_session_h: float = Field(default=12.0, gt=0, le=720)
    """Hours after which a person logs in again. Groups are read at each log-in."""
    oidc_label: str = Field(default="single sign-on", min_length=1, max_length=60)
    """Name of the provider on the log-in page."""
    cordon_runs: int = Field(default=DEFAULT_CORDON_RUNS, ge=0)
    """Runs that failed on one node within the window and so cordon it. 0 is no limit."""
    cordon_failures: int = Field(default=DEFAULT_CORDON_FAILURES, ge=0)
    """Failures on one node within the window that cordon it. 0 is no limit; with both 0 the service
    cordons no node."""
    cordon_window_s: float = Field(default=DEFAULT_CORDON_WINDOW_S, gt=0)
    """The window in seconds."""
    scrub_mb_per_s: float = Field(default=10.0, ge=0)
    """Megabytes (10**6 bytes) of kept checkpoints that the service reads back a second, over all
    runs; 0 turns it off."""
    scrub_interval_s: float = Field(default=86400.0, gt=0)
    """Seconds after which the service reads a checkpoint back again."""
    log_format: Literal["text", "json"] = "text"
    """text, or json for one JSON object a line."""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        BeforeValidator(lower),
    ] = "info"
    """Lowest level of the service's own log lines: debug, info, warning, error or critical."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError(
                "TLS needs a certificate and its key; set EVERSTEP_TLS_CERT and EVERSTEP_TLS_KEY, "
                "or neither"
            )
        if self.tls_cert is not None and not self.public_url.startswith("https://"):
            raise SettingsError(
                "TLS needs the name that is in the certificate; set "
                "EVERSTEP_PUBLIC_URL=https://NAME:PORT"
            )
        return self


OPTIONS: Final = options_of(ServeOptions)
"""Field name -> how an operator sets it."""
FLAGS: Final = {name: option for name, option in OPTIONS.items() if option.flag}
"""The options that ``everstep serve`` takes as flags."""
VARIABLES: Final = frozenset(
    name for option in OPTIONS.values() for name in (option.variable, option.file) if name
)
"""Every variable that sets an option."""
SECRET_VARIABLES: Final = frozenset(
    name
    for option in OPTIONS.values()
    for name in (option.variable, option.file)
    if name and option.secret
)
"""The variables with a secret, or with the path of a file that holds one."""


# ---------------------------------------------------------------- flags

# The options of ``everstep serve`` as flags of a command line.


def is_switch(name: str) -> bool:
    """Return whether an option's flag takes no value."""
    return ServeOptions.model_fields[name].annotation is bool


def is_list(name: str) -> bool:
    """Return whether an option's flag may be repeated."""
    return typing.get_origin(ServeOptions.model_fields[name].annotation) is tuple


def help_of(name: str) -> str:
    """Return the help text of an option's flag."""
    option, field = FLAGS[name], ServeOptions.model_fields[name]
    text = " ".join((field.description or "").split())
    notes = [] if is_switch(name) else [f"default: {default_of(field, option)}"]
    notes += ["repeatable"] if is_list(name) else []
    return f"{text} ({'; '.join([*notes, f'or {option.variable}'])})"


def as_variables(flags: Mapping[str, FlagValue]) -> dict[str, str]:
    """Return the variables that say the same as ``flags``.

    A list becomes JSON, since an item may contain a comma.
    """
    return {
        FLAGS[name].variable: (
            json.dumps(value)
            if isinstance(value, list)
            else str(int(value))
            if isinstance(value, bool)
            else value
        )
        for name, value in flags.items()
    }
