"""What a rank reports about its host, from counters that grow, and from this machine's own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from everstep.wire.events import EventKind
from train_fn.node.usage import HostSample, HostWatch, sample_host


class Host:
    """Gives the samples that it has, then cannot be read."""

    def __init__(self, *samples: HostSample) -> None:
        self.samples = list(samples)
        self.reports: list[dict[str, Any]] = []
        self.over = threading.Event()

    def sample(self) -> HostSample:
        if not self.samples:
            self.over.set()
            raise OSError("no /proc")
        return self.samples.pop(0)

    def emit(self, kind: EventKind, data: dict[str, Any]) -> None:
        assert kind is EventKind.RANK_USE
        self.reports.append(data)


def test_reports_are_of_the_time_since_the_last() -> None:
    host = Host(
        HostSample(100.0, 5.0, 10, 1000, 0),
        HostSample(110.0, 20.0, 30, 3000, 500),
        HostSample(170.0, 50.0, 20, 3000, 100),
    )
    watch = HostWatch(host.emit, 1, 2, "node-a", host.sample, first_s=0.001, every_s=0.001)
    with watch:
        assert host.over.wait(60)
    first, second = host.reports
    assert first == {
        "rank": 1,
        "node_id": "node-a",
        "cpu_cores": 1.5,
        "rss_bytes": 30,
        "net_in_bytes_per_s": 200,
        "net_out_bytes_per_s": 50,
        "seconds": 10.0,
    }
    assert (second["cpu_cores"], second["rss_bytes"], second["net_in_bytes_per_s"]) == (0.5, 20, 0)
    assert second["net_out_bytes_per_s"] is None, "an interface vanished with its counters"


def test_a_large_group_reports_less_often_and_a_short_attempt_not_at_all() -> None:
    host = Host(HostSample(0.0, 0.0, 0, 0, 0))
    with HostWatch(host.emit, 0, 64, "node-a", host.sample) as watch:
        assert watch._every_s == 240.0
    assert host.reports == [] and not watch._thread.is_alive()


def test_this_machine_is_read(tmp_path: Path) -> None:
    before = sample_host()
    while time.process_time() < before.cpu_s + 0.02:
        pass
    after = sample_host()
    assert after.cpu_s > before.cpu_s and after.rss_bytes > 1 << 20
    (tmp_path / "self").mkdir()
    (tmp_path / "net").mkdir()
    (tmp_path / "self/statm").write_text("900 7 3 1 0 5 0\n")
    (tmp_path / "net/dev").write_text(
        "Inter-|   Receive                     |  Transmit\n face |bytes packets\n"
        "    lo: 99 1 0 0 0 0 0 0 99 1 0 0 0 0 0 0\n"
        "  eth0: 70 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n"
        "ib0:1000000 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n"
    )
    read = sample_host(tmp_path)
    assert (read.received_bytes, read.sent_bytes) == (1_000_070, 32)
    assert read.rss_bytes % 7 == 0 and read.rss_bytes > 7 * 1000
