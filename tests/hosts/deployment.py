"""The whole compose file on hosts of their own: started in its order, by its commands, with its
secrets and health checks.

What is ours runs as it would in the image. For images of others this machine's own programs stand
in: Debian's PostgreSQL and HAProxy with the compose file's configuration, and an S3 server in
memory for the object store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from everstep import Client
from tests.hosts.compose_file import REPOSITORY, Part, image_environment, read_compose
from tests.hosts.host import Host
from tests.hosts.network import SUBNET, Cable, switch
from tests.support.postgres_server import binaries
from tests.support.service_process import wait_for

ADDRESSES = {
    "head": f"{SUBNET}.10",
    "object-store": f"{SUBNET}.20",
    "database": f"{SUBNET}.21",
    "service-a": f"{SUBNET}.30",
    "service-b": f"{SUBNET}.31",
    "proxy": f"{SUBNET}.40",
    "bucket": f"{SUBNET}.60",
}
FIRST_WORKER = 50
STARTED = ("object-store", "bucket", "head", "database", "service-a", "service-b", "proxy")
START_S = 900.0
"""On a machine of two busy cores, more than five minutes."""
SETTINGS = {
    # a machine of few cores and little memory
    "WORKER_ARGS": "--num-cpus=1 --object-store-memory=100000000",
    "WORKER_SHM": "512m",
    "EVERSTEP_SUBNET": f"{SUBNET}.0/24",
    "EVERSTEP_FRONT_SUBNET": f"{SUBNET}.0/24",
    "EVERSTEP_HEAD_IP": ADDRESSES["head"],
}
TEST_ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


class Deployment:
    """Hosts by name: the compose file's, and ``worker-1`` to ``worker-N``."""

    def __init__(self, base: Path, workers: int) -> None:
        self.base = base
        self.hosts: dict[str, Host] = {}
        self._clients = contextlib.ExitStack()
        self._parts = read_compose(SETTINGS)
        for name in ("volumes", "secrets"):
            (base / name).mkdir()
        (base / "resolv.conf").touch()
        base.chmod(0o755)
        names = [ADDRESSES["proxy"], "localhost"]
        subprocess.run(
            [REPOSITORY / "deploy/secrets.sh", base / "secrets", *names],
            env={**os.environ, **SETTINGS},
            check=True,
        )
        (base / "secrets").chmod(0o755)
        for name in STARTED:
            self._add(name, self._parts[name], ADDRESSES[name])
        for number in range(1, workers + 1):
            self._add(
                f"worker-{number}", self._parts["worker"], f"{SUBNET}.{FIRST_WORKER + number}"
            )
        self.tell_names({name: host.cable.ip for name, host in self.hosts.items()})
        self._name_server = self._serve_names(self.hosts["proxy"])

    def _add(self, name: str, part: Part, ip: str) -> None:
        for source in part.volumes:
            if not source.startswith("./"):
                volume = self.base / "volumes" / source
                volume.mkdir(exist_ok=True)
                os.chown(volume, part.uid, part.gid)
        env = {
            **image_environment(),
            **part.env,
            **TEST_ENVIRONMENT,
        }
        if part.name in HEALTH_OF_STAND_INS and part.health is not None:
            part = replace(part, health=replace(part.health, argv=HEALTH_OF_STAND_INS[part.name]))
        argv = STAND_INS.get(part.name, lambda part: list(part.argv))(part)
        self.hosts[name] = Host(self.base, part, name, Cable(len(self.hosts) + 1, ip), argv, env)

    @staticmethod
    def _serve_names(host: Host) -> subprocess.Popen[bytes]:
        """Start what the engine gives to every container: a name server at 127.0.0.11, here for the
        one part that asks it by itself."""
        inside = ["setpriv", "--pdeathsig", "SIGKILL", "ip", "netns", "exec", host.cable.namespace]
        serve = [sys.executable, "-m", "tests.support.name_server", "127.0.0.11", "53"]
        return subprocess.Popen([*inside, *serve, str(host.hosts_file)], cwd=REPOSITORY)

    def tell_names(self, names: Mapping[str, str], to: Host | None = None) -> None:
        """What names mean, on one host or on all of them: the network's name service."""
        text = "127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in names.items())
        for host in [to] if to else self.hosts.values():
            host.hosts_file.write_text(
                f"{text}{host.cable.ip} {host.name}\n" if host.name not in names else text
            )

    def names(self) -> dict[str, str]:
        return {name: host.cable.ip for name, host in self.hosts.items()}

    # -- life

    def start(self) -> None:
        """Everything, in the order of the compose file's conditions."""
        began = time.monotonic()
        os.environ["SSL_CERT_FILE"] = str(self.base / "secrets/tls_certificate")
        waiting = dict(self.hosts)
        while waiting:
            for name, host in list(waiting.items()):
                if self._may_start(host):
                    host.start()
                    del waiting[name]
                    print(f"{time.monotonic() - began:6.1f} s  {name} starts", flush=True)
            if time.monotonic() - began > START_S:
                raise TimeoutError(f"{sorted(waiting)} could not start:\n{self.describe()}")
            time.sleep(0.5)
        wait_for(
            lambda: self.hosts["proxy"].is_healthy() and self._ready(),
            START_S,
            "the service behind the proxy",
        )
        print(f"{time.monotonic() - began:6.1f} s  ready", flush=True)

    def _may_start(self, host: Host) -> bool:
        """As the compose file says; and workers one after the other, since Ray gives up a node that
        is not up after two minutes, which three at once may need where cores are few."""
        if not all(
            self._holds(other, condition) for other, condition in host.part.depends_on.items()
        ):
            return False
        begun = [
            other
            for other in self.hosts.values()
            if other.part.name == "worker" and other.starts > 0
        ]
        return host.part.name != "worker" or all(
            "Ray runtime started" in other.log() for other in begun
        )

    def _holds(self, name: str, condition: str) -> bool:
        if name == "prepare":
            return True  # volumes are made with their owner
        host = self.hosts[name]
        match condition:
            case "service_healthy":
                return host.is_healthy()
            case "service_completed_successfully":
                return host.succeeded()
        return host.starts > 0

    def _ready(self) -> bool:
        try:
            with self.http() as http:
                return http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        self._clients.close()
        os.environ.pop("SSL_CERT_FILE", None)
        self._name_server.kill()
        self._name_server.wait(10)
        for host in reversed(self.hosts.values()):
            host.kill()
            host.cable.remove()

    # -- from outside

    @property
    def url(self) -> str:
        return f"https://{ADDRESSES['proxy']}:8443"

    @property
    def storage(self) -> str:
        """The storage's URI, as the hosts reach it."""
        return self._parts["bucket"].argv[-1]

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.base / "secrets/tls_certificate"))

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.tls(), timeout=60)

    @functools.cached_property
    def token(self) -> str:
        done = self.hosts["service-a"].run(["cat", "/var/lib/everstep/home/token"])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def api(self, method: str, path: str, **more: Any) -> Any:
        """One request through the proxy; the answer's JSON."""
        with self.http() as http:
            answer = http.request(
                method, path, headers={"Authorization": f"Bearer {self.token}"}, **more
            )
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def client(self) -> Client:
        """It is closed with the deployment."""
        return self._clients.enter_context(Client(self.url, self.token))

    def live_nodes(self) -> dict[str, str]:
        """The worker nodes that the cluster counts on: addresses by Ray's id."""
        nodes = self.api("GET", "/v1/cluster")["nodes"]
        return {
            node["id"]: node["ip"]
            for node in nodes
            if node["state"] == "ALIVE" and not node["is_head"]
        }

    def describe(self) -> str:
        return "\n".join(
            f"--- {fact['name']}: {fact['starts']} starts, exit {fact['exit_code']}\n{fact['log']}"
            for fact in self.facts()
        )

    def facts(self) -> list[dict[str, Any]]:
        return [host.facts() for host in self.hosts.values()]


