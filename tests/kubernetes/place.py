"""A namespace with a RayCluster's pods on two nodes, our service, and the node watcher between
them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep import Client
from everstep.errors import EverstepError
from everstep.kubernetes.watcher import OURS
from everstep.wire import Node
from scripts.check_kubernetes import Manifest, charted, pods_of
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.objects import apply
from tests.support.fake_ray import FakeRay
from tests.support.replica import Replica
from tests.support.service_process import wait_for

DEADLINE_S = 60.0
ACCOUNT = "everstep-node-watcher"
NODE_IPS = {"a": "10.0.0.1", "b": "10.0.0.2"}
"""Node of Kubernetes -> the address of the pod there, which the node of Ray in it has, too."""


class Place:
    """A namespace with a RayCluster's pods on two nodes, a service that knows Ray's nodes by their
    addresses, and the node watcher between them."""

    def __init__(self, server: ApiServer, tmp_path: Path, ray: FakeRay) -> None:
        self.server = server
        self.namespace = "watched"
        self.service = Replica(
            tmp_path / "home", tmp_path / "storage", f"sqlite:///{tmp_path}/db", ray.url
        )
        self._log = tmp_path / "watcher.log"
        self._token = tmp_path / "account-token"
        self.watcher: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Create nodes, pods and the watcher's account with its rights."""
        manifests = charted(namespace=self.namespace)
        apply(self.server, [each for each in manifests if _is_of_watcher(each)], self.namespace)
        [cluster] = [each for each in manifests if each["kind"] == "RayCluster"]
        [_, worker, *_] = pods_of(cluster)
        for name, ip in NODE_IPS.items():
            self.server.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
            labels = {"ray.io/cluster": "everstep", "ray.io/node-type": "worker"}
            spec = {**worker["spec"], "nodeName": name}
            metadata = {"name": f"worker-{name}", "labels": labels}
            self.server.create({**worker, "metadata": metadata, "spec": spec}, self.namespace)
            status = {"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}}
            self.server.patch(f"{self.pod(name)}/status", status)
        self._token.write_text(self.server.account_token(self.namespace, ACCOUNT))

    def start_watcher(self) -> None:
        words = ["--namespace", self.namespace, "--selector", "ray.io/cluster=everstep"]
        words += ["--api", self.server.url, "--ca-file", str(self.server.ca_file)]
        words += ["--token-file", str(self._token)]
        env = {"EVERSTEP_URL": self.service.url, "EVERSTEP_TOKEN": self._admin()}
        with self._log.open("ab") as out:
            self.watcher = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli.main", "node-watcher", *words],
                env={**os.environ, **env},
                stdout=out,
                stderr=out,
            )

    def pod(self, node: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/worker-{node}"

    def node(self, name: str) -> Node:
        """Return the service's node that is in the pod on a node of Kubernetes."""
        with self.client() as client:
            return next(each for each in client.cluster().nodes if each.ip == NODE_IPS[name])

    def set_node(self, name: str, **spec: Any) -> None:
        self.server.patch(f"/api/v1/nodes/{name}", {"spec": spec})

    def wait_for(self, fact: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            assert self.watcher is not None and self.watcher.poll() is None, self.log()
            try:
                return fact()
            except EverstepError:
                return False

        try:
            wait_for(look, DEADLINE_S, what, every_s=0.2)
        except TimeoutError as exc:
            raise TimeoutError(f"{exc}:\n{self.log()}") from None

    def is_(self, name: str, *states: str) -> None:
        """Wait until a node has one of these states, by a mark of the watcher's or by none."""
        self.wait_for(lambda: self.node(name).state in states, f"{name}: {' or '.join(states)}")
        mark = self.node(name).mark
        assert states == ("ALIVE",) or (mark and (mark.reason or "").startswith(OURS))

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def client(self) -> Client:
        return Client(self.service.url, self._admin())

    def _admin(self) -> str:
        return (self.service.home / "token").read_text().strip()

    def end(self) -> None:
        if self.watcher is not None and self.watcher.poll() is None:
            self.watcher.kill()
            self.watcher.wait(30)
        self.service.process.kill()
        self.service.process.wait(30)


def _is_of_watcher(manifest: Manifest) -> bool:
    return manifest["metadata"]["name"].endswith("node-watcher")
