"""What a node builds once: ranks are forked from it, or each builds for itself and why is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.spec.run_spec import RunSpec
from storage.code import CodeStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import TASK, tar_gz
from tests.support.service_process import wait_for
from train_fn.errors import RankDied
from train_fn.ranks.build_once import SharedLocks
from train_fn.ranks.fork import RankProcess, Zygotes
from train_fn.ranks.line import BuildOrder, RankFacts
from train_fn.ranks.zygote import streams_of_this
from train_fn.recovery.launch import RankJob, RankLaunch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # who starts level 0 does not wait for its end
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]


class Node:
    """Hosts of a node, and what they have had built and forked."""

    def __init__(self, storage: Path) -> None:
        self._storage = open_storage(str(storage))
        self._hosts: list[Zygotes] = []
        self._ranks: list[RankProcess] = []
        self._seen: set[int] = set()

    def host(self) -> Zygotes:
        self._hosts.append(Zygotes(f"node-{os.getpid()}"))
        return self._hosts[-1]

    def job(self, build: str, run_id: str = "run_built") -> RankJob:
        """Return what ranks train whose task does this, too, in ``build_datasets``."""
        lines = "".join(f"        {line}\n" for line in build.splitlines())
        source = f"{TASK}\n\nclass Own(Line):\n    def build_datasets(self):\n{lines}"
        source += "        return super().build_datasets()\n"
        digest = CodeStore(self._storage).put(tar_gz({"task.py": source})).digest
        spec = RunSpec.model_validate(
            {"name": "built", "code": {"archive": digest, "task": "task:Own"}}
        )
        loop = "train_fn.loop.attempt:train"
        return RankJob(spec, RunDir(self._storage, run_id.replace(" ", "_")), 1, None, False, loop)

    def build(self, host: Zygotes, job: RankJob) -> float:
        def order(path: Path) -> BuildOrder:
            return BuildOrder(
                job, path, dict(os.environ), {"EVERSTEP_OF_RUN": "set"}, streams_of_this()
            )

        return host.build(order, job)

    def rank(self, host: Zygotes, **environ: str) -> RankProcess:
        launch = RankLaunch(1, time.time())
        facts = RankFacts(
            launch, {**os.environ, **environ}, "node", "127.0.0.1", False, streams_of_this()
        )
        self._ranks.append(host.fork(facts, lambda name, arguments: None))
        self._ranks[-1].call("ping", timeout_s=60)
        return self._ranks[-1]

    def builder(self, host: Zygotes) -> psutil.Process:
        assert host._level_1 is not None
        return psutil.Process(host._level_1.pid)

    def end(self) -> None:
        """End everything. None of it is left."""
        levels = [each for host in self._hosts for each in (host._level_1, host._level_0) if each]
        processes = [psutil.Process(each.pid) for each in levels if psutil.pid_exists(each.pid)]
        processes += [each for one in processes for each in one.children(recursive=True)]
        for rank in self._ranks:
            rank.close()
        for level in levels:
            level.close()
        for each in processes:
            if each.is_running():
                each.kill()
        _, left = psutil.wait_procs(processes, 30)
        assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


def has_built(host: Zygotes, rank: RankProcess) -> bool:
    """Return whether a rank was forked from the process that has built."""
    return host._level_1 is not None and psutil.Process(rank.pid).ppid() == host._level_1.pid


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose level 0 all tests of this file share."""
    place = tmp_path_factory.mktemp("node")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(place))
        made = Node(place / "storage")
        yield made
        made.end()


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


COUNTS = "with open({marker!r}, 'a') as file:\n    print('built', file=file)\nprint('reading')"


