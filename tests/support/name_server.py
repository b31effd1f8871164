"""A name server for tests: answers from a file like /etc/hosts, read again for every question.

    python -m tests.support.name_server ADDRESS PORT FILE

It stands for the one that a Docker engine gives to containers (127.0.0.11:53).
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
import threading
from pathlib import Path

_A, _IN = 1, 1
_RESPONSE, _NO_SUCH_NAME = 0x8580, 3
_HEADER = struct.Struct("!6H")


def addresses_of(name: str, file: Path) -> list[str]:
    """Return the IPv4 addresses that ``file`` gives ``name``."""
    rows = (line.split("#")[0].split() for line in file.read_text().splitlines())
    return [row[0] for row in rows if name in row[1:] and ":" not in row[0]]


def answer(query: bytes, file: Path) -> bytes:
    """Return the response to one query: its A records, none of another type, or "no such name"."""
    number, _, _, *_ = _HEADER.unpack_from(query)
    at, labels = _HEADER.size, []
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode())
        at += 1 + size
    question = query[_HEADER.size : at + 5]
    kind, _ = struct.unpack("!2H", question[-4:])
    known = addresses_of(".".join(labels).lower(), file)
    found = known if kind == _A else []
    code = 0 if known else _NO_SUCH_NAME
    records = b"".join(
        struct.pack("!3HIH", 0xC000 | _HEADER.size, _A, _IN, 1, 4)
        + ipaddress.IPv4Address(each).packed
        for each in found
    )
    return _HEADER.pack(number, _RESPONSE | code, 1, len(found), 0, 0) + question + records


class NameServer:
    """Serves ``file`` over UDP in a thread; a context manager."""

    def __init__(self, file: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        self._file = file
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, port))
        self.port = int(self._socket.getsockname()[1])
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(4096)
            if self._ends.is_set():
                return
            self._socket.sendto(self.answer(query), sender)

    def answer(self, query: bytes) -> bytes:
        return answer(query, self._file)

    def __enter__(self) -> NameServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join(10)
        self._socket.close()


if __name__ == "__main__":
    NameServer(Path(sys.argv[3]), sys.argv[1], int(sys.argv[2])).serve()
