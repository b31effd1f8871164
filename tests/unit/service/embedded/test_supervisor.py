"""The supervisor of the embedded cluster: what it asks the keeper for."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cluster.cluster_view import ClusterNote, NodeNote, write_note
from service.embedded.cluster import EmbeddedCluster
from service.embedded.processes import CLUSTER_DIR_VARIABLE, started_at
from service.embedded.supervisor import ClusterSupervisor
from service.settings import Settings

KEEPER = """
import signal, sys
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(12)) if "knows" in sys.argv else None
print(flush=True)
signal.pause()
"""


@pytest.fixture(params=["knows", "older"])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", KEEPER, request.param],
        env={CLUSTER_DIR_VARIABLE: str(tmp_path / "cluster")},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    yield process
    process.kill()
    process.communicate()


def test_a_keeper_makes_way_for_a_submission_unless_it_is_of_an_older_version(
    keeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    knows = "knows" in keeper.args
    settings = Settings(home=tmp_path)
    note = ClusterNote(
        "ready",
        keeper.pid,
        started_at(keeper.pid),
        str(tmp_path / "cluster"),
        0,
        1,
        nodes=(NodeNote("head", True, 0, keeper.pid, 0.0, 1, ()),),
        makes_way=knows,
    )
    write_note(settings.cluster_path, note)
    supervisor = ClusterSupervisor(EmbeddedCluster(settings))
    supervisor.make_way()  # there is no cluster yet
    supervisor.start()
    supervisor.make_way()
    if knows:
        assert keeper.wait(60) == 12
        supervisor.make_way()  # it has ended
    else:
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(60) == -signal.SIGTERM, "it was not ended by a signal it does not know"