def test_hosts_of_a_node_build_once_and_their_ranks_begin_with_it(node: Node, marker: Path) -> None:
    job, hosts = node.job(COUNTS.format(marker=str(marker))), [node.host(), node.host()]
    seconds = [node.build(host, job) for host in hosts]
    assert seconds[0] > 0 == seconds[1] and all(host.has_built for host in hosts)
    assert [host.why_not for host in hosts] == [None, None]
    ranks = [node.rank(host, EVERSTEP_OWN=name) for host, name in zip(hosts, "ab", strict=True)]
    assert {has_built(host, each) for host, each in zip(hosts, ranks, strict=True)} == {True}
    assert marker.read_text().splitlines() == ["built"]
    parents = {psutil.Process(each.pid).ppid() for each in ranks}
    assert parents == {node.builder(hosts[0]).pid} == {node.builder(hosts[1]).pid}
    assert len(set(parents | {each.pid for each in ranks})) == 3


def test_another_run_builds_for_itself(node: Node, marker: Path) -> None:
    host, other = node.host(), node.host()
    node.build(host, node.job(COUNTS.format(marker=str(marker)), "run_one"))
    node.build(other, node.job(COUNTS.format(marker=str(marker)), "run_other"))
    assert marker.read_text().splitlines() == ["built"] * 2
    assert node.builder(host).pid != node.builder(other).pid


