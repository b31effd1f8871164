"""Kubernetes's API: list objects of one kind, and watch how they change.

The official client brings ten packages and threads of its own for two kinds of objects; httpx is
here anyway.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

import httpx
from pydantic import AwareDatetime, TypeAdapter, ValidationError

from everstep.errors import AuthError, EverstepError, ServiceError, Unavailable, UsageError

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its account's token, its namespace and the certificate of Kubernetes's API."""
PAGE: Final = 500
WATCH_S: Final = 240
"""Seconds after which the API ends a watch, so that one whose connection is dead is not kept."""
SILENCE_S: Final = WATCH_S + 30.0
TIMEOUT_S: Final = 30.0
_MANY: Final = frozenset({429, 500, 502, 503, 504})


class Gone(EverstepError):
    """The API remembers the changes since that version no more: list again."""


@dataclass(frozen=True)
class Listed:
    """Objects, and the version of the collection from which a watch goes on."""

    items: tuple[dict[str, Any], ...]
    version: str


@dataclass(frozen=True)
class WatchedChange:
    """What happened to one object."""

    kind: str
    """``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``, which changes the version only."""
    item: dict[str, Any]

    @property
    def version(self) -> str:
        """Return the version of the collection after this change."""
        return str(self.item["metadata"]["resourceVersion"])


@dataclass(frozen=True)
class Access:
    """How to reach Kubernetes's API: its address, a file with a token, a file with its authority's
    certificate."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None

    @classmethod
    def of_pod(cls, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Self:
        """Return what Kubernetes gives every pod. Raises UsageError outside of a pod."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise UsageError(
                "this is no pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set); run it as "
                "deploy/kuberay/node-watcher.yaml does, or give --api URL"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", account / "token", account / "ca.crt")


class KubernetesApi:
    """Lists and watches. Each call reads the token anew: Kubernetes replaces it every hour."""

    def __init__(self, access: Access, transport: httpx.BaseTransport | None = None) -> None:
        self._access = access
        verify: ssl.SSLContext | bool = True
        if access.ca_file is not None and access.url.startswith("https:"):
            try:
                verify = ssl.create_default_context(cafile=str(access.ca_file))
            except OSError as exc:
                raise UsageError(
                    f"{access.ca_file}: {exc.strerror or exc}; give --ca-file"
                ) from exc
        self._http = httpx.Client(
            base_url=access.url, verify=verify, timeout=TIMEOUT_S, trust_env=False,
            transport=transport,
        )  # fmt: skip

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def list(self, path: str, selector: str = "") -> Listed:
        """Return all objects of a collection, such as ``/api/v1/nodes``.

        Raises AuthError, Unavailable, ServiceError; Gone if the list changed too much meanwhile.
        """
        items: list[dict[str, Any]] = []
        params = {"limit": str(PAGE), **_selected(selector)}
        while True:
            try:
                response = self._http.get(path, params=params, headers=self._headers())
            except httpx.HTTPError as exc:
                raise self._lost(exc) from exc
            self._check(response, path)
            found = _json(response.text, path)
            metadata = found.get("metadata") or {}
            items += found.get("items") or []
            if not metadata.get("continue"):
                return Listed(tuple(items), str(metadata.get("resourceVersion", "")))
            params["continue"] = metadata["continue"]

    def watch(self, path: str, version: str, selector: str = "") -> Iterator[WatchedChange]:
        """Yield the changes since a version until the API ends the watch.

        Raises as ``list``; Gone if the API does not remember that version.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
            **_selected(selector),
        }
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENCE_S)
        try:
            with self._http.stream(
                "GET", path, params=params, headers=self._headers(), timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                self._check(response, path)
                for line in response.iter_lines():
                    if line.strip():
                        yield _change(line, path)
        except httpx.HTTPError as exc:
            raise self._lost(exc) from exc

    def _headers(self) -> dict[str, str]:
        if self._access.token_file is None:
            return {}
        try:
            token = self._access.token_file.read_text().strip()
        except OSError as exc:
            raise UsageError(
                f"{self._access.token_file}: {exc.strerror}; the pod needs the token of its "
                "service account (automountServiceAccountToken), or give --token-file"
            ) from exc
        return {"Authorization": f"Bearer {token}"}

    def _check(self, response: httpx.Response, path: str) -> None:
        """Raise the error of a response that is none of success."""
        if response.is_success:
            return
        status, text = response.status_code, _message(response.text)
        if status == 410:
            raise Gone(text)
        if status in (401, 403):
            raise AuthError(
                f"Kubernetes refuses {path}: {text}; the service account needs list and watch "
                "there, as in deploy/kuberay/node-watcher.yaml",
                status=status,
            )
        if status in _MANY:
            raise Unavailable(f"Kubernetes answered {status} to {path}: {text}")
        raise ServiceError(f"Kubernetes answered {status} to {path}: {text}", status=status)

    def _lost(self, exc: httpx.HTTPError) -> Unavailable:
        cause = str(exc) or type(exc).__name__
        return Unavailable(f"Kubernetes's API at {self._access.url} is out of reach ({cause})")


def _selected(selector: str) -> dict[str, str]:
    return {"labelSelector": selector} if selector else {}


def _json(text: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServiceError(f"{path}: not an answer of Kubernetes's API: {text[:120]!r}")
    return found


def _change(line: str, path: str) -> WatchedChange:
    """Return the change in one line of a watch. Raises Gone, Unavailable for an error in it."""
    found = _json(line, path)
    kind, item = str(found.get("type")), found.get("object")
    if not isinstance(item, dict):
        raise ServiceError(f"{path}: not a change of Kubernetes's API: {line[:120]!r}")
    if kind == "ERROR":
        message = str(item.get("message", item))
        raise Gone(message) if item.get("code") == 410 else Unavailable(f"{path}: {message}")
    return WatchedChange(kind, item)


def _message(text: str) -> str:
    """Return what an error response says, of Kubernetes or of a proxy."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:200] or "no reason given"


