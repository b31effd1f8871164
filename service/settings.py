"""The settings of one service process: read once at the start, then passed in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import httpx
import structlog
from pydantic import Field, model_validator

from everstep.options.model import SettingsError
from everstep.options.serve import OPTIONS, ServeOptions
from service.model.operator_rules import GrantRule, MailServer, Prices, ProviderRule
from service.submission_rules.allowed import NO_PACKAGES, NotifyRule, PipRule, origin_of
from storage.files.protocol import draft_beside

MIN_NOTIFY_SECRET_CHARS: Final = 16
_CREDENTIALS: Final = {"s3": "AWS_*", "gs": "GOOGLE_*"}
"""Scheme of a storage -> variables with its credentials, which ranks read and write it with."""


class CannotStart(Exception):
    """The machine or the operator's choices do not allow a start. The message says what to do."""


class Settings(ServeOptions):
    """The options of ``everstep serve``, and what follows from them.

    >>> Settings(home=Path("/srv/everstep")).storage_uri
    '/srv/everstep/storage'
    """

    ray_token: str | None = Field(default=None, repr=False, exclude=True)
    """Token of the existing Ray cluster; None sends none. The embedded cluster makes its own."""

    @classmethod
    def of_process(cls, environ: Mapping[str, str]) -> Self:
        """Return what the environment says, with the token of an existing Ray cluster.

        Raises SettingsError.
        """
        settings = cls.read(environ)
        if settings.embedded:
            return settings
        return settings.model_copy(update={"ray_token": existing_ray_token(environ)})

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        """Raise SettingsError at the start, not at the first use, for a rule that is wrong."""
        _ = self.pip_rule, self.notify, self.provider, self.mail
        return self

    @cached_property
    def pip_rule(self) -> PipRule:
        """The packages that runs may bring (``runtime_env.pip``). Raises SettingsError."""
        try:
            return PipRule.of(self.allow_pip)
        except ValueError as exc:
            raise SettingsError(
                f"{OPTIONS['allow_pip'].variable}: {exc}; separate several by commas, or set it "
                "to 1 to allow all packages to all projects"
            ) from exc

    @cached_property
    def notify(self) -> NotifyRule:
        """The origins that webhooks may call, and the key of their signatures.

        Raises SettingsError for an invalid origin, and for origins without a long enough secret.
        """
        try:
            origins = frozenset(map(origin_of, self.notify_origins))
        except httpx.InvalidURL as exc:
            raise SettingsError(
                f"{OPTIONS['notify_origins'].variable}: {exc}; give https://HOST[:PORT], several "
                "by commas"
            ) from exc
        if origins and len(self.notify_secret) < MIN_NOTIFY_SECRET_CHARS:
            found = (
                f"has fewer than {MIN_NOTIFY_SECRET_CHARS} characters"
                if self.notify_secret
                else "is not set"
            )
            raise SettingsError(
                f"{OPTIONS['notify_secret'].variable} {found}; "
                f"{OPTIONS['notify_origins'].variable} needs one of at least "
                f"{MIN_NOTIFY_SECRET_CHARS} characters, to sign webhooks"
            )
        return NotifyRule(origins, self.notify_secret)

    @cached_property
    def provider(self) -> ProviderRule | None:
        """The identity provider at which people log in; None for tokens only.

        Raises SettingsError if something that it needs is missing or wrong.
        """
        if self.oidc_issuer is None:
            given = [name for name in ("oidc_client_id", "oidc_grants") if getattr(self, name)]
            if given:
                raise SettingsError(
                    f"{OPTIONS[given[0]].variable} is set without a provider; set "
                    f"{OPTIONS['oidc_issuer'].variable}, or unset it"
                )
            return None
        for name in ("oidc_client_id", "oidc_grants"):
            if not getattr(self, name):
                raise SettingsError(
                    f"{OPTIONS['oidc_issuer'].variable} needs {OPTIONS[name].variable}; set it"
                )
        try:
            grants = GrantRule.of(self.oidc_grants)
        except ValueError as exc:
            raise SettingsError(f"{OPTIONS['oidc_grants'].variable}: {exc}") from exc
        return ProviderRule(
            issuer=self.oidc_issuer,
            client_id=self.oidc_client_id,
            client_secret=self.oidc_client_secret,
            scopes=self.oidc_scopes,
            groups_claim=self.oidc_groups_claim,
            grants=grants,
            lasts_s=self.oidc_session_h * 3600,
            label=self.oidc_label,
        )

    @cached_property
    def mail(self) -> MailServer | None:
        """The server for e-mails of alerts; None if there is none. Raises SettingsError."""
        url, sender = OPTIONS["smtp_url"].variable, OPTIONS["smtp_from"].variable
        if not self.smtp_url:
            if self.smtp_from:
                raise SettingsError(f"{sender} needs a mail server; set {url}, too")
            return None
        if not self.smtp_from:
            raise SettingsError(f"{url} needs a sender; set {sender} to NAME@HOST")
        return MailServer.of(self.smtp_url, self.smtp_from)

    @property
    def prices(self) -> Prices:
        """What an hour of a resource costs."""
        return Prices(self.price_gpu_hour, self.price_cpu_hour, self.currency)

    @property
    def embedded(self) -> bool:
        """Whether the Ray cluster is this service's own."""
        return self.ray_address is None

    @property
    def cluster_variables(self) -> tuple[str, ...]:
        """Variables that the embedded cluster inherits beyond its own list: those that the operator
        names, and those that other settings need."""
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
        """File with the service's base URL, which the CLI on this machine reads."""
        return self.home / "url"

    @property
    def lock_path(self) -> Path:
        """File that a service locks while it runs on this home."""
        return self.home / "serve.lock"

    @property
    def reached_path(self) -> Path:
        """File with the address of the existing cluster that has answered this home."""
        return self.home / "ray_address"

    @property
    def reached_before(self) -> bool:
        """Whether the existing cluster has answered this home before. Its address is then right."""
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
        """File in which the embedded cluster's keeper describes the cluster."""
        return self.home / "cluster.json"

    @property
    def cluster_log_path(self) -> Path:
        """Output of the embedded cluster's keeper."""
        return self.home / "cluster.log"


