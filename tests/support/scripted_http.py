"""A real HTTP server whose answers a test writes down byte by byte: broken streams, silence,
lies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from everstep.client.client import Client
from everstep.client.streams import Patience
from everstep.client.transport import Timing

RUN_ID = "run_0123456789ab"
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Gives each request to the server's script."""

    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(
            self.command, self.path, dict(self.headers.items()), self.rfile.read(length)
        )
        self.server.requests.append(request)
        try:
            self.server.answer(request)(self)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_DELETE = _handle

    def log_message(self, *_arguments: object) -> None:
        pass

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self, content_type: str = "text/event-stream") -> None:
        """A body of unknown length; ``chunk`` sends of it, and a handler that returns without
        ``end`` breaks off."""
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class ScriptedServer(ThreadingHTTPServer):
    """Answers by path (without its query): each path has a list of answers, the last of which
    stays."""

    daemon_threads = True
    block_on_close = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[Request] = []
        self.script: dict[str, list[Answer]] = {}
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, request: Request) -> Answer:
        answers = self.script.get(request.path.partition("?")[0])
        if not answers:
            return problem(404, "not_found", f"{request.path} is not in the script")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def to(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path.partition("?")[0] == path]

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


def reply(value: Any, status: int = 200, **headers: str) -> Answer:
    return lambda handler: handler.send(
        status, json.dumps(value).encode(), Content_Type="application/json", **headers
    )


def problem(
    status: int, code: str, detail: str, errors: list[dict[str, Any]] | None = None, **headers: str
) -> Answer:
    body = {
        "type": f"urn:{code}",
        "title": code,
        "status": status,
        "detail": detail,
        "code": code,
        "errors": errors or [],
    }
    return reply(body, status, **headers)


@dataclass
class FakeTime:
    """A clock that moves only by sleeping, which takes no time."""

    now_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds

    @property
    def timing(self) -> Timing:
        return Timing(now=self.now, sleep=self.sleep, jitter=lambda: 1.0)


def client_of(server: ScriptedServer, clock: FakeTime | None = None, **options: Any) -> Client:
    options.setdefault("patience", Patience(silence_s=5, away_s=60))
    return Client(server.url, "token", timing=(clock or FakeTime()).timing, **options)


def run_answer(status: str = "RUNNING", **fields: Any) -> dict[str, Any]:
    """A run as the service answers it."""
    at = "2026-01-02T03:04:05.678Z"
    return {
        "id": RUN_ID,
        "name": "digits",
        "project": "default",
        "status": status,
        "reason": None,
        "priority": 0,
        "tags": {},
        "attempt": 1,
        "submission": 1,
        "created_at": at,
        "started_at": at,
        "finished_at": at if status in ("SUCCEEDED", "FAILED", "CANCELLED") else None,
        "epoch": 0,
        "step": 3,
        "total_steps": 30,
        "world_size": 2,
        "metrics": {"loss": 0.5},
        "best": None,
        "latest_checkpoint": None,
        "restarts": 0,
        "steps_lost": 0,
        "protection": {"survives": ["rank"], "worst_case_steps_lost": 3},
        "goodput": 0.5,
        "links": {"ray_dashboard": None, "ray_job": None, "dashboard": None},
        "transitions": [{"from": None, "to": "QUEUED", "at": at, "reason": None}],
        **fields,
    }


def event(seq: int, kind: str = "metrics", **data: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "at": "2026-01-02T03:04:05.678Z",
        "kind": kind,
        "submission": 1,
        "attempt": 1,
        "data": data,
    }


def frame(item: dict[str, Any]) -> bytes:
    return f"id: {item['seq']}\ndata: {json.dumps(item, ensure_ascii=False)}\n\n".encode()


def ended(seq: int, status: str = "SUCCEEDED") -> dict[str, Any]:
    return event(seq, "status", **{"from": "RUNNING", "to": status, "reason": None})


def streamed(*parts: bytes, complete: bool = True) -> Answer:
    """A stream of these chunks; one that is not ``complete`` breaks off behind the last."""

    def answer(handler: Handler) -> None:
        handler.begin_stream()
        for part in parts:
            handler.chunk(part)
        if complete:
            handler.end()

    return answer


def silent_after(*parts: bytes) -> Answer:
    """A stream of these chunks that then says nothing more."""

    def answer(handler: Handler) -> None:
        handler.begin_stream()
        for part in parts:
            handler.chunk(part)
        handler.server.released.wait(60)

    return answer
