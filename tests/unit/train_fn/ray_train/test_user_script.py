"""A script for torchrun in a rank's process: its environment, its exit, its files and its stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from everstep.wire.events import EventKind
from storage.code import CodeStore
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.code_archives import tar_gz
from tests.support.one_rank import Journal, journal_of, one_rank
from tests.support.own_task import own_node
from train_fn.context import WorkerContext
from train_fn.ranks.rank import RankJournal
from train_fn.ray_train import user_function
from train_fn.recovery.evidence import StepFailed
from train_fn.recovery.launch import RankLaunch, RecoveryNote
from train_fn.user_code.script_run import SHARED_VARIABLE

__all__ = ["own_node"]

FILES = {
    "train.py": (
        "import os, pathlib, sys\n"
        "from helper import VALUE\n"
        "assert __name__ == '__main__' and VALUE == 7\n"
        "assert sys.argv[1:] == ['--lr', '0.1'], sys.argv\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'TORCHELASTIC_RESTART_COUNT')\n"
        "text = ' '.join(os.environ[name] for name in names)\n"
        "pathlib.Path('out.txt').write_text(text)\n"
        "assert pathlib.Path(__file__).parent == pathlib.Path.cwd()\n"
    ),
    "helper.py": "VALUE = 7\n",
    "pkg/__init__.py": "",
    "pkg/parts.py": "CODE = 3\n",
    "pkg/leaves.py": "import sys\nfrom .parts import CODE\n\n\nsys.exit(CODE)\n",
    "zero.py": "import signal, sys\nsignal.signal(signal.SIGTERM, print)\nsys.exit(0)\n",
    "peer.py": (
        "import sys\n"
        "try:\n"
        "    raise RuntimeError('[/gloo/transport/tcp/pair.cc:553] Connection closed by peer')\n"
        "except RuntimeError:\n"
        "    sys.exit(1)\n"
    ),
    "waits.py": (
        "import time\n"
        "while True:\n"
        "    try:\n"
        "        time.sleep(0.01)\n"
        "    except Exception:\n"
        "        pass\n"
    ),
}


@pytest.fixture(autouse=True)
def ray_context(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(checkpoint=None, report_call_index=0, report=lambda *_: None)
    monkeypatch.setattr(user_function, "get_train_context", lambda: found)


def context(
    tmp_path: Path,
    script: str,
    *argv: str,
    attempt: int = 1,
    files: dict[str, str | bytes] = FILES,
) -> WorkerContext:
    storage = open_storage(str(tmp_path / "storage"))
    digest = CodeStore(storage).put(tar_gz(dict(files))).digest
    code = {"archive": digest, "script": script, "argv": list(argv)}
    spec = RunSpec.model_validate({"name": "own", "code": code})
    return one_rank(spec, RunDir(storage, "run_own"), attempt=attempt)


def failure_of(ctx: WorkerContext) -> StepFailed:
    with pytest.raises(StepFailed) as caught:
        user_function.train(ctx)
    return caught.value


def test_a_script_finds_what_torchrun_gives_and_its_files_are_kept(tmp_path: Path) -> None:
    before = dict(os.environ), list(sys.argv), Path.cwd(), sys.modules["__main__"]
    ctx = context(tmp_path, "train.py", "--lr", "0.1", attempt=3)
    assert user_function.train(ctx) is None
    assert ctx.run_dir.work_path is not None
    assert Path(ctx.run_dir.work_path, "out.txt").read_text() == "0 1 0 2"
    assert (dict(os.environ), list(sys.argv), Path.cwd(), sys.modules["__main__"]) == before
    restored, started = (data for _, data in journal_of(ctx).events)
    assert (restored["source"], restored["step"]) == ("own_files", 0)
    assert "checkpoints that it writes itself" in started["guarantee"]
    Path(ctx.run_dir.work_path, "helper.py").write_text("VALUE = 7  # still here\n")
    assert user_function.train(ctx) is None
    assert "still here" in Path(ctx.run_dir.work_path, "helper.py").read_text()
    assert SHARED_VARIABLE not in os.environ


def test_an_exit_code_is_a_user_error_at_the_script_s_own_line(tmp_path: Path) -> None:
    for script in ("pkg/leaves.py", "-m pkg.leaves"):
        error = failure_of(context(tmp_path, script)).error
        assert (error.kind, error.step, error.phase) == (ErrorKind.USER, None, "script")
        assert error.message == "leaves.py exited with code 3 (pkg/leaves.py, line 5)"
        assert error.place == "pkg/leaves.py, line 5"


def test_an_exit_because_a_peer_is_gone_is_no_error_of_the_script(tmp_path: Path) -> None:
    error = failure_of(context(tmp_path, "peer.py")).error
    assert error.kind is ErrorKind.COLLECTIVE and "exited with code 1" in error.message


def test_exit_0_is_the_end(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert user_function.train(context(tmp_path, "zero.py")) is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_script_that_might_protect_a_loop_and_does_not_says_at_its_end_where_it_began(
    tmp_path: Path,
) -> None:
    ctx = context(tmp_path, "unused.py", files={"unused.py": "import everstep.train\n"})
    assert user_function.train(ctx) is None
    kinds = [kind for kind, _ in journal_of(ctx).events]
    assert kinds == [EventKind.TRAINING_STARTED, EventKind.RESTORED]


def test_a_script_that_reports_nothing_is_interrupted_by_a_stop(tmp_path: Path) -> None:
    ctx = context(tmp_path, "waits.py")
    journal_of(ctx).stop_requested = "pause"
    began = time.monotonic()
    assert user_function.train(ctx) == "pause"
    assert time.monotonic() - began < 30


STRANGER = """
import os, pathlib, time
import psutil
from torch.distributed import TCPStore

