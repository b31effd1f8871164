"""What the tests create at an API server: our manifests, and definitions of others' kinds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from scripts.check_kubernetes import OTHERS, Manifest, documents, pods_of
from tests.kubernetes.api_server import ApiServer, Refused

SINCE = {"policy/v1": (1, 21)}
"""Versions of an API that an older Kubernetes does not have."""


def definition(kind: str, api_version: str) -> Manifest:
    """A definition that takes any field."""
    group, _, version = api_version.partition("/")
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    one = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [one]},
    }


def definitions() -> list[Manifest]:
    """Return those of the folder that KUBERNETES_CRDS names, and open ones for the rest.

    Kubernetes 1.20 takes no empty text for a default, which KubeRay has; we need none of these.
    """
    folder = os.environ.get("KUBERNETES_CRDS")
    files = sorted(Path(folder).glob("*.yaml")) if folder else []
    found = [_filled(each) for file in files for each in documents(file.read_text())]
    known = {each["spec"]["names"]["kind"] for each in found}
    return found + [definition(*each) for each in OTHERS.items() if each[0] not in known]


def serves(server: ApiServer, path: str) -> bool:
    try:
        return bool(server.get(path)["resources"])
    except Refused:
        return False


def apply(server: ApiServer, manifests: list[Manifest], namespace: str) -> list[str]:
    """Create a namespace with every object, and the pods of a RayCluster. Return the versions of
    an API that this Kubernetes lacks."""
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    server.create(space)
    lacking = []
    for each in manifests:
        if each["kind"] == "Namespace":
            continue
        since = SINCE.get(each["apiVersion"])
        if since and server.version() < since:
            lacking.append(each["apiVersion"])
            continue
        server.create(each, namespace)
        if each["kind"] in OTHERS:
            for pod in pods_of(each):
                server.create(pod, namespace)
    return lacking


def _filled(value: Any) -> Any:
    """Return a definition with another default in place of each empty text."""
    if isinstance(value, list):
        return [_filled(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: "-" if (key, each) == ("default", "") else _filled(each) for key, each in value.items()
    }
