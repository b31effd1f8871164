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
from pathlib import Path
from typing import Any, Final, Self

import httpx

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
class Change:
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

    def watch(self, path: str, version: str, selector: str = "") -> Iterator[Change]:
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


def _change(line: str, path: str) -> Change:
    """Return the change in one line of a watch. Raises Gone, Unavailable for an error in it."""
    found = _json(line, path)
    kind, item = str(found.get("type")), found.get("object")
    if not isinstance(item, dict):
        raise ServiceError(f"{path}: not a change of Kubernetes's API: {line[:120]!r}")
    if kind == "ERROR":
        message = str(item.get("message", item))
        raise Gone(message) if item.get("code") == 410 else Unavailable(f"{path}: {message}")
    return Change(kind, item)


def _message(text: str) -> str:
    """Return what an error response says, of Kubernetes or of a proxy."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:200] or "no reason given"
