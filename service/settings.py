"""What the operator decides about one service process: read once at the start, then passed in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

from service.submission_rules.packages import NO_PACKAGES, PipRule
from service.submission_rules.webhooks import NOBODY, NotifyRule, origin_of

DEFAULT_HOME = Path("~/.everstep")
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_NODES = 2
DEFAULT_CPUS_PER_NODE = 1
DEFAULT_CORDON_RUNS = 3
DEFAULT_CORDON_FAILURES = 5
DEFAULT_CORDON_WINDOW_S = 3600.0
DEFAULT_SCRUB_MB_PER_S = 10.0
DEFAULT_SCRUB_INTERVAL_S = 24 * 3600.0
DEFAULT_RATE_PER_S = 1000.0
DEFAULT_MAX_UPLOAD_BYTES = 256 << 20
DEFAULT_MAX_CODE_BYTES = 4 << 30
_CREDENTIALS = {"s3": "AWS_*", "gs": "GOOGLE_*"}
"""Variables that reach the storage of a scheme; ranks read and write it with them."""


N = TypeVar("N", int, float)


class CannotStart(Exception):
    """This machine or its operator does not allow a start; the message says the way out."""


class SettingsError(ValueError):
    """A setting cannot be used; the message names it and the way out."""


@dataclass(frozen=True)
class Settings:
    """Settings of one service process.

    >>> Settings(home=Path("/srv/everstep")).storage_uri
    '/srv/everstep/storage'
    """

    home: Path
    """Directory of everything that the service keeps on this machine; absolute."""
    host: str = DEFAULT_HOST
    """Address that the API listens on."""
    port: int = DEFAULT_PORT
    """TCP port of the API; 0 takes a free one."""
    database_url: str = ""
    """SQLAlchemy URL; empty is SQLite below ``home``."""
    storage_uri: str = ""
    """Where run directories lie; empty is a directory below ``home``."""
    storage_roots: tuple[str, ...] = ()
    """Directories and object stores' prefixes below which storage and data have to lie; none is no
    limit."""
    ray_address: str | None = None
    """Dashboard URL of an existing Ray cluster, for example ``http://head:8265``; None is the
    embedded cluster."""
    ray_token: str | None = None
    """Token of that cluster; None is sent without one. The embedded cluster makes its own."""
    nodes: int = DEFAULT_NODES
    """Worker nodes of the embedded cluster; its head trains nothing."""
    cpus_per_node: int = DEFAULT_CPUS_PER_NODE
    """CPUs that each worker node of the embedded cluster offers."""
    cluster_env: tuple[str, ...] = ()
    """Variables of the service's environment that the embedded cluster inherits besides; ``*``
    stands for any end of a name."""
    public_url: str = ""
    """Base URL by which browsers reach the service, where that is not the one it listens on; empty
    is that one."""
    notify: NotifyRule = NOBODY
    """Where webhooks may go."""
    drills: bool = False
    """Whether failure drills may be run through the API."""
    pip_rule: PipRule = NO_PACKAGES
    """Which packages runs may bring (``runtime_env.pip``); nodes then fetch and install them."""
    cordon_runs: int = DEFAULT_CORDON_RUNS
    """So many runs that failed on one node within the window cordon it; 0 is no limit."""
    cordon_failures: int = DEFAULT_CORDON_FAILURES
    """So many failures on one node within the window cordon it; 0 is no limit, and with no limit of
    runs no node is cordoned without being asked for."""
    cordon_window_s: float = DEFAULT_CORDON_WINDOW_S
    """The window in seconds."""
    scrub_mb_per_s: float = DEFAULT_SCRUB_MB_PER_S
    """Megabytes (10**6 bytes) of kept checkpoints that are read back a second, over all runs; 0
    reads none back."""
    scrub_interval_s: float = DEFAULT_SCRUB_INTERVAL_S
    """Seconds after which a checkpoint is read back again."""
    rate_per_s: float = DEFAULT_RATE_PER_S
    """Requests a second that one token may make for ever, twice as many at once; 0 is no limit."""
    max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES
    """Largest upload of code."""
    max_code_bytes: int = DEFAULT_MAX_CODE_BYTES
    """Bytes of all uploaded archives of one project; 0 is no limit."""
    metrics_token: str = ""
    """A secret, made by the operator, that is a viewer's token of all projects: for Prometheus.
    Empty for none."""
    tls_cert: Path | None = None
    """PEM file with the API's certificate and what it was signed with; None serves plain HTTP."""
    tls_key: Path | None = None
    """PEM file with its key."""

    def __post_init__(self) -> None:
        if not self.home.is_absolute():
            raise SettingsError(f"home {str(self.home)!r} is not absolute")
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"port {self.port} is not between 0 and 65535")
        if self.public_url and not self.public_url.startswith(("http://", "https://")):
            raise SettingsError(
                f"EVERSTEP_PUBLIC_URL {self.public_url!r} is no URL; give for example "
                "https://everstep.example.org"
            )
        object.__setattr__(self, "public_url", self.public_url.rstrip("/"))
        if self.nodes < 1:
            raise SettingsError(
                f"nodes {self.nodes} is too few; the embedded cluster needs at least 1"
            )
        if self.cpus_per_node < 1:
            raise SettingsError(
                f"cpus_per_node {self.cpus_per_node} is too few; a node needs at least 1"
            )
        for pattern in self.cluster_env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", pattern):
                raise SettingsError(
                    f"--cluster-env {pattern!r} is not the name of a variable; give for example "
                    "HF_TOKEN or HF_*"
                )
        for name in ("cordon_runs", "cordon_failures"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} {getattr(self, name)} is negative; 0 is no limit")
        if not 0 <= self.rate_per_s < float("inf"):
            raise SettingsError(
                f"rate_per_s {self.rate_per_s:g} is no rate; give requests a second, or 0 for no "
                "limit"
            )
        if self.max_upload_bytes < 1:
            raise SettingsError(
                f"max_upload_bytes {self.max_upload_bytes} is too few; give a number of bytes"
            )
        if self.max_code_bytes < 0:
            raise SettingsError(
                f"max_code_bytes {self.max_code_bytes} is negative; give bytes for each project, "
                "0 for no limit"
            )
        if not 0 < self.cordon_window_s < float("inf"):
            raise SettingsError(
                f"cordon_window_s {self.cordon_window_s:g} is no length of time; give seconds "
                "above 0"
            )
        if not 0 <= self.scrub_mb_per_s < float("inf"):
            raise SettingsError(
                f"scrub_mb_per_s {self.scrub_mb_per_s:g} is no rate; give megabytes a second, 0 "
                "for no scrubbing"
            )
        if not 0 < self.scrub_interval_s < float("inf"):
            raise SettingsError(
                f"scrub_interval_s {self.scrub_interval_s:g} is no length of time; give seconds "
                "above 0"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError(
                "TLS needs a certificate and its key: set EVERSTEP_TLS_CERT and EVERSTEP_TLS_KEY, "
                "or neither"
            )
        if self.tls_cert is not None and not self.public_url.startswith("https://"):
            raise SettingsError(
                "TLS needs the name that is in the certificate: set "
                "EVERSTEP_PUBLIC_URL=https://NAME:PORT"
            )
        if not self.database_url:
            object.__setattr__(self, "database_url", f"sqlite:///{self.home / 'everstep.db'}")
        if not self.storage_uri:
            object.__setattr__(self, "storage_uri", str(self.home / "storage"))
        if self.ray_address is not None:
            object.__setattr__(self, "ray_address", dashboard_url(self.ray_address))

    @property
    def embedded(self) -> bool:
        """Whether the Ray cluster is this service's own."""
        return self.ray_address is None

    @property
    def cluster_variables(self) -> tuple[str, ...]:
        """Variables that the embedded cluster inherits beyond its own list: the operator's, and
        those that other settings need."""
        schemes = {place.partition("://")[0] for place in (self.storage_uri, *self.storage_roots)}
        credentials = (variables for scheme, variables in _CREDENTIALS.items() if scheme in schemes)
        return (
            *self.cluster_env,
            *credentials,
            *(("PIP_*",) if self.pip_rule != NO_PACKAGES else ()),
        )

    @property
    def token_path(self) -> Path:
        """File of the local admin token (mode 0600)."""
        return self.home / "token"

    @property
    def url_path(self) -> Path:
        """File that tells the CLI on this machine the service's base URL."""
        return self.home / "url"

    @property
    def lock_path(self) -> Path:
        """File whose lock says that a service runs on this home."""
        return self.home / "serve.lock"

    @property
    def reached_path(self) -> Path:
        """File that names the existing cluster that has answered this home."""
        return self.home / "ray_address"

    @property
    def reached_before(self) -> bool:
        """Whether the existing cluster of these settings has answered this home before: its address
        is no slip of the pen."""
        try:
            return self.reached_path.read_text().strip() == self.ray_address
        except OSError:
            return False

    @property
    def ray_token_path(self) -> Path:
        """Token of the embedded Ray cluster (mode 0600)."""
        return self.home / "ray_token"

    @property
    def cluster_path(self) -> Path:
        """What the embedded cluster's keeper says about it."""
        return self.home / "cluster.json"

    @property
    def cluster_log_path(self) -> Path:
        """Output of the embedded cluster's keeper."""
        return self.home / "cluster.log"


def home_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """``EVERSTEP_HOME``, or ``~/.everstep``; absolute."""
    return Path(environ.get("EVERSTEP_HOME") or DEFAULT_HOME).expanduser().absolute()


def cordon_settings(environ: Mapping[str, str] = os.environ) -> tuple[int, int, float]:
    """``cordon_runs``, ``cordon_failures`` and ``cordon_window_s`` from EVERSTEP_CORDON_RUNS and so
    on, or their defaults.

    Raises SettingsError naming a variable that is not a number.
    """
    return (
        _number(environ, "EVERSTEP_CORDON_RUNS", DEFAULT_CORDON_RUNS),
        _number(environ, "EVERSTEP_CORDON_FAILURES", DEFAULT_CORDON_FAILURES),
        _number(environ, "EVERSTEP_CORDON_WINDOW_S", DEFAULT_CORDON_WINDOW_S),
    )


def scrub_settings(environ: Mapping[str, str] = os.environ) -> tuple[float, float]:
    """``scrub_mb_per_s`` and ``scrub_interval_s`` from EVERSTEP_SCRUB_MB_PER_S and so on, or their
    defaults.

    Raises SettingsError naming a variable that is not a number.
    """
    return (
        _number(environ, "EVERSTEP_SCRUB_MB_PER_S", DEFAULT_SCRUB_MB_PER_S),
        _number(environ, "EVERSTEP_SCRUB_INTERVAL_S", DEFAULT_SCRUB_INTERVAL_S),
    )


def storage_roots(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """``storage_roots`` from EVERSTEP_STORAGE_ROOTS, separated by commas."""
    return tuple(
        root.strip()
        for root in environ.get("EVERSTEP_STORAGE_ROOTS", "").split(",")
        if root.strip()
    )


def cluster_env(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """``cluster_env`` from EVERSTEP_CLUSTER_ENV, separated by commas."""
    return tuple(
        name.strip() for name in environ.get("EVERSTEP_CLUSTER_ENV", "").split(",") if name.strip()
    )


def request_limits(environ: Mapping[str, str] = os.environ) -> tuple[float, int, int]:
    """``rate_per_s``, ``max_upload_bytes`` and ``max_code_bytes`` from EVERSTEP_RATE_PER_S and so
    on, or their defaults.

    Raises SettingsError naming a variable that is not a number.
    """
    return (
        _number(environ, "EVERSTEP_RATE_PER_S", DEFAULT_RATE_PER_S),
        _number(environ, "EVERSTEP_MAX_UPLOAD_BYTES", DEFAULT_MAX_UPLOAD_BYTES),
        _number(environ, "EVERSTEP_MAX_CODE_BYTES", DEFAULT_MAX_CODE_BYTES),
    )


def tls_settings(environ: Mapping[str, str] = os.environ) -> tuple[Path | None, Path | None]:
    """``tls_cert`` and ``tls_key`` from EVERSTEP_TLS_CERT and EVERSTEP_TLS_KEY; None for what is
    not set."""
    certificate, key = (environ.get(f"EVERSTEP_TLS_{name}", "").strip() for name in ("CERT", "KEY"))
    return (Path(certificate) if certificate else None, Path(key) if key else None)


def _number(environ: Mapping[str, str], name: str, default: N) -> N:
    text = environ.get(name, "").strip()
    try:
        return type(default)(text) if text else default
    except ValueError as exc:
        raise SettingsError(f"{name} must be a number, but is {text!r}") from exc


def database_url(environ: Mapping[str, str] = os.environ) -> str:
    """EVERSTEP_DATABASE, or what the file EVERSTEP_DATABASE_FILE holds; empty where neither is set.
    Raises SettingsError."""
    return environ.get("EVERSTEP_DATABASE", "").strip() or _secret_of(
        environ, "EVERSTEP_DATABASE_FILE"
    )


def metrics_token(environ: Mapping[str, str] = os.environ) -> str:
    """What the file EVERSTEP_METRICS_TOKEN_FILE holds; empty where it is not set.

    Raises SettingsError where it cannot be read, or holds no secret of at least 32 characters.
    """
    secret = _secret_of(environ, "EVERSTEP_METRICS_TOKEN_FILE")
    if secret and (len(secret) < 32 or not secret.isascii() or len(secret.split()) != 1):
        raise SettingsError(
            "EVERSTEP_METRICS_TOKEN_FILE must hold one word of at least 32 ASCII characters: "
            "openssl rand -hex 32"
        )
    return secret


def _secret_of(environ: Mapping[str, str], name: str) -> str:
    path = environ.get(name, "").strip()
    try:
        return Path(path).expanduser().read_text().strip() if path else ""
    except OSError as exc:
        raise SettingsError(f"{name} {path} cannot be read: {exc.strerror}") from exc


def notify_rule(environ: Mapping[str, str] = os.environ) -> NotifyRule:
    """Where webhooks may go, from EVERSTEP_NOTIFY_ORIGINS (by commas) and EVERSTEP_NOTIFY_SECRET;
    nowhere by default.

    Raises SettingsError for what is not an origin, and for origins without a secret of at least 16
    characters.
    """
    given = [
        text.strip()
        for text in environ.get("EVERSTEP_NOTIFY_ORIGINS", "").split(",")
        if text.strip()
    ]
    try:
        origins = frozenset(origin_of(text) for text in given)
    except httpx.InvalidURL as exc:
        raise SettingsError(
            f"EVERSTEP_NOTIFY_ORIGINS: {exc}; give https://HOST[:PORT], several by commas"
        ) from exc
    secret = environ.get("EVERSTEP_NOTIFY_SECRET", "")
    if origins and len(secret) < 16:
        raise SettingsError(
            "EVERSTEP_NOTIFY_SECRET must have at least 16 characters where "
            "EVERSTEP_NOTIFY_ORIGINS is set"
        )
    return NotifyRule(origins, secret)


def pip_rule(environ: Mapping[str, str] = os.environ) -> PipRule:
    """Which packages runs may bring, from EVERSTEP_ALLOW_PIP; none by default. Raises
    SettingsError."""
    try:
        return PipRule.of(environ.get("EVERSTEP_ALLOW_PIP", ""))
    except ValueError as exc:
        raise SettingsError(
            f"EVERSTEP_ALLOW_PIP: {exc}; separate several by commas, and give 1 to allow all to "
            "everybody"
        ) from exc


def existing_ray_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The token of an existing cluster, where Ray's own tools look for it: RAY_AUTH_TOKEN,
    RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.

    Raises SettingsError where RAY_AUTH_TOKEN_PATH names a file that cannot be read.
    """
    if token := environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named or "~/.ray/auth_token").expanduser()
    try:
        return path.read_text().strip() or None
    except OSError as exc:
        if named:
            raise SettingsError(
                f"RAY_AUTH_TOKEN_PATH {named} cannot be read: {exc.strerror}"
            ) from exc
        return None


def dashboard_url(address: str) -> str:
    """The base URL of a Ray dashboard from ``host:port`` or a URL, without a trailing slash.

    Raises SettingsError for an address of Ray's other protocols (GCS, Ray Client) or without a
    host.
    """
    scheme, separator, rest = address.strip().rpartition("://")
    if separator and scheme not in ("http", "https"):
        raise SettingsError(
            f"--ray-address {address!r} is not a dashboard URL; give the cluster's dashboard, for "
            "example http://head:8265 "
            "(the port of `ray start --dashboard-port`, not the GCS or the Ray Client port)"
        )
    host = rest.rstrip("/")
    if not host or host.startswith(":"):
        raise SettingsError(
            f"--ray-address {address!r} names no host; give the dashboard, for example "
            "http://head:8265"
        )
    return f"{scheme or 'http'}://{host}"
