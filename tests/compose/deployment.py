"""The whole of docker-compose.yml on a real Docker engine, in a copy of the repository, by the
commands that docs/operations.md gives."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from everstep import Client
from tests.compose import base_images
from tests.compose.base_images import REPOSITORY
from tests.compose.engine import run
from tests.support.service_process import ASK_S, free_port, wait_for

SMALL_MACHINE = {
    "EVERSTEP_NOFILE": "20000",
    "WORKER_ARGS": "--num-cpus=1 --object-store-memory=100000000",
    "WORKER_SHM": "512m",
    "WORKER_MEMORY": "3g",
    "HEAD_MEMORY": "4g",
}
NETWORKS = {
    "EVERSTEP_SUBNET": "172.29.70.0/24",
    "EVERSTEP_HEAD_IP": "172.29.70.10",
    "EVERSTEP_FRONT_SUBNET": "172.29.71.0/24",
}
"""Not the addresses of a deployment that this machine may have, nor those of tests/hosts."""
BUILD_S = 1800
UP_S = 600
ANSWER_S = 60
OBJECTS_MB = 800
KEPT_STATES = "ls -A /dev/shm/everstep-10001 2>/dev/null || true"


class Deployment:
    """The containers of one project.

    Args:
        directory: a copy of the repository.
        env: variables of docker-compose.yml.
    """

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory = directory
        port = free_port()
        self.url = f"https://localhost:{port}"
        listen = {"EVERSTEP_LISTEN": f"127.0.0.1:{port}", "EVERSTEP_PUBLIC_URL": self.url}
        self.project = f"everstep-test-{os.getpid()}"
        named = {"COMPOSE_PROJECT_NAME": self.project, **SMALL_MACHINE, **NETWORKS, **env, **listen}
        (directory / ".env").write_text("".join(f"{k}={v}\n" for k, v in named.items()))
        self._disk = Disk(directory.parent / "objects.img", OBJECTS_MB)
        objects = {"driver_opts": {"type": "ext4", "device": self._disk.device}}
        override = directory / "docker-compose.override.yml"
        override.write_text(json.dumps({"volumes": {"objects": objects}}))
        self._clients = contextlib.ExitStack()

    # -- commands

    def compose(self, *words: str, timeout_s: float = UP_S) -> str:
        """Run ``docker compose`` in the copy and return what it printed."""
        return run("docker", "compose", *words, timeout_s=timeout_s, cwd=self.directory)

    def up(self, workers: int) -> None:
        """Start the missing parts and this many workers. Wait until all are ready."""
        try:
            self.compose("up", "--detach", "--no-build", "--scale", f"worker={workers}")
            wait_for(self.is_ready, UP_S, "the service behind the proxy", every_s=ASK_S)
            wait_for(
                lambda: len(self.live_nodes()) == workers, UP_S, f"{workers} workers", every_s=ASK_S
            )
        except (AssertionError, TimeoutError) as error:
            raise AssertionError(f"{error}\n{self._told()}") from error

    def containers(self, service: str) -> list[str]:
        """Return the ids of a part's running containers, in the order of their numbers."""
        found = self.compose("ps", "--quiet", service).split()
        return sorted(found, key=lambda each: str(self.inspect(each)["Name"]))

    def container_at(self, ip: str) -> str:
        """Return the id of the worker's container with an address."""
        return next(each for each in self.containers("worker") if ip in self.addresses(each))

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(run("docker", "inspect", container))
        return dict(found)

    def addresses(self, container: str) -> set[str]:
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        return {each["IPAddress"] for each in networks.values()}

    def _told(self) -> str:
        """Return what the health checks and the parts said last."""
        each = "{{.Name}} {{if .State.Health}}{{json .State.Health}}{{end}}"
        containers = self.compose("ps", "--all", "--quiet").split()
        checks = run("docker", "inspect", "--format", each, *containers)
        return checks + self.compose("logs", "--tail", "40")

    # -- from outside

    @property
    def certificate(self) -> Path:
        return self.directory / "deploy/secrets/tls_certificate"

    @functools.cached_property
    def token(self) -> str:
        """The administrator's token, as docker-compose.yml says to read it."""
        words = ["exec", "-T", "service-a", "cat", "/var/lib/everstep/home/token"]
        return self.compose(*words).strip()

    def http(self) -> httpx.Client:
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        return httpx.Client(base_url=self.url, verify=trusted, timeout=ANSWER_S)

    def client(self) -> Client:
        """Return a client of the SDK. It is closed with the deployment."""
        return self._clients.enter_context(Client(self.url, self.token))

    def environment(self) -> dict[str, str]:
        """Return what a user outside exports."""
        return {
            **os.environ,
            "EVERSTEP_URL": self.url,
            "EVERSTEP_TOKEN": self.token,
            "SSL_CERT_FILE": str(self.certificate),
        }

    def is_ready(self) -> bool:
        try:
            with self.http() as http:
                return http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def live_nodes(self) -> dict[str, str]:
        """Return the addresses of the worker nodes that take ranks, by Ray's id."""
        with self.http() as http:
            answer = http.get("/v1/cluster", headers={"Authorization": f"Bearer {self.token}"})
        nodes = answer.json()["nodes"] if answer.is_success else []
        return {
            node["id"]: node["ip"]
            for node in nodes
            if node["state"] == "ALIVE" and not node["is_head"]
        }

    def states_in_memory(self) -> list[str]:
        """Return what the workers keep in shared memory for runs."""
        shell = ("sh", "-c", KEPT_STATES)
        return [
            name
            for worker in self.containers("worker")
            for name in run("docker", "exec", worker, *shell).split()
        ]

    def forget(self) -> None:
        """Remove everything, with all that the deployment keeps."""
        self.compose("down", "--volumes", "--timeout", "20")
        self._disk.clear()
        self.__dict__.pop("token", None)

    def close(self) -> None:
        self._clients.close()
        try:
            self.compose("down", "--volumes", "--timeout", "20")
        finally:
            self._disk.close()
        labelled = f"label=com.docker.compose.project={self.project}"
        for kind in (("ps", "--all"), ("volume", "ls"), ("network", "ls")):
            left = run("docker", *kind, "--quiet", "--filter", labelled)
            assert left == "", f"docker {kind[0]} still has {left.split()}"