def _postgres(part: Part) -> list[str]:
    """What the image's entry point does, with Debian's programs."""
    programs = binaries()
    assert programs is not None
    data = "/var/lib/postgresql/data"
    script = f"""
        test -s {data}/PG_VERSION || {programs}/initdb -D {data} -U $POSTGRES_USER \
            --auth-local=trust $POSTGRES_INITDB_ARGS \
            --pwfile=$POSTGRES_PASSWORD_FILE -E UTF8 --locale=C.UTF-8 --no-sync >/dev/null
        grep -q {SUBNET} {data}/pg_hba.conf || \
            echo "host all all {SUBNET}.0/24 scram-sha-256" >>{data}/pg_hba.conf
        {programs}/pg_ctl -D {data} -w -s -o "-c listen_addresses= -k /tmp" start >/dev/null
        {programs}/createdb -h /tmp -U $POSTGRES_USER $POSTGRES_DB 2>/dev/null
        {programs}/pg_ctl -D {data} -w -s stop
        exec {programs}/postgres -D {data} -h '*' -k /tmp
    """
    return ["sh", "-c", script]


STAND_INS: Mapping[str, Callable[[Part], list[str]]] = {
    "database": _postgres,
    "object-store": lambda part: ["python", "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000"],
}
HEALTH_OF_STAND_INS = {
    "object-store": (
        "python",
        "-c",
        "import socket; socket.create_connection(('127.0.0.1', 9000), 2)",
    )
}


@contextlib.contextmanager
def deployed(workers: int) -> Iterator[Deployment]:
    """A deployment that is up, ended on exit."""
    base = Path(tempfile.mkdtemp(prefix="eh", dir="/tmp"))
    deployment = None
    try:
        with switch():
            try:
                deployment = Deployment(base, workers)
                deployment.start()
                yield deployment
            finally:
                if deployment is not None:
                    deployment.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)
