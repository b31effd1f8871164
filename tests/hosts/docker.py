"""A ``docker`` for scripts, which does to a deployment of hosts what Docker would do to its
containers.

Only what ``deploy/rolling-upgrade.sh`` says is understood; anything else fails. A container's id is
its host's name and a number that changes when it is made anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.hosts.compose_file import REPOSITORY
from tests.hosts.deployment import Deployment
from tests.support.service_process import wait_for

_SHIM = """#!{python}
import json, socket, sys
with socket.socket(socket.AF_UNIX) as end:
    end.connect({path!r})
    end.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    code, out, err = json.loads(end.makefile().readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Docker:
    """Understands commands; state is which containers there are."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._generation = dict.fromkeys(deployment.hosts, 1)
        self._removed: set[str] = set()

    def do(self, words: Sequence[str]) -> tuple[int, str, str]:
        match list(words):
            case ["compose", "ps", "--quiet", service]:
                return (
                    0,
                    "".join(
                        f"{self._id(name)}\n"
                        for name in self._of(service)
                        if name not in self._removed
                    ),
                    "",
                )
            case ["compose", "exec", "-T", service, *command]:
                done = self._deployment.hosts[service].run(command, timeout_s=700)
                return done.returncode, done.stdout, done.stderr
            case ["compose", "up", *options, service]:
                return self._up(service, options)
            case ["inspect", "--format", _, container]:
                return 0, f"{self._deployment.hosts[self._name(container)].cable.ip}\n", ""
            case ["stop", container]:
                name = self._name(container)
                self._deployment.hosts[name].stop(60)
                return 0, f"{container}\n", ""
            case ["rm", "--force", container]:
                name = self._name(container)
                self._deployment.hosts[name].kill()
                self._removed.add(name)
                return 0, f"{container}\n", ""
        return 125, "", f"this docker does not know {words}\n"

    def _up(self, service: str, options: Sequence[str]) -> tuple[int, str, str]:
        names = self._of(service)
        for name in names if "--force-recreate" in options else []:
            self._deployment.hosts[name].stop(60)
            self._removed.add(name)
        for name in [name for name in names if name in self._removed]:
            self._generation[name] += 1
            self._removed.discard(name)
            self._deployment.hosts[name].start()
        if "--wait" in options:
            for name in names:
                wait_for(self._deployment.hosts[name].is_healthy, 120, f"{name} to be healthy")
        return 0, "", ""

    def _of(self, service: str) -> list[str]:
        return [name for name, host in self._deployment.hosts.items() if host.part.name == service]

    def _id(self, name: str) -> str:
        return f"{name}.{self._generation[name]}"

    def _name(self, container: str) -> str:
        name = container.partition(".")[0]
        if container != self._id(name) or name in self._removed:
            raise KeyError(f"no such container: {container}")
        return name


@contextlib.contextmanager
def docker(deployment: Deployment) -> Iterator[dict[str, str]]:
    """The environment of a script whose ``docker`` is this one."""
    ours = Docker(deployment)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            words = json.loads(self.rfile.readline())
            try:
                answer = ours.do(words)
            except (KeyError, TimeoutError) as exc:
                answer = (1, "", f"{exc}\n")
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    with tempfile.TemporaryDirectory(prefix="eh-docker-") as directory:
        path = str(Path(directory) / "socket")
        program = Path(directory) / "docker"
        program.write_text(_SHIM.format(python=sys.executable, path=path))
        program.chmod(0o755)
        with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield {
                    **os.environ,
                    "PATH": f"{directory}:{os.environ['PATH']}",
                    "PYTHONPATH": str(REPOSITORY),
                }
            finally:
                server.shutdown()