class Disk:
    """A small disk, which can be full: a file behind a loop device."""

    def __init__(self, image: Path, size_mb: int) -> None:
        with image.open("wb") as file:
            file.truncate(size_mb << 20)
        self.device = run("losetup", "--find", "--show", image).strip()
        self.clear()

    def clear(self) -> None:
        """Make the file system anew."""
        run("mkfs.ext4", "-q", "-F", self.device)

    def close(self) -> None:
        run("losetup", "--detach", self.device)


@contextlib.contextmanager
def deployed(workers: int) -> Iterator[Deployment]:
    """Build the image and bring everything up, by the commands at the head of docker-compose.yml.
    Take it down on exit."""
    with tempfile.TemporaryDirectory(prefix="everstep-compose-") as base:
        directory = Path(base) / "everstep"
        _copy_repository(directory)
        deployment = Deployment(directory, base_images.settings())
        began = time.monotonic()
        try:
            run("deploy/secrets.sh", cwd=directory, env={**os.environ, **NETWORKS})
            deployment.compose("build", timeout_s=BUILD_S)
            print(f"{time.monotonic() - began:6.1f} s  built", flush=True)
            os.environ["SSL_CERT_FILE"] = str(deployment.certificate)
            deployment.up(workers)
            print(f"{time.monotonic() - began:6.1f} s  ready", flush=True)
            yield deployment
        finally:
            os.environ.pop("SSL_CERT_FILE", None)
            deployment.close()


def _copy_repository(to: Path) -> None:
    """Copy the files that git knows or would take."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, to / name)
