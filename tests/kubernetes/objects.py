"""What the tests create at an API server: our manifests, as far as Kubernetes itself has their
kinds."""

from __future__ import annotations

from scripts.check_kubernetes import OTHERS, Manifest, pods_of
from tests.kubernetes.api_server import ApiServer

SINCE = {"policy/v1": (1, 21)}
"""Versions of an API that an older Kubernetes does not have."""


def apply(server: ApiServer, manifests: list[Manifest], namespace: str) -> list[str]:
    """Create a namespace with every object of Kubernetes's own kinds, and of a RayCluster its pods.

    Return the versions of an API that this Kubernetes lacks.
    """
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    server.create(space)
    lacking = []
    for each in manifests:
        since = SINCE.get(each["apiVersion"])
        if since and server.version() < since:
            lacking.append(each["apiVersion"])
        elif each["kind"] in OTHERS:
            for pod in pods_of(each):
                server.create(pod, namespace)
        elif each["kind"] != "Namespace":
            server.create(each, namespace)
    return lacking
