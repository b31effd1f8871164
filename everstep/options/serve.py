"""Every option of ``everstep serve``.

A field has a type, bounds, a default, a docstring that is its help text, and an ``Option`` with the
variable and the flag that set it. Add an option here, and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from everstep.home import DEFAULT_HOME, home_directory
from everstep.options import checks
from everstep.options.model import Option, OptionsModel, SettingsError, options_of

DEFAULT_CORDON_RUNS = 3
DEFAULT_CORDON_FAILURES = 5
DEFAULT_CORDON_WINDOW_S = 3600.0
DEFAULT_RATE_PER_S = 1000.0
DEFAULT_MAX_UPLOAD_BYTES = 256 << 20
DEFAULT_MAX_CODE_BYTES = 4 << 30

Items: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(checks.items_of)]
VariableName: TypeAlias = Annotated[str, AfterValidator(checks.variable_name)]


class ServeOptions(OptionsModel):
    """Every option of ``everstep serve``.

    >>> ServeOptions.read({"EVERSTEP_NODES": "3"}).nodes
    3
    >>> ServeOptions.read({"EVERSTEP_NODES": "3"}, {"nodes": "4"}).nodes
    4
    """

    home: Annotated[
        Path,
        BeforeValidator(checks.path_of),
        AfterValidator(checks.absolute),
        Option("EVERSTEP_HOME", default=DEFAULT_HOME),
    ] = Field(default_factory=lambda: home_directory({}))
    """Directory of everything that the service keeps on this machine."""
    host: Annotated[str, Option("EVERSTEP_HOST", "--host", "HOST")] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Option("EVERSTEP_PORT_NUMBER", "--port", "PORT")] = Field(
        default=8000, ge=0, le=65535
    )
    """TCP port to listen on; 0 takes a free one."""
    public_url: Annotated[
        str,
        AfterValidator(checks.public_url),
        Option("EVERSTEP_PUBLIC_URL", default="the address that it listens on"),
    ] = ""
    """Base URL of links to pages, for example https://everstep.example.org."""
    tls_cert: Annotated[Path | None, Option("EVERSTEP_TLS_CERT")] = None
    """PEM file with the certificate and its chain. The service then speaks TLS and nothing else,
    and EVERSTEP_PUBLIC_URL must begin with https://."""
    tls_key: Annotated[Path | None, Option("EVERSTEP_TLS_KEY")] = None
    """PEM file with the certificate's key."""
    nodes: Annotated[int, Option("EVERSTEP_NODES", "--nodes", "NUMBER")] = Field(default=2, ge=1)
    """Worker nodes of the embedded Ray cluster. Its head trains nothing."""
    cpus_per_node: Annotated[int, Option("EVERSTEP_CPUS_PER_NODE", "--cpus-per-node", "NUMBER")] = (
        Field(default=1, ge=1)
    )
    """CPUs that each worker node of the embedded cluster offers."""
    node_return_s: Annotated[
        float, Option("EVERSTEP_NODE_RETURN_S", "--node-return-s", "SECONDS")
    ] = Field(default=15.0, ge=0, le=3600)
    """Seconds after which a dead node of the embedded cluster is started again; twice as many each
    time that it dies again within ten minutes, at most 300. 0 leaves it dead."""
    cluster_env: Annotated[
        tuple[VariableName, ...],
        BeforeValidator(checks.items_of),
        Option("EVERSTEP_CLUSTER_ENV", "--cluster-env", "NAME"),
    ] = ()
    """Further variables that the embedded cluster inherits, and the code of each run can read.
    NAME* names all that begin so. Secrets and cloud credentials of the service stay out by
    default."""
    drills: Annotated[bool, Option("EVERSTEP_DRILLS", "--drills")] = False
    """Allow failure drills through the API."""
    ray_address: Annotated[
        Annotated[str, AfterValidator(checks.dashboard_url)] | None,
        Option("EVERSTEP_RAY_ADDRESS", "--ray-address", "URL", default="the embedded cluster"),
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
            secret=True,
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
    adopt_storage: Annotated[
        str, Option("EVERSTEP_ADOPT_STORAGE", "--adopt-storage", "STORAGE_ID")
    ] = ""
    """Id of a storage to take over, if it belongs to the database of another service and this one's
    has never used a storage. End the other service first."""
    storage_roots: Annotated[
        Items, Option("EVERSTEP_STORAGE_ROOTS", "--storage-root", "URI", default="anywhere")
    ] = ()
    """Directory or s3://bucket/prefix below which storage and the data of runs must lie."""
    allow_pip: Annotated[str, Option("EVERSTEP_ALLOW_PIP")] = ""
    """Packages that runs may bring: PACKAGE or PROJECT:PACKAGE, separated by commas; 1 allows all
    packages to all projects."""
    price_gpu_hour: Annotated[float | None, Option("EVERSTEP_PRICE_GPU_HOUR")] = Field(
        default=None, ge=0, allow_inf_nan=False
    )
    """Price of a GPU for an hour, shown with every run."""
    price_cpu_hour: Annotated[float | None, Option("EVERSTEP_PRICE_CPU_HOUR")] = Field(
        default=None, ge=0, allow_inf_nan=False
    )
    """Price of a CPU for an hour, shown with every run."""
    currency: Annotated[str, Option("EVERSTEP_CURRENCY")] = Field(
        default="USD", pattern="^[A-Z]{3}$"
    )
    """Currency of the prices: three letters, such as EUR."""
    rate_per_s: Annotated[float, Option("EVERSTEP_RATE_PER_S")] = Field(
        default=DEFAULT_RATE_PER_S, ge=0
    )
    """Requests a second of one token on one replica, twice as many at once. The service answers
    further ones with 429 and Retry-After. 0 is no limit."""
    max_upload_bytes: Annotated[int, Option("EVERSTEP_MAX_UPLOAD_BYTES")] = Field(
        default=DEFAULT_MAX_UPLOAD_BYTES, ge=1
    )
    """Largest upload of code. Each other body has at most 1 MiB and 20,000 values."""
    max_code_bytes: Annotated[int, Option("EVERSTEP_MAX_CODE_BYTES")] = Field(
        default=DEFAULT_MAX_CODE_BYTES, ge=0
    )
    """Bytes of all code archives of one project. A further one is refused with 409 quota_exceeded.
    0 is no limit."""
    notify_origins: Annotated[Items, Option("EVERSTEP_NOTIFY_ORIGINS")] = ()
    """Origins that webhooks may call, for example https://hooks.example.org,http://10.0.0.1:9000.
    Alerts may call them although they are not public."""
    notify_secret: Annotated[str, Option("EVERSTEP_NOTIFY_SECRET", secret=True, verbatim=True)] = (
        Field(default="", repr=False)
    )
    """Key of the signatures of webhooks, at least 16 characters."""
    smtp_url: Annotated[
        str,
        AfterValidator(checks.smtp_url),
        Option("EVERSTEP_SMTP_URL", file="EVERSTEP_SMTP_URL_FILE", secret=True),
    ] = Field(default="", repr=False)
    """Server for the e-mails of alerts: smtps://USER:PASSWORD@HOST, smtp://… for STARTTLS, or
    smtp+plain://HOST without encryption and password. Special characters are percent-encoded."""
    smtp_from: Annotated[str, AfterValidator(checks.mail_address), Option("EVERSTEP_SMTP_FROM")] = (
        ""
    )
    """Sender of these e-mails, for example everstep@example.org."""
    metrics_token: Annotated[
        str,
        AfterValidator(checks.metrics_token),
        Option(file="EVERSTEP_METRICS_TOKEN_FILE", secret=True),
    ] = Field(default="", repr=False)
    """File with a secret of at least 32 characters. It becomes a viewer's token of all projects,
    for Prometheus. Another secret in the file replaces it at the next start."""
    oidc_issuer: Annotated[
        Annotated[str, AfterValidator(checks.issuer_url)] | None,
        Option("EVERSTEP_OIDC_ISSUER", default="log in with tokens only"),
    ] = None
    """OpenID Connect provider at which people log in: its issuer, for example
    https://login.example.org/realms/ml. Register EVERSTEP_PUBLIC_URL/login/oidc/callback there."""
    oidc_client_id: Annotated[str, Option("EVERSTEP_OIDC_CLIENT_ID")] = ""
    """Id of this service at the provider."""
    oidc_client_secret: Annotated[
        str,
        Option(
            "EVERSTEP_OIDC_CLIENT_SECRET",
            file="EVERSTEP_OIDC_CLIENT_SECRET_FILE",
            secret=True,
            default="a public client",
        ),
    ] = Field(default="", repr=False)
    """Secret of this service at the provider."""
    oidc_grants: Annotated[Items, Option("EVERSTEP_OIDC_GRANTS")] = ()
    """Rights of the provider's groups: GROUP=admin, GROUP=submitter:PROJECT, GROUP=viewer:PROJECT
    or GROUP=viewer:* for all projects. The group * is everyone who can log in there."""
    oidc_scopes: Annotated[str, AfterValidator(checks.scopes), Option("EVERSTEP_OIDC_SCOPES")] = (
        "openid email profile"
    )
    """Scopes that the log-in asks for, separated by spaces."""
    oidc_groups_claim: Annotated[str, Option("EVERSTEP_OIDC_GROUPS_CLAIM")] = "groups"
    """Claim with a user's groups; dots lead into objects, as in realm_access.roles."""
    oidc_session_h: Annotated[float, Option("EVERSTEP_OIDC_SESSION_H")] = Field(
        default=12.0, gt=0, le=720
    )
    """Hours after which a person logs in again. Groups are read at each log-in."""
    oidc_label: Annotated[str, Option("EVERSTEP_OIDC_LABEL")] = Field(
        default="single sign-on", min_length=1, max_length=60
    )
    """Name of the provider on the log-in page."""
    cordon_runs: Annotated[int, Option("EVERSTEP_CORDON_RUNS")] = Field(
        default=DEFAULT_CORDON_RUNS, ge=0
    )
    """Runs that failed on one node within the window and so cordon it. 0 is no limit."""
    cordon_failures: Annotated[int, Option("EVERSTEP_CORDON_FAILURES")] = Field(
        default=DEFAULT_CORDON_FAILURES, ge=0
    )
    """Failures on one node within the window that cordon it. 0 is no limit; with both 0 the service
    cordons no node."""
    cordon_window_s: Annotated[float, Option("EVERSTEP_CORDON_WINDOW_S")] = Field(
        default=DEFAULT_CORDON_WINDOW_S, gt=0
    )
    """The window in seconds."""
    scrub_mb_per_s: Annotated[float, Option("EVERSTEP_SCRUB_MB_PER_S")] = Field(default=10.0, ge=0)
    """Megabytes (10**6 bytes) of kept checkpoints that the service reads back a second, over all
    runs; 0 turns it off."""
    scrub_interval_s: Annotated[float, Option("EVERSTEP_SCRUB_INTERVAL_S")] = Field(
        default=86400.0, gt=0
    )
    """Seconds after which the service reads a checkpoint back again."""
    log_format: Annotated[Literal["text", "json"], Option("EVERSTEP_LOG_FORMAT")] = "text"
    """text, or json for one JSON object a line."""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"],
        BeforeValidator(checks.lower),
        Option("EVERSTEP_LOG_LEVEL"),
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
