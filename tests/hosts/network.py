"""Hosts of one machine that see each other over a switch only, and what can happen to their cables.
Needs root."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.hosts.compose_file import REPOSITORY

BRIDGE = "everstep0"
SUBNET = "172.31.250"
"""Another one than docker-compose.yml's, so that a deployment on this machine's own Docker engine
does not disturb the hosts."""
GATEWAY = f"{SUBNET}.1"
FILTERS_BRIDGES = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
BETWEEN_HOSTS = ("FORWARD", "-i", BRIDGE, "-o", BRIDGE, "-j", "ACCEPT")
SMALL_BYTES = 600
"""A packet with fewer passes everywhere."""
NOBODY = "02:00:00:00:00:01"
"""A hardware address that no host has: frames to it are lost without a word."""


def command(*words: str) -> str:
    """Run a command of iproute2; its output. Raises CalledProcessError with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Cable:
    """A host's network namespace, its address and its cable to the switch."""

    def __init__(self, index: int, ip: str) -> None:
        self.namespace = f"everstep-{index}"
        self.ip = ip
        self.outer = f"everstep{index}o"
        self._line: subprocess.Popen[bytes] | None = None
        self.remove()  # what a test that was killed left
        command("ip", "netns", "add", self.namespace)
        command(
            "ip",
            "link",
            "add",
            self.outer,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.namespace,
        )
        command("ip", "link", "set", self.outer, "master", BRIDGE, "up")
        command("ip", "-n", self.namespace, "address", "add", f"{ip}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            command("ip", "-n", self.namespace, "link", "set", device, "up")
        command("ip", "-n", self.namespace, "route", "add", "default", "via", GATEWAY)

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """While it lasts the cable is out: what is sent is lost, and nobody is told."""
        command("ip", "link", "set", self.outer, "down")
        try:
            yield
        finally:
            command("ip", "link", "set", self.outer, "up")

    def stop_hearing(self, other: Cable) -> None:
        """Lose everything that ``other`` sends to this host, and nothing else: a partition in one
        direction."""
        command(
            "ip",
            "-n",
            other.namespace,
            "neigh",
            "replace",
            self.ip,
            "lladdr",
            NOBODY,
            "dev",
            "eth0",
            "nud",
            "permanent",
        )

    def hear_again(self, other: Cable) -> None:
        command("ip", "-n", other.namespace, "neigh", "del", self.ip, "dev", "eth0")

    @contextlib.contextmanager
    def loses_large_packets_to(self, other: Cable) -> Iterator[None]:
        """While it lasts, lose what this host sends to ``other`` in packets that are not small: a
        path whose MTU is smaller than both believe. Connecting works.

        They are lost on arrival: of what it drops itself a host's kernel knows.
        """
        rule = (*("-s", self.ip, "-m", "length", "--length", f"{SMALL_BYTES}:"), *("-j", "DROP"))
        inside = ("ip", "netns", "exec", other.namespace, "iptables")
        command(*inside, "-A", "INPUT", *rule)
        try:
            yield
        finally:
            command(*inside, "-D", "INPUT", *rule)

    def impair(self, delay_s: float, loss: float) -> None:
        """Let every frame, in both directions, come ``delay_s`` late, and the share ``loss`` of
        them never."""
        inner, switch_end = f"{self.outer}a", f"{self.outer}b"
        command("ip", "link", "add", inner, "type", "veth", "peer", "name", switch_end)
        command("ip", "link", "set", switch_end, "master", BRIDGE, "up")
        command("ip", "link", "set", inner, "up")
        command("ip", "link", "set", self.outer, "nomaster")
        words = [
            "setpriv",
            "--pdeathsig",
            "SIGKILL",
            sys.executable,
            "-m",
            "tests.hosts.slow_link",
            self.outer,
            inner,
        ]
        self._line = subprocess.Popen([*words, str(delay_s), str(loss)], cwd=REPOSITORY)

    def repair(self) -> None:
        """The good line again."""
        if self._line is not None:
            self._line.kill()
            self._line.wait()
            self._line = None
            command("ip", "link", "del", f"{self.outer}a")
            command("ip", "link", "set", self.outer, "master", BRIDGE)

    def remove(self) -> None:
        self.repair()
        with contextlib.suppress(RuntimeError):
            command("ip", "netns", "del", self.namespace)
        for link in (self.outer, f"{self.outer}a"):
            with contextlib.suppress(RuntimeError):
                command("ip", "link", "del", link)


@contextlib.contextmanager
def deaf(listeners: Iterable[Cable], speakers: Iterable[Cable]) -> Iterator[None]:
    """While it lasts, lose everything that ``speakers`` send to ``listeners``, and nothing else."""
    pairs = [(listener, speaker) for listener in listeners for speaker in speakers]
    for listener, speaker in pairs:
        listener.stop_hearing(speaker)
    try:
        yield
    finally:
        for listener, speaker in pairs:
            listener.hear_again(speaker)


@contextlib.contextmanager
def apart(some: Iterable[Cable], others: Iterable[Cable]) -> Iterator[None]:
    """While it lasts, lose everything between two groups of hosts, in both directions."""
    with deaf(some, others), deaf(others, some):
        yield


@contextlib.contextmanager
def switch() -> Iterator[None]:
    """The bridge to which all cables lead; this machine's own address on it is ``GATEWAY``."""
    if Path("/sys/class/net", BRIDGE).exists():
        command("ip", "link", "del", BRIDGE)
    command("ip", "link", "add", BRIDGE, "type", "bridge")
    try:
        command("ip", "address", "add", f"{GATEWAY}/24", "dev", BRIDGE)
        command("ip", "link", "set", BRIDGE, "up")
        with _let_through():
            yield
    finally:
        command("ip", "link", "del", BRIDGE)


@contextlib.contextmanager
def _let_through() -> Iterator[None]:
    """Accept what hosts send each other where the machine filters bridges: a Docker engine on it
    drops what it does not know."""
    if not FILTERS_BRIDGES.exists() or FILTERS_BRIDGES.read_text().strip() == "0":
        yield
        return
    command("iptables", "-I", *BETWEEN_HOSTS)
    try:
        yield
    finally:
        command("iptables", "-D", *BETWEEN_HOSTS)