host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
stranger = TCPStore(host, port, is_master=False)
for text in ("all good", "pause", "cancel", b"\\xff\\xfe", ""):
    stranger.set("everstep/stop", text)
    time.sleep(1.1)
connections = psutil.Process().net_connections()
heard = {one.laddr.ip for one in connections if one.laddr.port == port and not one.raddr}
pathlib.Path("out.txt").write_text(" ".join(heard))
ASK()
while True:
    time.sleep(0.01)
"""


def test_a_script_is_stopped_by_its_ranks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reaches the group's store may write there. It listens on the cluster's address."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ctx = context(tmp_path, "stranger.py", files={"stranger.py": STRANGER})

    def ask() -> None:
        journal_of(ctx).stop_requested = "pause"

    monkeypatch.setattr("builtins.ASK", ask, raising=False)
    assert user_function.train(ctx) == "pause"
    assert ctx.run_dir.work_path is not None
    assert Path(ctx.run_dir.work_path, "out.txt").read_text() == "127.0.0.1"
    assert [record.message for record in caplog.records if "no rank" in record.message]


def test_the_recovery_of_a_function_counts_reports_and_the_work_since_the_last_one() -> None:
    for unit, found in (("reports", 1.5), (None, None)):
        journal, now = Journal(), time.time()
        launch = RankLaunch(2, now - 1, recovery=RecoveryNote(now - 2, 0.1, 7, 2, now - 1.5, 1.5))
        rank = RankJournal(journal, launch, 0, 2)  # type: ignore[arg-type]
        rank.emit(
            EventKind.RESTORED,
            {"step": 4, "source": "checkpoint"} | ({"unit": unit} if unit else {}),
        )
        rank.emit(EventKind.METRICS, {"points": [{"step": 5, "at": now, "values": {}}]})
        [data] = journal.of_kind(EventKind.RECOVERED)
        assert (data["steps_lost"], data.get("unit"), data.get("since_report_s")) == (
            3,
            unit,
            found,
        )


def test_the_recovery_of_a_script_that_reports_nothing_ends_with_its_start() -> None:
    for last_step, kinds in ((0, [EventKind.RECOVERED]), (4, [])):
        journal, now = Journal(), time.time()
        note = RecoveryNote(now - 2, 0.1, last_step, 2, now - 1.5)
        launch = RankLaunch(2, now - 1, recovery=note)
        rank = RankJournal(journal, launch, 0, 2, runs_script=True)  # type: ignore[arg-type]
        rank.emit(EventKind.RESTORED, {"step": last_step, "source": "own_files"})
        rank.emit(EventKind.TRAINING_STARTED, {})
        assert [kind for kind, _ in journal.events][2:] == kinds
        rank.emit(EventKind.METRICS, {"points": [{"step": 5, "at": now, "values": {}}]})
        [data] = journal.of_kind(EventKind.RECOVERED)
        assert data["steps_lost"] is None and data["recovery_s"] > 0
