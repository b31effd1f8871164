"""One part of the compose file on a host of its own: started, looked into, broken, ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.hosts.compose_file import REPOSITORY, Part
from tests.hosts.network import Cable

RESTART_S = 1.0
NAMESPACES = ("--mount", "--uts", "--ipc", "--pid")


class Host:
    """A host with its part. ``base`` is a directory of this deployment; restarts follow the compose
    file."""

    def __init__(
        self,
        base: Path,
        part: Part,
        name: str,
        cable: Cable,
        argv: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        self.part, self.name, self.cable = part, name, cable
        self.starts = 0
        self.hosts_file = base / name / "hosts"
        self._base = base
        self._log = base / name / "log"
        self._spec = base / name / "spec.json"
        self._env = dict(env)
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._outer: subprocess.Popen[bytes] | None = None
        self.exit_code: int | None = None
        (base / name).mkdir(mode=0o755)
        self.hosts_file.touch(mode=0o644)
        self._argv = list(argv)
        self._write_spec()

    def set_env(self, env: Mapping[str, str]) -> None:
        """Add to the environment of the next start."""
        self._env |= env
        self._write_spec()

    def unset_env(self, names: Iterable[str]) -> None:
        for name in names:
            self._env.pop(name, None)
        self._write_spec()

    def _write_spec(self) -> None:
        part, etc = self.part, {"hosts": self.hosts_file, "resolv.conf": self._base / "resolv.conf"}
        binds = [
            {"source": str(source), "target": f"/etc/{name}", "read_only": True}
            for name, source in etc.items()
        ]
        for source, target in part.volumes.items():
            given = source.startswith("./")
            path = REPOSITORY / source if given else self._base / "volumes" / source
            if source.startswith("./deploy/secrets"):
                path = self._base / source.removeprefix("./deploy/")
            binds.append({"source": str(path), "target": target, "read_only": given})
        for name in part.secrets:
            binds.append(
                {
                    "source": str(self._base / "secrets" / name),
                    "target": f"/run/secrets/{name}",
                    "read_only": True,
                }
            )
        binds.append(
            {"source": str(Path(sys.prefix)), "target": "/opt/everstep", "read_only": True}
        )
        home = self._env.get("HOME", "/")
        spec = {
            "hostname": self.name,
            "argv": self._argv,
            "env": self._env,
            "uid": part.uid,
            "gid": part.gid,
            "home": home,
            "binds": binds,
            "tmpfs": [*part.tmpfs],
            "shm_size": part.shm_size,
            "read_only": part.read_only,
        }
        self._spec.write_text(json.dumps(spec, indent=1))

    # -- life

    def start(self) -> None:
        """Start the part; it is started again as the compose file's restart policy says."""
        self._stopping.clear()
        self._ended.clear()
        threading.Thread(target=self._keep, name=self.name, daemon=True).start()

    def _keep(self) -> None:
        """On a thread of its own, with whose end (and this process's) the host's processes end."""
        while not self._stopping.is_set():
            self.starts += 1
            with self._log.open("ab") as log:
                self._outer = subprocess.Popen(
                    [
                        *(
                            "setpriv",
                            "--pdeathsig",
                            "SIGKILL",
                            "ip",
                            "netns",
                            "exec",
                            self.cable.namespace,
                        ),
                        *("unshare", *NAMESPACES, "--fork", "--kill-child=SIGKILL"),
                        *(sys.executable, "-m", "tests.hosts.container", str(self._spec)),
                    ],
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                self.exit_code = self._outer.wait()
            if self.part.restart == "no" or (
                self.part.restart == "on-failure" and self.exit_code == 0
            ):
                break
            self._stopping.wait(RESTART_S)
        self._ended.set()

    def kill(self) -> None:
        """The host loses its power; it stays off until ``start``."""
        self._stopping.set()
        if self._outer is not None and self._outer.poll() is None:
            self._outer.kill()
        if self.starts:
            self._ended.wait(30)

    def stop(self, timeout_s: float) -> None:
        """As ``docker stop``: a signal, and power off when it was not enough."""
        self._stopping.set()
        for process in self._inner():
            process.terminate()
        if not self._ended.wait(timeout_s):
            self.kill()

    def _inner(self) -> list[psutil.Process]:
        if self._outer is None:
            return []
        try:
            return psutil.Process(self._outer.pid).children()
        except psutil.NoSuchProcess:
            return []

    def kill_process(self, name: str) -> None:
        """SIGKILL the host's processes of that name."""
        code = (
            "import os, psutil, sys; [p.kill() for p in psutil.process_iter(['name']) if "
            "p.info['name'] == sys.argv[1]]"
        )
        done = self.run(["python", "-c", code, name])
        assert done.returncode == 0, done.stderr

    # -- from inside

    def run(self, argv: Sequence[str], timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
        """A command inside, as the part's user with its environment: ``docker compose exec``."""
        [first] = self._inner()
        inside = [
            "nsenter",
            "--target",
            str(first.pid),
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--root",
            "--wdns=/",
        ]
        user = [
            "setpriv",
            "--reuid",
            str(self.part.uid),
            "--regid",
            str(self.part.gid),
            "--clear-groups",
            "--no-new-privs",
        ]
        return subprocess.run(
            [*inside, *user, *argv],
            env=dict(self._env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def reaches(self, ip: str, timeout_s: float = 2) -> bool:
        """Whether a host answers this one at all. A refusal is an answer too."""
        code = (
            "import socket, sys; found = socket.socket(); found.settimeout(float(sys.argv[2])); "
            "found.connect_ex((sys.argv[1], 9)) in (0, 111) or sys.exit(1)"
        )
        return self.run(["python", "-c", code, ip, str(timeout_s)]).returncode == 0

    def has_process(self, pid: int) -> bool:
        """Whether a process of this number, as the host counts, is there and has not ended."""
        code = (
            "import psutil, sys; "
            "psutil.Process(int(sys.argv[1])).status() != psutil.STATUS_ZOMBIE or sys.exit(1)"
        )
        return self.run(["python", "-c", code, str(pid)]).returncode == 0

    def is_healthy(self) -> bool:
        """Whether the compose file's health check passes."""
        health = self.part.health
        if health is None or not self._inner():
            return False
        try:
            return self.run(health.argv, health.timeout_s).returncode == 0
        except (subprocess.TimeoutExpired, ValueError):
            return False

    def succeeded(self) -> bool:
        """Whether a part that runs once has done its work."""
        return self._ended.is_set() and self.exit_code == 0

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "starts": self.starts,
            "exit_code": self.exit_code,
            "log": self.log()[-1500:],
        }
