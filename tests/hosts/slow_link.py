"""A bad line between two interfaces: every frame comes late, and some never. ``python -m
tests.hosts.slow_link A B DELAY_S LOSS``.

It stands in for the kernel's netem, which not every machine has. Frames are taken and given with
the kernel's own header of offloads, so that what was left to the network card stays left to it.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import sys
import time
from random import Random

ETH_P_ALL = 0x0003
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_OUTGOING = 4
LARGEST = 1 << 17


def line_end(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    end.bind((interface, 0))
    return end


def carry(first: str, second: str, delay_s: float, loss: float) -> None:
    """Until killed."""
    ends = (line_end(first), line_end(second))
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    random, order = Random(1), itertools.count()
    late: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        pause = max(0.0, late[0][0] - time.monotonic()) if late else None
        for end in select.select(ends, (), (), pause)[0]:
            frame, address = end.recvfrom(LARGEST)
            if address[2] != PACKET_OUTGOING and random.random() >= loss:
                heapq.heappush(late, (time.monotonic() + delay_s, next(order), other[end], frame))
        while late and late[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(late)
            try:
                end.send(frame)
            except OSError:
                continue  # the interface is down: the frame is lost


if __name__ == "__main__":
    carry(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