REFUSED = {
    "threads": (
        "import threading\nthreading.Thread(target=threading.Event().wait, name='reads').start()",
        "the build has left 1 threads running",
    ),
    "files": (
        "self.file = open({marker!r}, 'w')",
        "the build has left files open ({marker}), whose place ranks would share",
    ),
    "a file that is read": (
        "open({marker!r}, 'w').write('text')\nself.file = open({marker!r})\nself.file.read(1)",
        "the build has left files open ({marker})",
    ),
    "a database": (
        "import sqlite3\nself.base = sqlite3.connect({marker!r})\n"
        "self.base.execute('create table a (b)')",
        "the build has left files open ({marker})",
    ),
    "a child": (
        "import subprocess\nself.child = subprocess.Popen(['sleep', '600'])",
        "the build has left processes running (sleep (",
    ),
    "rank": (
        "import torch.distributed as dist\nself.rank = dist.get_rank()",
        "the build asks for its rank or its peers (task.py, line ",
    ),
    "environment": (
        "import os\nself.rank = os.environ.get('RANK', 0)",
        "the build asks for its rank or its peers (task.py, line ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_is_built_by_each_rank(what: str, node: Node, marker: Path) -> None:
    build, why = (text.format(marker=str(marker)) for text in REFUSED[what])
    host, other = node.host(), node.host()
    node.build(host, node.job(build, f"run_{what}"))
    assert host.why_not is not None and why in host.why_not
    assert host.failed is None and host.has_built
    assert not has_built(host, node.rank(host))
    assert node.build(other, node.job(build, f"run_{what}")) == 0.0, "it is not tried again"
    assert other.why_not == host.why_not


SHARED = {
    "a mapped file": (
        "import numpy\nnumpy.arange(1000).tofile({marker!r})\n"
        "self.map = numpy.memmap({marker!r}, dtype=int, mode='r')\nassert self.map[7] == 7"
    ),
    "whether there are peers": "import torch.distributed as dist\nassert dist.is_initialized()",
    "what has ended": (
        "import subprocess, threading\nsubprocess.run(['true'])\n"
        "thread = threading.Thread(target=print)\nthread.start()\nthread.join()\n"
        "with open({marker!r}, 'w') as file:\n    file.write('done')"
    ),
}


@pytest.mark.parametrize("what", SHARED)
def test_what_nobody_would_move_is_shared(what: str, node: Node, marker: Path) -> None:
    host = node.host()
    node.build(host, node.job(SHARED[what].format(marker=str(marker)), f"run_{what}"))
    assert (host.why_not, host.failed) == (None, None)
    assert has_built(host, node.rank(host))


LEAVES = """import os, subprocess
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! $$; wait"], stdout=subprocess.PIPE)
if os.fork() == 0:
    os.setsid()
    if (daemon := os.fork()) == 0:
        while True:
            os.read(os.pipe()[0], 1)
    open({marker!r}, "w").write(child.stdout.readline().decode() + str(daemon))
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("then", ["", "raise ValueError"], ids=["is refused", "fails"])
def test_nothing_is_left_of_what_a_build_has_started(then: str, node: Node, marker: Path) -> None:
    host = node.host()
    node.build(host, node.job(LEAVES.format(marker=str(marker)) + then, f"run_leaves{len(then)}"))
    started = list(map(int, marker.read_text().split()))
    assert host.why_not is not None and len(started) == 3
    assert [pid for pid in started if psutil.pid_exists(pid)] == []


def test_a_build_that_fails_is_told_and_each_rank_tries_again(node: Node) -> None:
    host = node.host()
    node.build(host, node.job("raise FileNotFoundError('no data here')"))
    assert host.failed == "FileNotFoundError: no data here"
    assert host.why_not is not None and "no data here" in host.why_not
    assert not has_built(host, node.rank(host))


def test_a_build_that_ends_its_process_is_told(node: Node) -> None:
    host = node.host()
    node.build(host, node.job("import os\nos._exit(3)"))
    assert host.failed == "its process has ended" and not has_built(host, node.rank(host))


def test_a_build_that_hangs_ends_with_its_host(node: Node, marker: Path) -> None:
    host = node.host()
    writes = "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    writes += f"with open({str(marker)!r}, 'w') as file:\n"
    writes += "    file.write(f'{os.getpid()} {child.pid}\\n')\ntime.sleep(600)"
    job = node.job(writes)
    building = threading.Thread(target=node.build, args=(host, job), daemon=True)
    building.start()
    wait_for(lambda: marker.exists() and "\n" in marker.read_text(), 120, "the build")
    started = list(map(psutil.Process, map(int, marker.read_text().split())))
    assert host._level_0 is not None
    host._level_0.close()  # as the end of the host's process does
    building.join(30)
    assert not building.is_alive() and host.failed == "its process has ended"
    _, left = psutil.wait_procs(started, 20)
    assert left == []


def test_a_builder_that_is_gone_is_made_again(node: Node, marker: Path) -> None:
    host = node.host()
    job = node.job(COUNTS.format(marker=str(marker)), "run_again")
    node.build(host, job)
    lives = node.rank(host)
    node.builder(host).kill()
    wait_for(lambda: not host.has_built, 20, "news of its end")
    lives.call("ping", timeout_s=20)
    assert node.build(host, job) > 0 and has_built(host, node.rank(host))


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("by", ["host", "close"])
def test_a_stopped_rank_is_ended(by: str, node: Node) -> None:
    host = node.host()
    rank = node.rank(host)
    process = psutil.Process(rank.pid)
    os.kill(rank.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        rank.call("ping", timeout_s=0.2)
    if by == "host":
        assert host._level_0 is not None
        host._level_0.close()
    else:
        rank.close()
    _, left = psutil.wait_procs([process], 20)
    assert left == []


def test_a_rank_ends_if_its_line_is_cut(node: Node) -> None:
    """As at the end of its host, though its zygote be gone or stopped."""
    rank = node.rank(node.host())
    process = psutil.Process(rank.pid)
    with socket.socket(fileno=os.dup(rank._connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    _, left = psutil.wait_procs([process], 20)
    assert left == []


def test_a_function_is_called_where_torch_is(node: Node) -> None:
    host = node.host()
    found: Callable[..., Any] = host.call
    assert found(os.getpid) != os.getpid()
    with pytest.raises(RankDied, match="a process that was to run _exit has ended"):
        found(os._exit, 1)


def test_a_fork_has_locks_of_its_own_where_another_died_with_one() -> None:
    lock, seats, event = (
        multiprocessing.Lock(),
        multiprocessing.Semaphore(3),
        multiprocessing.Event(),
    )
    shared = SharedLocks()
    assert lock.acquire() and seats.acquire()  # as another fork has, which is gone
    if (pid := os.fork()) == 0:
        try:
            shared.renew()
            event.set()
            is_free = lock.acquire(timeout=1) and event.wait(1)
            os._exit(0 if is_free and seats.get_value() == 3 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert not lock.acquire(timeout=0) and not event.is_set()
