"""deploy/notices: each cloud's own form leads to one drain with the time that is left, and nothing
else does."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.service_process import wait_for

PROGRAM = Path(__file__).parents[3] / "deploy" / "notices" / "notices.py"
AWS_SOON, AZURE_SOON = "@aws-soon", "@azure-soon"
"""Stand for the same time, 100 s after the beginning of a test."""


class Cloud:
    """A metadata service on loopback: answers by path, and a machine that is watched."""

    def __init__(self, directory: Path) -> None:
        self.answers: dict[str, Any] = {}
        self.slow_s = 0.0
        soon = datetime.now(UTC) + timedelta(seconds=100)
        aws_soon, azure_soon = f"{soon:%Y-%m-%dT%H:%M:%SZ}", format_datetime(soon, usegmt=True)
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(cloud.slow_s)
                answer = cloud.answers.get(self.path.partition("?")[0])
                is_asked_well = self.headers["Metadata-Flavor"] == "Google" or (
                    self.headers["Metadata"] == "true"
                    or self.headers["X-aws-ec2-metadata-token"] == "token"
                )
                with contextlib.suppress(OSError):  # who asked has given up
                    self.send_response(404 if answer is None else 200 if is_asked_well else 403)
                    self.end_headers()
                    body = (answer or "").replace(AWS_SOON, aws_soon)
                    self.wfile.write(body.replace(AZURE_SOON, azure_soon).encode())

            def do_PUT(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"token")

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.calls, self.fails = directory / "calls", directory / "fails"
        self.log = directory / "log"
        self.command = directory / "everstep"
        self.command.write_text(f'#!/bin/sh\necho "$@" >> {self.calls}\n! [ -e {self.fails} ]\n')
        self.command.chmod(0o700)
        self.process: subprocess.Popen[bytes] | None = None

    def watch(self, cloud: str) -> None:
        url = f"http://127.0.0.1:{self.server.server_port}"
        options = ["--cloud", cloud, "--metadata", url, "--every", "0.05"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *options, "--everstep", str(self.command)],
                stderr=log,
            )
        wait_for(lambda: "watching" in self.log.read_text(), 20, "the program's start")

    def drains(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    made = Cloud(tmp_path)
    yield made
    made.end()


def azure(**event: Any) -> dict[str, str]:
    event = {
        "EventId": "e1",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "Resources": ["vm1"],
        "NotBefore": AZURE_SOON,
    } | event
    name = "/metadata/instance/compute/name"
    return {name: "vm1", "/metadata/scheduledevents": json.dumps({"Events": [event]})}


@pytest.mark.parametrize(
    ("kind", "answers", "least_s", "words"),
    [
        (
            "aws",
            {
                "/latest/meta-data/spot/instance-action": json.dumps(
                    {"action": "terminate", "time": AWS_SOON}
                )
            },
            30,
            "spot instance, terminate",
        ),
        ("aws", {"/latest/meta-data/events/recommendations/rebalance": "{}"}, 120, "rebalance"),
        ("gce", {"/computeMetadata/v1/instance/preempted": "TRUE"}, 25, "preempted"),
        ("azure", azure(), 30, "Preempt, e1"),
        ("azure", azure(NotBefore=""), 120, "Preempt, e1"),
    ],
)
def test_a_notice_drains_the_node_once_with_the_time_that_is_left(
    cloud: Cloud, kind: str, answers: dict[str, str], least_s: float, words: str
) -> None:
    cloud.answers = answers
    cloud.fails.touch()  # Ray's head is away
    cloud.watch(kind)
    wait_for(lambda: len(cloud.drains()) >= 2, 20, "another try")
    cloud.fails.unlink()
    known = len(cloud.drains()) + 1
    first = cloud.drains()[0]
    assert first.startswith("drain --this-node --deadline ") and words in first
    assert least_s <= float(first.split()[3]) <= 120
    wait_for(lambda: len(cloud.drains()) >= known, 20, "the drain that is accepted")
    cloud.answers = {}
    wait_for(lambda: "withdrawn" in cloud.log.read_text(), 20, "the withdrawal")
    assert len(cloud.drains()) <= known + 1, "once it was accepted, no more"


def test_a_notice_that_follows_a_recommendation_is_heard_too(cloud: Cloud) -> None:
    cloud.answers = {"/latest/meta-data/events/recommendations/rebalance": "{}"}
    cloud.watch("aws")
    wait_for(lambda: len(cloud.drains()) == 1, 20, "the first drain")
    action = {"action": "terminate", "time": AWS_SOON}
    cloud.answers["/latest/meta-data/spot/instance-action"] = json.dumps(action)
    wait_for(lambda: len(cloud.drains()) == 2, 20, "the second drain")
    assert "terminate" in cloud.drains()[1]


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("aws", {}),
        ("aws", {"/latest/meta-data/spot/instance-action": "<html>"}),
        ("gce", {"/computeMetadata/v1/instance/preempted": "FALSE"}),
        ("gce", {"/computeMetadata/v1/instance/maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}),
        ("azure", azure(Resources=["vm2"])),
        ("azure", azure(EventType="Freeze")),
    ],
)
def test_what_is_no_notice_of_this_machine_drains_nothing_until_it_shuts_down(
    cloud: Cloud, kind: str, answers: dict[str, str]
) -> None:
    cloud.answers = answers
    cloud.watch(kind)
    cloud.slow_s = 3.0  # a service that hangs is asked again
    wait_for(lambda: "timed out" in cloud.log.read_text(), 20, "the hang")
    cloud.slow_s = 0.0
    assert cloud.drains() == []
    assert cloud.process is not None
    cloud.process.send_signal(signal.SIGTERM)
    assert cloud.process.wait(20) == 0
    assert cloud.drains() == [
        "drain --this-node --wait --deadline 60 --reason this machine shuts down"
    ]
