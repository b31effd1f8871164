#!/usr/bin/env python3
"""Drain the node of Ray on this machine when its cloud says that the machine goes.

    notices.py --cloud aws|gce|azure

Run it beside a node, as the same user (README.md has a unit of systemd). It asks the cloud's
metadata service every two seconds, and calls `everstep drain --this-node` with the time that is
left. Ranks then save, leave, and go on elsewhere. SIGTERM drains the node, too: a machine that
shuts down stops its services first. Needs Python 3.11 and the standard library.

Sources of the forms: AWS, "Spot Instance interruption notices" and "EC2 instance rebalance
recommendations"; Google, "Handle preemption" and "Get live migration notices"; Azure, "Scheduled
Events for Linux VMs".
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

METADATA = "http://169.254.169.254"
"""Where each of these clouds answers a machine about itself."""
ASK_S = 1.0
"""Longest wait for an answer. A metadata service that hangs is asked again."""
RECOMMENDED_S = 120.0
"""Time to take where the cloud only recommends to leave, or names no time."""
GCE_S = 25.0
"""Google ends a machine 30 s after it has said so."""
STOPPING_S = 60.0
"""Time to take when this program is asked to end: a machine that shuts down waits no longer."""


@dataclass(frozen=True)
class Notice:
    """That the machine goes, in so many seconds."""

    left_s: float
    reason: str


class Gone(Exception):
    """The metadata service did not answer, or not in its own form."""


def ask(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Return what a metadata service answers; None for "there is none" (404). Raises Gone."""
    request = urllib.request.Request(url, headers=headers, method=method)
    # No proxy: it would answer for another machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ASK_S) as answer:
            return answer.read(65536).decode("utf-8", "replace")
    except urllib.error.HTTPError as exc:
        if exc.code == 404:
            return None
        raise Gone(f"{url}: {exc}") from exc
    except (OSError, http.client.HTTPException) as exc:
        raise Gone(f"{url}: {exc!r}") from exc


def left_until(when: datetime) -> float:
    """Return the seconds until then; one if that is over."""
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(1.0, (when - datetime.now(UTC)).total_seconds())


def of_aws(base: str) -> Notice | None:
    """Return an interruption of a spot instance, else the recommendation to leave it."""
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = ask(f"{base}/latest/api/token", seconds, "PUT")
    headers = {} if token is None else {"X-aws-ec2-metadata-token": token}
    meta = f"{base}/latest/meta-data"
    if (found := ask(f"{meta}/spot/instance-action", headers)) is not None:
        action = json.loads(found)
        at = datetime.fromisoformat(action["time"].replace("Z", "+00:00"))
        return Notice(left_until(at), f"AWS: spot instance, {action['action']} at {at:%H:%M:%S}")
    if ask(f"{meta}/events/recommendations/rebalance", headers) is not None:
        return Notice(RECOMMENDED_S, "AWS: rebalance recommendation")
    return None


def of_gce(base: str) -> Notice | None:
    """Return a preemption, or maintenance that ends the machine."""
    headers, meta = {"Metadata-Flavor": "Google"}, f"{base}/computeMetadata/v1/instance"
    if (ask(f"{meta}/preempted", headers) or "").strip() == "TRUE":
        return Notice(GCE_S, "GCE: preempted")
    event = (ask(f"{meta}/maintenance-event", headers) or "NONE").strip()
    if event == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice(RECOMMENDED_S, "GCE: host maintenance ends the machine")
    return None


def of_azure(base: str) -> Notice | None:
    """Return the first event that ends or reboots this very machine."""
    headers = {"Metadata": "true"}
    name = ask(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers)
    found = ask(f"{base}/metadata/scheduledevents?api-version=2020-07-01", headers)
    for event in json.loads(found or "{}").get("Events", []):
        if event["EventType"] not in ("Preempt", "Terminate", "Redeploy", "Reboot"):
            continue  # Freeze pauses it for seconds
        if event["EventStatus"] == "Completed" or (name or "").strip() not in event["Resources"]:
            continue  # of another machine of the set
        before = event.get("NotBefore")
        left_s = left_until(parsedate_to_datetime(before)) if before else RECOMMENDED_S
        return Notice(left_s, f"Azure: {event['EventType']}, {event['EventId']}")
    return None


CLOUDS: dict[str, Callable[[str], Notice | None]] = {
    "aws": of_aws,
    "gce": of_gce,
    "azure": of_azure,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def drain(command: Sequence[str], notice: Notice) -> bool:
    """Drain the node. Return whether Ray has accepted it."""
    say(f"{notice.reason}: draining, {notice.left_s:.0f} s are left")
    order = [*command, "--deadline", f"{notice.left_s:.0f}", "--reason", notice.reason]
    try:
        done = subprocess.run(order, timeout=notice.left_s + 5, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        say(f"{' '.join(order)}: {exc}")
        return False
    return done.returncode == 0


class Watch:
    """Ask a cloud again and again, and drain whenever it says something new: a node that was
    started again after a recommendation is drained by the notice that follows."""

    def __init__(self, cloud: str, metadata: str, command: Sequence[str]) -> None:
        self._ask, self._metadata, self._command = CLOUDS[cloud], metadata, command
        self._drained: str | None = None
        """The reason for which the node was drained."""
        self._said = ""
        self.stopping = threading.Event()

    def look(self) -> None:
        """Ask once. A notice is carried out once, and tried again while Ray does not accept it."""
        try:
            notice = self._ask(self._metadata)
            self._said = ""
        except (Gone, ValueError, KeyError, TypeError, AttributeError) as exc:
            problem = f"no answer that is understood: {exc!r}"
            if problem != self._said:
                say(problem)
            self._said = problem
            return
        if notice is None:
            if self._drained is not None:
                say(
                    f"withdrawn: {self._drained}. A node that Ray drains does not come back: start "
                    "it again (`ray start`), and it joins"
                )
                self._drained = None
        elif self._drained != notice.reason and drain(self._command, notice):
            self._drained = notice.reason

    def run(self, every_s: float) -> None:
        """Look until the program is asked to end; then drain the node."""
        while not self.stopping.wait(every_s):
            self.look()
        drain([*self._command, "--wait"], Notice(STOPPING_S, "this machine shuts down"))


def main(argv: Sequence[str] | None = None) -> None:
    """Watch until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cloud", choices=sorted(CLOUDS), required=True)
    parser.add_argument("--metadata", default=METADATA, help="address of the metadata service")
    parser.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between")
    parser.add_argument("--everstep", default="everstep", help="the command, if not on the PATH")
    options = parser.parse_args(argv)
    command = [options.everstep, "drain", "--this-node"]
    watch = Watch(options.cloud, options.metadata.rstrip("/"), command)
    signal.signal(signal.SIGTERM, lambda *_: watch.stopping.set())
    say(f"watching {options.cloud} at {options.metadata}")
    began = time.monotonic()
    watch.run(options.every)
    say(f"ended after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