# ---------------------------------------------------------------- objects

# Nodes and pods of Kubernetes, with the few fields that say that one is about to go.

_TIME: Final[TypeAdapter[datetime]] = TypeAdapter(AwareDatetime)


@dataclass(frozen=True)
class Taint:
    """A mark on a node that keeps pods away, or throws them out."""

    key: str
    effect: str
    """``NoSchedule``, ``PreferNoSchedule`` or ``NoExecute``."""
    value: str = ""


@dataclass(frozen=True)
class Toleration:
    """A taint that a pod bears."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    for_s: float | None = None
    """How long it bears a taint that throws pods out; None is for good."""

    def bears(self, taint: Taint) -> bool:
        """Return whether this is a toleration of the taint, for whatever time."""
        if self.effect and self.effect != taint.effect:
            return False
        if not self.key:
            return self.operator == "Exists"
        same = self.operator == "Exists" or self.value == taint.value
        return self.key == taint.key and same


@dataclass(frozen=True)
class KubeNode:
    """A node of Kubernetes."""

    name: str
    unschedulable: bool = False
    """Whether it is cordoned (``kubectl cordon``)."""
    taints: tuple[Taint, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> KubeNode:
        """Return the node in an object of the API. Raises KeyError, TypeError."""
        spec = raw.get("spec") or {}
        return cls(
            raw["metadata"]["name"],
            bool(spec.get("unschedulable")),
            tuple(
                Taint(taint["key"], taint["effect"], taint.get("value") or "")
                for taint in spec.get("taints") or ()
            ),
        )


@dataclass(frozen=True)
class RayPod:
    """A pod in which a node of Ray runs."""

    name: str
    node: str | None
    """Name of the node of Kubernetes that it is on."""
    ips: frozenset[str]
    tolerations: tuple[Toleration, ...] = ()
    goes_at: datetime | None = None
    """When its time to end is over; None if it was not told to end."""
    disruption: str | None = None
    """Why Kubernetes is about to end it, such as ``PreemptionByScheduler``."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> RayPod | None:
        """Return the pod in an object of the API; None if it has no address, or has ended and left
        its address to others. Raises KeyError, TypeError."""
        metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
        listed = [entry["ip"] for entry in status.get("podIPs") or () if entry.get("ip")]
        ips = frozenset(listed + ([status["podIP"]] if status.get("podIP") else []))
        if not ips or status.get("phase") in ("Succeeded", "Failed"):
            return None
        return cls(
            metadata["name"],
            spec.get("nodeName"),
            ips,
            tuple(map(_toleration, spec.get("tolerations") or ())),
            _time_of(metadata.get("deletionTimestamp")),
            next(
                (
                    condition.get("reason") or "DisruptionTarget"
                    for condition in status.get("conditions") or ()
                    if condition.get("type") == "DisruptionTarget"
                    and condition.get("status") == "True"
                ),
                None,
            ),
        )


def _toleration(raw: Mapping[str, Any]) -> Toleration:
    seconds = raw.get("tolerationSeconds")
    return Toleration(
        raw.get("key") or "",
        raw.get("operator") or "Equal",
        raw.get("value") or "",
        raw.get("effect") or "",
        None if seconds is None else max(0.0, float(seconds)),
    )


def _time_of(raw: str | None) -> datetime | None:
    if raw is None:
        return None
    try:
        return _TIME.validate_python(raw)
    except ValidationError as exc:
        raise TypeError(f"{raw!r} is not a time") from exc
