"""Kubernetes's own API server with its etcd, as processes on this machine: what it accepts and
sends is what a cluster accepts and sends. Nothing schedules or runs pods here.

The two programs come from the folder that ``KUBEBUILDER_ASSETS`` names, as for other projects'
tests, else from ``out/kubernetes``, where ``scripts/get-kubernetes-api-server.sh`` puts them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from scripts.check_kubernetes import TOOLS, Manifest
from tests.support.service_process import free_port, wait_for

PROGRAMS = ("etcd", "kube-apiserver")
START_S = 120.0
CLUSTER_WIDE = {"Namespace", "CustomResourceDefinition"}


def assets() -> Path:
    """Return the folder that has, or would have, the programs."""
    return Path(os.environ.get("KUBEBUILDER_ASSETS") or TOOLS)


def is_possible() -> bool:
    """Return whether this machine has both programs."""
    return all(shutil.which(name, path=assets()) for name in PROGRAMS)


class Refused(Exception):
    """The API server's answer was no success. The message is what it said."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class ApiServer:
    """An API server that only this machine reaches; a context manager that leaves nothing
    behind."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kube-"))
        self.token = secrets.token_hex(16)
        self.ca_file = self.base / "certificates" / "apiserver.crt"
        self.url = f"https://127.0.0.1:{free_port()}"
        self._etcd = f"http://127.0.0.1:{free_port()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._http: httpx.Client | None = None

    def __enter__(self) -> ApiServer:
        try:
            self._start_etcd()
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def start(self) -> None:
        """Start the API server, and wait until it is ready."""
        key = self.base / "accounts.key"
        if not key.exists():
            generate = ["openssl", "genrsa", "-out", str(key), "2048"]
            subprocess.run(generate, check=True, capture_output=True)
            (self.base / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")
        port = self.url.rpartition(":")[2]
        self._launch(
            "kube-apiserver",
            *(f"--etcd-servers={self._etcd}", "--etcd-prefix=/everstep"),
            *("--bind-address=127.0.0.1", f"--secure-port={port}"),
            *(f"--cert-dir={self.base}/certificates", "--endpoint-reconciler-type=none"),
            *("--authorization-mode=RBAC", f"--token-auth-file={self.base}/tokens.csv"),
            *("--service-account-issuer=https://kubernetes.default.svc",),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            # without the controllers that make each namespace's default account
            *(
                "--disable-admission-plugins=ServiceAccount",
                "--service-cluster-ip-range=10.0.0.0/24",
            ),
        )
        wait_for(self._is_ready, START_S, "the API server", every_s=0.3)

    def version(self) -> tuple[int, int]:
        """Return (major, minor) of Kubernetes."""
        found = self.get("/version")
        return int(found["major"]), int(found["minor"].rstrip("+"))

    # ------------------------------------------------------------ objects

    def get(self, path: str) -> dict[str, Any]:
        return self.call("GET", path)

    def create(self, manifest: Manifest, namespace: str = "everstep") -> dict[str, Any]:
        """Create an object; unknown fields are refused. Raises Refused."""
        path = self.collection(manifest, namespace)
        metadata = {key: each for key, each in manifest["metadata"].items() if key != "namespace"}
        sent = {**manifest, "metadata": metadata}
        return self.call("POST", f"{path}?fieldValidation=Strict", sent)

    def collection(self, manifest: Manifest, namespace: str) -> str:
        """Return the path of the collection of a manifest's kind, as the server itself names it."""
        group = manifest["apiVersion"]
        root = f"/api/{group}" if "/" not in group else f"/apis/{group}"
        kinds = {each["kind"]: each["name"] for each in self.get(root)["resources"][::-1]
                 if "/" not in each["name"]}  # fmt: skip
        if manifest["kind"] not in kinds:
            raise Refused(404, f"{manifest['kind']} is not served as {group}")
        wide = manifest["kind"] in CLUSTER_WIDE
        place = "" if wide else f"/namespaces/{namespace}"
        return f"{root}{place}/{kinds[manifest['kind']]}"

    def call(
        self, method: str, path: str, body: Any = None, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """Call the API as its administrator. Raises Refused."""
        assert self._http is not None
        response = self._http.request(
            method, path, json=body, headers={"Content-Type": content_type}
        )
        if not response.is_success:
            raise Refused(response.status_code, response.text[:2000])
        found: dict[str, Any] = response.json()
        return found

    def http(self, token: str) -> httpx.Client:
        """Return a client with a token. Raises OSError before the server has a certificate."""
        return httpx.Client(
            base_url=self.url,
            verify=ssl.create_default_context(cafile=str(self.ca_file)),
            headers={"Authorization": f"Bearer {token}"},
            trust_env=False,
            timeout=30,
        )

    def log(self) -> str:
        return (self.base / "kube-apiserver.out").read_text(errors="replace")[-4000:]

    # ------------------------------------------------------------ processes

    def _start_etcd(self) -> None:
        peers = f"http://127.0.0.1:{free_port()}"
        self._launch(
            "etcd",
            *(f"--data-dir={self.base}/etcd", f"--listen-client-urls={self._etcd}"),
            *(f"--advertise-client-urls={self._etcd}", f"--listen-peer-urls={peers}"),
            *(f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}"),
        )

    def _is_ready(self) -> bool:
        process = self._processes["kube-apiserver"]
        assert process.poll() is None, self.log()
        try:
            if self._http is None:
                self._http = self.http(self.token)
            return self._http.get("/readyz").status_code == 200
        except (httpx.HTTPError, OSError):  # no certificate yet
            return False

    def _launch(self, name: str, *words: str) -> None:
        program = shutil.which(name, path=assets())
        assert program is not None
        with (self.base / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "SIGKILL", program, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _end(self) -> None:
        if self._http is not None:
            self._http.close()
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait(30)
        shutil.rmtree(self.base, ignore_errors=True)
