"""The first process of a host: makes what a container runtime makes, then runs one command until it
ends.

``python -m tests.hosts.container SPEC`` is started in network, mount, pid, ipc and host name
namespaces of its own. SPEC is a JSON file (see ``host.py``). The root file system is this
machine's, under a layer of its own that goes with it; what the compose file calls read-only is
read-only, and the command runs without root's rights where the compose file says so.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path("/mnt/root")
PR_SET_NO_NEW_PRIVS = 38


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def make_root(spec: dict[str, Any]) -> None:
    """The layered root with its mounts; this process moves into it."""
    mount("-t", "tmpfs", "tmpfs", "/mnt")
    for name in ("upper", "work", "root"):
        Path("/mnt", name).mkdir()
    mount(
        "-t", "overlay", "overlay", "-o", "lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work", ROOT
    )
    mount("-t", "proc", "proc", ROOT / "proc")
    for name in ("dev", "sys"):
        mount("--rbind", f"/{name}", ROOT / name)
    mount("-t", "tmpfs", "-o", f"size={spec['shm_size']},mode=1777", "tmpfs", ROOT / "dev/shm")
    (ROOT / "root").chmod(0o755)  # the interpreter may live below it
    with (ROOT / "etc/passwd").open("a") as passwd:
        passwd.write(f"part:x:{spec['uid']}:{spec['gid']}::{spec['home']}:/bin/sh\n")
    home = ROOT / spec["home"].lstrip("/")
    if not home.exists():
        home.mkdir(parents=True)
        os.chown(home, spec["uid"], spec["gid"])
    for bind in spec["binds"]:
        source, target = Path(bind["source"]), ROOT / bind["target"].lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        mount("--bind", source, target)
        if bind["read_only"]:
            mount("-o", "remount,bind,ro", target)
    for entry in spec["tmpfs"]:
        path, _, options = entry.partition(":")
        target = ROOT / path.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", options or "mode=1777", "tmpfs", target)
    os.chroot(ROOT)
    os.chdir("/")
    if spec["read_only"]:
        mount("-o", "remount,ro", "/")


def run(spec: dict[str, Any]) -> int:
    """Run the command as its user; ends when it ends, and takes every process of the host along.
    Returns its exit code."""
    command = os.fork()
    if command == 0:
        os.setgroups([])
        os.setgid(spec["gid"])
        os.setuid(spec["uid"])
        ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        os.chdir(spec["home"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _frame: os.kill(command, number))
    while True:
        pid, status = os.wait()
        if pid == command:
            return os.waitstatus_to_exitcode(status) & 0xFF


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    socket.sethostname(spec["hostname"])
    make_root(spec)
    os.environ["PATH"] = spec["env"]["PATH"]
    return run(spec)


if __name__ == "__main__":
    sys.exit(main())
