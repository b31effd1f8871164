"""A Slurm cluster of Debian's packages on this machine: each node has a host name, processes and
shared memory of its own. Needs root, slurmctld, slurmd and munge."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.support.service_process import free_port, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
START_S = 60.0
CONFIGURATION = """
ClusterName=everstep
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={base}/state
SlurmctldPidFile={base}/slurmctld.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdPidFile={base}/slurmd-%n.pid
SlurmdLogFile={base}/slurmd-%n.log
SlurmdSpoolDir={base}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
KillWait=10
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN\n"
_IN_NODE = """
hostname {name}
mount --bind {base}/hosts /etc/hosts
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount -t tmpfs -o size=1g tmpfs {base}/local
exec slurmd -D
"""


def is_possible() -> bool:
    """Return whether this machine can start such a cluster."""
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


class SlurmCluster:
    """A controller and nodes; a context manager that leaves nothing behind."""

    def __init__(self, names: Sequence[str]) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
        self.local = self.base / "local"
        """A directory that is another one on each node."""
        self._names = tuple(names)
        self.addresses = {name: f"127.0.2.{number + 1}" for number, name in enumerate(names)}
        """Name of a node -> the address that its name has."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {**os.environ, "SLURM_CONF": str(self.base / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
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

    def _start(self) -> None:
        base = self.base
        for directory in (base / "state", self.local):
            directory.mkdir()
        nodes = "".join(_NODE.format(name=name, port=free_port()) for name in self._names)
        text = CONFIGURATION.format(base=base, port=free_port(), names=",".join(self._names))
        (base / "slurm.conf").write_text(text.replace("PartitionName", f"{nodes}PartitionName"))
        lines = [f"{address} {name}\n" for name, address in self.addresses.items()]
        (base / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        key = base / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        base.chmod(0o755)  # munged refuses a socket in a directory that others may write to
        self._launch(
            "munged",
            *("munged", "--foreground", f"--key-file={key}", f"--socket={base}/munge.socket"),
            *(f"--pid-file={base}/munged.pid", f"--seed-file={base}/munged.seed"),
            *(f"--log-file={base}/munged.log", "--force"),
        )
        wait_for((base / "munge.socket").exists, START_S, "munge's socket")
        self._launch("slurmctld", "slurmctld", "-D")
        for name in self._names:
            self.start_node(name)

    def _launch(self, name: str, *words: str) -> None:
        with (self.base / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "SIGKILL", *words],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def start_node(self, name: str, *, waits: bool = True) -> None:
        """Switch a node on. Wait until jobs may run there, unless a job has the node."""
        (self.base / f"spool-{name}").mkdir(exist_ok=True)
        script = _IN_NODE.format(name=name, base=self.base)
        inside = ("--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork")
        self._launch(name, "unshare", *inside, "--kill-child=SIGKILL", "sh", "-ec", script)
        if waits:
            wait_for(lambda: self.state_of(name) == "idle", START_S, f"{name}, idle", every_s=0.3)

    def kill_node(self, name: str) -> None:
        """Take a node's power: all of its processes and its shared memory are gone."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(30)

    def state_of(self, name: str) -> str:
        """Return Slurm's word for a node, such as ``idle``."""
        return (
            self.run("sinfo", "--noheader", "--nodes", name, "--format", "%t").strip().rstrip("*")
        )

    def run(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run a command of Slurm's; its output, empty if the controller does not answer."""
        found = subprocess.run(
            words,
            env={**self.env, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return found.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def logs(self) -> str:
        """Return the ends of all logs."""
        files = sorted([*self.base.glob("*.log"), *self.base.glob("*.out")])
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in files)

    def _end(self) -> None:
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        shutil.rmtree(self.base, ignore_errors=True)
