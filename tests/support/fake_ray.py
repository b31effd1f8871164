"""A dashboard that answers as Ray's does, for tests of what talks to it. Real HTTP, so that other
processes can use it too."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

HANGS_S = 30.0
"""Longest time for which an answer is held back."""

TRACEBACK = "Traceback (most recent call last):\n  File job_manager.py\nValueError: {}\n"


class FakeRay:
    """Jobs and nodes of a cluster that does nothing by itself."""

    token = "ray-token"

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.submissions: list[str] = []
        """Every id that was asked to be submitted, refused ones too."""
        self.stopped: list[str] = []
        self.nodes: list[dict[str, Any]] = [
            self.node("head", {"memory": 1e9}, head=True),
            self.node("n1", {"CPU": 2.0}),
        ]
        self.load: dict[str, Any] = {}
        """What the agent of ``n1`` has reported about its host."""
        self.used: dict[str, str] = {}
        """Ray's account of what is used, by node."""
        self.broken = False
        """Answer everything with an internal error."""
        self.answers = threading.Event()
        """While it is clear, answers are made and held back."""
        self.answers.set()
        self.most_waiting = 0
        """So many were held back, or answered, at one moment."""
        self._waiting: set[int] = set()
        self.url = ""

    @staticmethod
    def node(
        node_id: str, resources: dict[str, float], *, state: str = "ALIVE", head: bool = False
    ) -> dict[str, Any]:
        return {
            "node_id": node_id,
            "node_ip": "10.0.0.1",
            "node_name": "10.0.0.1",
            "state": state,
            "is_head_node": head,
            "resources_total": resources,
        }

    def hold_back(self) -> None:
        """Wait, on a thread of its own for each answer, until answers may go."""
        self._waiting.add(threading.get_ident())
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        self.answers.wait(HANGS_S)
        self._waiting.discard(threading.get_ident())

    def end(self, job_id: str, status: str = "FAILED") -> None:
        self.jobs[job_id]["status"] = status

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.broken:
            return 500, TRACEBACK.format("something broke")
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": "2.60.0"}
        if path == "/api/v0/nodes":
            return 200, {"result": True, "data": {"result": {"result": self.nodes}}}
        if path == "/nodes":
            summary = [
                {
                    "hostname": "host-a",
                    "raylet": {"nodeId": "n1", "stateSnapshot": {"state": "DRAINING"}},
                    **self.load,
                }
            ]
            return 200, {"data": {"summary": summary, "nodeLogicalResources": self.used}}
        if path == "/api/jobs/":
            return self._submit(body) if method == "POST" else (200, list(self.jobs.values()))
        if match := re.fullmatch(r"/api/jobs/([^/]+)(/stop)?", path):
            job = self.jobs.get(match[1])
            if job is None:
                return 404, f"Job {match[1]} does not exist"
            if match[2]:
                self.stopped.append(match[1])
                job["status"] = "STOPPED"
                return 200, {"stopped": True}
            return 200, job
        return 404, "not found"

    def _submit(self, body: Any) -> tuple[int, Any]:
        job_id = body["submission_id"]
        self.submissions.append(job_id)
        if job_id in self.jobs:
            return 500, TRACEBACK.format(
                f"Job with submission_id {job_id} already exists. Please use a different "
                "submission_id."
            )
        if not body["entrypoint"]:
            return 400, TRACEBACK.format("entrypoint must not be empty")
        self.jobs[job_id] = {
            **body,
            "status": "RUNNING",
            "message": "",
            "driver_node_id": None,
            "driver_exit_code": None,
        }
        return 200, {"job_id": job_id, "submission_id": job_id}


@contextmanager
def serving(ray: FakeRay) -> Iterator[FakeRay]:
    """Serve on a free port of loopback. A machine that stands still for seconds is not taken for a
    dashboard that is away."""

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            if self.headers.get("Authorization") != f"Bearer {ray.token}":
                status, answer = 401, "Unauthorized: Missing authentication token"
            else:
                status, answer = ray.answer(self.command, self.path.partition("?")[0], body)
            ray.hold_back()
            data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = _handle

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    ray.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("service.cluster.ray_jobs.CONNECT_TIMEOUT_S", HANGS_S)
            yield ray
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
