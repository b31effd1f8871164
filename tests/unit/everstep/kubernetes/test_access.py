"""How a pod reaches Kubernetes's API: its address, and the token of the pod's account."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import UsageError
from everstep.kubernetes.api import Access, KubernetesApi
from tests.support.scripted_http import reply, scripted

NODES = "/api/v1/nodes"


def test_the_token_is_read_anew_and_a_missing_one_is_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with scripted() as server:
        api = KubernetesApi(Access(server.url, token))
        server.script[NODES] = [reply({"metadata": {"resourceVersion": "1"}, "items": []})]
        with pytest.raises(UsageError, match="service account"):
            api.list(NODES)
        for value in ("first", "second"):
            token.write_text(value + "\n")
            api.list(NODES)
        api.close()
        sent = [request.headers["Authorization"] for request in server.to(NODES)]
    assert sent == ["Bearer first", "Bearer second"]


def test_a_pod_finds_the_api_by_what_kubernetes_gives_it(tmp_path: Path) -> None:
    found = Access.of_pod(
        {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, tmp_path
    )
    assert found == Access("https://[fd00::1]:443", tmp_path / "token", tmp_path / "ca.crt")
    with pytest.raises(UsageError, match="--api"):
        Access.of_pod({}, tmp_path)