def existing_ray_token(environ: Mapping[str, str]) -> str | None:
    """Return the token of an existing cluster from where Ray's own tools look for it.

    These are RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and ~/.ray/auth_token, in this order. Raises
    SettingsError if the file that RAY_AUTH_TOKEN_PATH names cannot be read.
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
                f"RAY_AUTH_TOKEN_PATH {named} cannot be read: {exc.strerror}; name a file that "
                "this user can read"
            ) from exc
        return None


# ---------------------------------------------------------------- home

# The service's home directory: its creation, its lock, and its URL for clients on this machine.

log = structlog.get_logger(__name__)


class HomeError(Exception):
    """The home directory cannot be used. The message says why and what to do."""


class ServiceLock:
    """Locks a file for one service process. The lock ends with the process; the file says who has
    it.

    Entering raises HomeError if the file cannot be written, or another service holds it.
    """

    def __init__(self, path: Path, what: str, way_out: str) -> None:
        """``what`` is what the service has to itself, ``way_out`` another way to start."""
        self._path, self._what, self._way_out = path, what, way_out
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise HomeError(
                f"{self._what} cannot be used ({exc.strerror}); {self._way_out}"
            ) from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(descriptor, 512, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise HomeError(
                f"a service ({holder or 'unknown'}) already runs on {self._what}; stop it there "
                f"with `kill PID`, or {self._way_out}"
            ) from exc
        began = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, f"pid {os.getpid()} on {os.uname().nodename} since {began}\n".encode(), 0
        )
        self._descriptor = descriptor
        return self

    def _check(self) -> None:
        """Raise HomeError if the place of the file must not be used."""

    def __exit__(self, *_: object) -> None:
        # The file stays: otherwise two services could lock two files of one name.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class HomeLock(ServiceLock):
    """Locks a home directory. Entering also raises HomeError if other users may write it."""

    def __init__(self, settings: Settings) -> None:
        way_out = "choose another home, one that you can write, with EVERSTEP_HOME"
        super().__init__(settings.lock_path, f"the home directory {settings.home}", way_out)

    def _check(self) -> None:
        refuse_open_home(self._path.parent)


def refuse_open_home(home: Path) -> None:
    """Raise HomeError if other users may write the home directory, as ssh does for its keys.

    Whoever can replace a file there can give the service a token or a cluster of their own. A
    directory of root's that nobody else may write is accepted. If the group may write, which may
    be this user's alone, only a warning is logged. Raises OSError.
    """
    found = home.stat()
    way_out = (
        f"make it yours alone with `chown {os.geteuid()} {home}` and `chmod 700 {home}`, or choose "
        f"another with EVERSTEP_HOME, for example {home / 'own'}, which the service creates"
    )
    if found.st_uid not in (0, os.geteuid()):
        raise HomeError(
            f"the home directory {home} belongs to another user ({_user(found.st_uid)}), who could "
            f"replace the administrator's token and the cluster's files in it; {way_out}"
        )
    if found.st_mode & stat.S_IWOTH:
        raise HomeError(
            f"every user of this machine may write in the home directory {home} (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), and so replace the administrator's token and the "
            f"cluster's files in it; {way_out}"
        )
    if found.st_mode & stat.S_IWGRP:
        log.warning(
            "group members may replace the tokens in the home directory; run chmod g-w on it",
            home=str(home),
            mode=f"{stat.S_IMODE(found.st_mode):04o}",
            group=found.st_gid,
        )


def _user(uid: int) -> str:
    """Return a user's name and number, or only the number."""
    try:
        return f"{pwd.getpwuid(uid).pw_name}, uid {uid}"
    except KeyError:
        return f"uid {uid}"


@contextlib.contextmanager
def published_url(path: Path, url: str) -> Iterator[None]:
    """Publish the service's URL to clients on this machine while it runs."""
    with draft_beside(path) as draft:
        Path(draft).write_text(f"{url}\n")
        Path(draft).replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
