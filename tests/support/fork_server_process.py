"""A fork server as a process of a test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.service_process import wait_for

ROOT = Path(__file__).parents[2]


class ForkServerProcess:
    """A fork server with its socket, and a file of what it logs."""

    def __init__(self, directory: Path, **environ: str) -> None:
        socket, self.log = directory / "s", directory / "log"
        self.address = str(socket)
        module = "train_fn.ray_train.fork_server"
        command = [sys.executable, "-P", "-m", module, self.address, "no_such_module"]
        env = {**os.environ, **environ}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log, env=env)
        wait_for(socket.exists, 60, "the fork server's socket")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
