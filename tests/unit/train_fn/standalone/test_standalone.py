"""The loop without Ray: it trains, goes on bit for bit where it was, and refuses to mix two
runs."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep.errors import UsageError
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import EventKind
from storage.checkpoints.store import CheckpointStore
from storage.filesystem import open_storage
from storage.logs.journal import read_journal
from storage.run_dir import RunDir
from tests.support.service_process import wait_for
from train_fn.journal.server import open_local_journal
from train_fn.node.node_dir import shared_memory_root
from train_fn.session.report import Reporter
from train_fn.snapshots.store import Label, node_snapshots
from train_fn.standalone import rank as rank_module
from train_fn.standalone.command import run_local
from train_fn.standalone.rank import (
    EXIT_FAILED,
    EXIT_STOPPED,
    LocalPlace,
    begin_attempt,
    join,
    place_from_env,
    run_rank,
)
from train_fn.standalone.start import NO_ARCHIVE, LocalStart, Program, begin_run
from train_fn.step.peers import end_process_group
from train_fn.tasks.builtin import LanguageModeling


@pytest.fixture(autouse=True)
def own_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = torch.get_num_threads()
    yield
    end_process_group()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(
        "a text that is long enough for some steps, and that a small model can learn a little of. "
        * 20
    )
    return path


def make_spec(path: Path, **changes: Any) -> RunSpec:
    model = {"num_layers": 1, "num_heads": 2, "width": 16, "context_length": 16, "dropout": 0.2}
    raw = {
        "name": "a small one",
        "task": {
            "name": "language_modeling",
            "model": {"name": "gpt", "args": model},
            "data": {"name": "text_files", "args": {"path": str(path)}},
        },
        "train": {"global_batch_size": 16, "micro_batch_size": 4, "ema_decay": 0.9, "seed": 3},
        "checkpoint": {"every_steps": 3},
        "scaling": {"use_gpu": False},
    }
    return RunSpec.model_validate(raw | changes)


def newest(run_dir: RunDir) -> dict[str, Any]:
    store = CheckpointStore(run_dir)
    manifest = store.list()[-1]
    files = {
        name: torch.load(io.BytesIO(store.read_file(manifest.name, name)))
        for name in manifest.files
    }
    for name in ("parent", "tail"):
        del files["train_state.pt"][name]
    (files["train_state.pt"]["best"] or {}).pop("checkpoint", None)  # its name tells the attempt
    return files


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            equal(first[name], second[name]) for name in first
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def kinds(run_dir: RunDir, submission: int) -> list[EventKind]:
    return [event.kind for event in read_journal(run_dir, submission, None, 1000)[0]]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()  # of tests before: FLOPs of compiled code are not counted
    storage, spec = open_storage(str(tmp_path / "runs")), make_spec(text)
    assert run_local(spec, storage.uri, "whole").code == 0
    whole, parts = RunDir(storage, "whole"), RunDir(storage, "parts")
    [finished] = [
        event.data
        for event in read_journal(whole, 1, None, 1000)[0]
        if event.kind is EventKind.FINISHED
    ]
    assert finished["outcome"] == "succeeded" and kinds(whole, 1)[-1] is EventKind.FINISHED
    saved = [manifest.step for manifest in CheckpointStore(whole).list()]
    assert saved[-1] == finished["step"] and set(saved) <= {3, 6, finished["step"]}, (
        "one that is due beside another is merged"
    )
    [evaluated] = [
        event.data
        for event in read_journal(whole, 1, None, 1000)[0]
        if event.kind is EventKind.EVALUATED
    ]
    points = [
        point["values"]
        for event in read_journal(whole, 1, None, 1000)[0]
        if event.kind is EventKind.METRICS
        for point in event.data["points"]
    ]
    assert points and all(
        values["tflops_per_s"] > 0 and "mfu" not in values for values in points
    ), "torch counts a task of Everstep's own, and a CPU has no published peak"
    assert all(
        values["tokens_per_s"] == pytest.approx(16 * values["samples_per_s"]) for values in points
    )
    measured = ("val_loss", "val_accuracy", "val_bits_per_token")
    assert evaluated["metrics"].keys() == {*measured, *(f"ema_{name}" for name in measured)}
    assert evaluated["metrics"]["ema_val_loss"] != evaluated["metrics"]["val_loss"]
    assert newest(whole)["model_ema.pt"].keys() == newest(whole)["model.pt"].keys()

    stopping = threading.Event()
    step_done = Reporter.step_done

    def stop_at_four(reporter: Reporter, *arguments: Any) -> float:
        if reporter._state.step == 4:
            stopping.set()
        return step_done(reporter, *arguments)

    monkeypatch.setattr(Reporter, "step_done", stop_at_four)
    place = LocalPlace(0, 1, 0, 1, "here", "first")
    join(spec, place, 60)
    assert run_rank(spec, parts, place, fresh=False, stopping=stopping).code == EXIT_STOPPED
    monkeypatch.undo()
    end_process_group()
    assert run_local(spec, storage.uri, "parts").code == 0
    assert parts.submissions() == [1, 2]
    [restored] = [
        event.data
        for event in read_journal(parts, 2, None, 1000)[0]
        if event.kind is EventKind.RESTORED
    ]
    assert (restored["source"], restored["step"]) == ("checkpoint", 5)
    assert equal(newest(whole), newest(parts))
    assert not (shared_memory_root() / "parts").exists()


def test_what_raises_keeps_its_frames(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, model: object, batch: torch.Tensor) -> None:
        where_it_broke = batch.shape
        raise LookupError(f"broken at {where_it_broke}")

    monkeypatch.setattr("train_fn.tasks.builtin.LanguageModeling.loss", broken)
    with pytest.raises(LookupError) as caught:
        run_local(make_spec(text), str(tmp_path / "runs"), "broken")
    innermost = caught.traceback[-1]
    assert innermost.locals["where_it_broke"] == (4, 17)
    assert not dist.is_initialized()
    assert not (shared_memory_root() / "broken").exists()


@pytest.mark.parametrize("in_the_open", [True, False])
def test_an_error_leaves_a_checkpoint_of_the_last_step_that_was_done(
    in_the_open: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, spec = (
        open_storage(str(tmp_path / "runs")),
        make_spec(text, checkpoint={"every_steps": 1000}),
    )
    assert run_local(spec, storage.uri, "whole").code == 0
    whole, parts = RunDir(storage, "whole"), RunDir(storage, "parts")
    raising = threading.Event()
    step_done, loss = Reporter.step_done, LanguageModeling.loss

    def break_at_four(reporter: Reporter, *arguments: Any) -> float:
        if reporter._state.step == 4:
            raising.set()
        return step_done(reporter, *arguments)

    def broken(task: LanguageModeling, model: torch.nn.Module, batch: Any) -> Any:
        if raising.is_set():
            raise LookupError("broken")
        return loss(task, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "step_done", break_at_four)
        patch.setattr(LanguageModeling, "loss", broken)
        if in_the_open:
            with pytest.raises(LookupError):
                run_local(spec, storage.uri, "parts")
        else:
            said: list[str] = []
            place = LocalPlace(0, 1, 0, 1, "here", "first")
            join(spec, place, 60)
            ended = run_rank(
                spec, parts, place, fresh=False, stopping=threading.Event(), say=said.append
            )
            end_process_group()
            assert ended.code == EXIT_FAILED
            assert (
                said[-1]
                == "stopped by an error; step 4 is kept as checkpoint step-000000004.s001.a001"
            )
    assert [manifest.step for manifest in CheckpointStore(parts).list()] == [4]
    committed = [
        event.data["step"]
        for event in read_journal(parts, 1, None, 1000)[0]
        if event.kind is EventKind.CHECKPOINT_COMMITTED
    ]
    assert committed == [4]
    # it goes on from the checkpoint alone
    shutil.rmtree(shared_memory_root() / "parts", ignore_errors=True)
    assert run_local(spec, storage.uri, "parts").code == 0
    assert equal(newest(whole), newest(parts))


def test_another_spec_is_refused_unless_it_changes_no_result(text: Path, tmp_path: Path) -> None:
    run_dir, spec = RunDir(open_storage(str(tmp_path)), "run"), make_spec(text)
    assert begin_run(run_dir, spec, "a", fresh=False) == LocalStart(1, 1)
    same = make_spec(
        text, checkpoint={"every_steps": 7}, scaling={"use_gpu": False, "max_workers": 4}
    )
    begin_run(run_dir, same, "a", fresh=False)
    other = make_spec(
        text,
        train={"global_batch_size": 8, "micro_batch_size": 4, "seed": 3, "ema_decay": 0.9},
        optimizer={"name": "adamw"},
    )
    with pytest.raises(UsageError, match=r"train\.global_batch_size differ"):
        begin_run(run_dir, other, "a", fresh=False)
    begin_run(run_dir, other, "a", fresh=True)
    assert run_dir.read_spec() == other
    with pytest.raises(UsageError, match=r"train\.on_out_of_memory is smaller, and without a serv"):
        run_local(make_spec(text, train={"on_out_of_memory": "smaller"}), str(tmp_path), "run")


def test_a_process_that_takes_anothers_place_is_the_same_submissions_next_attempt(
    text: Path, tmp_path: Path
) -> None:
    run_dir, spec = RunDir(open_storage(str(tmp_path)), "run"), make_spec(text)
    journal = open_local_journal(run_dir, 1, 1, 0, threading.Event(), lambda line: None)
    journal.emit(EventKind.ATTEMPT_STARTED, {"world_size": 1, "workers": [], "launch": "agent"})
    journal.close(10)
    assert begin_run(run_dir, spec, "agent", fresh=False) == LocalStart(1, 2)
    assert begin_run(run_dir, spec, "another", fresh=False) == LocalStart(2, 2)


def loop_of(path: Path, arguments: str, run_dir: RunDir) -> RunSpec:
    facts = Program(path, tuple(arguments.split())).facts(run_dir)
    code = {"archive": NO_ARCHIVE, "train_fn": "script:main", "config": facts}
    return RunSpec.model_validate({"name": "run", "code": code})


def begin(run_dir: RunDir, spec: RunSpec, launch: str, steps: int = 0, **how: Any) -> str:
    """Begin a run of ten steps, make some of them, and return what was said."""
    start = begin_run(run_dir, spec, launch, **how)
    journal = open_local_journal(
        run_dir, start.submission, start.attempt, 0, threading.Event(), lambda line: None
    )
    total = {"total_steps": 10, "num_parameters": 1, "num_samples": 1, "micro_batch_size": 1}
    journal.emit(EventKind.ATTEMPT_STARTED, {"world_size": 1, "workers": [], "launch": launch})
    journal.emit(EventKind.TRAINING_STARTED, {**total, "device": "cpu"})
    if steps:
        journal.emit(EventKind.METRICS, {"points": [{"step": steps, "values": {}, "at": 0.0}]})
    if steps == 10:
        journal.emit(EventKind.FINISHED, {"outcome": "succeeded", "reason": None, "step": 10})
    journal.close(10)
    return str(start.note)


def test_a_program_that_has_changed_never_goes_on_without_a_word(tmp_path: Path) -> None:
    run_dir = RunDir(open_storage(str(tmp_path / "out")), "run")
    script, config = tmp_path / "caf\udce9" / "train.py", tmp_path / "rates.yaml"
    script.parent.mkdir()
    script.write_text("rate = 1")
    config.write_text("rate: 1")
    same = f"--config={config}"
    assert " begins in " in begin(run_dir, loop_of(script, same, run_dir), "a", 5)
    assert begin(run_dir, loop_of(script, same, run_dir), "b", 6) == "None"
    config.write_text("rate: 2")
    assert "rates.yaml changed" in begin(run_dir, loop_of(script, same, run_dir), "c", 7)
    script.write_text("rate = 2")
    said = begin(run_dir, loop_of(script, f"{same} --seed 3", run_dir), "d", 10)
    assert "train.py, the arguments changed since it began. To begin anew, delete" in said
    finished = begin(run_dir, loop_of(script, f"{same} --seed 3", run_dir), "e", 10)
    assert "is finished at step 10; only steps after that are made. To begin anew" in finished

    copy = tmp_path / "copy" / "train.py"
    copy.parent.mkdir()
    shutil.copy(script, copy)
    changed = loop_of(copy, f"{same} --seed 3", run_dir)
    with pytest.raises(UsageError, match=r"finished at step 10, and the script's place .*/copy/"):
        begin(run_dir, changed, "f")
    assert "finished at step 10" in begin(run_dir, changed, "f", 10, fresh=False)
    assert " begins in " in begin(run_dir, changed, "g", 5, fresh=True)
    assert begin(run_dir, changed, "g", fresh=True) == "None", "torchrun has restarted it"


def test_a_program_has_a_run_of_its_own_for_each_place_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def name(path: str, *arguments: str, storage: str = "out/protect") -> str:
        return Program(tmp_path / path, arguments).run_name(storage)

    assert [name(path) for path in ("train.py", "a/train.py", "pkg/__main__.py")] == [
        "train",
        "a.train",
        "pkg.__main__",
    ]
    others = [name("train.py", "--lr", "1"), name("train.py", "--lr", "2")]
    others += [name(str(tmp_path.parent / "train.py"))]
    others += [name("a.train.py"), name("a b.py"), name("a-b.py"), name("train/2.py")]
    others += [name("训练.py"), name("测试.py"), name("pkg.py"), name("train"), name("a/_b.py")]
    others += [name(path, storage="/shared") for path in ("train.py", "a/train.py")]
    assert name("train.py", storage="../shared") == others[-2]
    taken = {"train", "train.2", "a.train", "a.b", "loop", "pkg.__main__"}
    assert len({*taken, *others}) == 20, "the same name would mix two trainings"
    assert name("train.py", "--lr", "1") == others[0]


def test_of_two_processes_that_train_one_run_the_older_one_saves_nothing(
    text: Path, tmp_path: Path
) -> None:
    run_dir, spec = RunDir(open_storage(str(tmp_path)), "run"), make_spec(text)
    contexts = []
    for launch in ("first", "second"):
        place = LocalPlace(0, 1, 0, 1, "here", launch)
        device, stopping = torch.device("cpu"), threading.Event()
        ctx, journal, watch, _ = begin_attempt(
            spec, run_dir, place, device, None, stopping, lambda line: None
        )
        contexts.append(ctx)
        watch.close()
        journal.close(10)
    assert [ctx.holds_lease(0) for ctx in contexts] == [False, True]
    contexts[0].on_replaced("submission 2 has taken over")
    assert [ctx.is_abandoned() for ctx in contexts] == [True, False]


def test_without_torchrun_it_says_how_to_start_it() -> None:
    with pytest.raises(UsageError, match=r"RANK, WORLD_SIZE.*torchrun --nproc-per-node"):
        place_from_env(
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        )
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    place = place_from_env(env)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)


def test_steps_that_only_this_node_holds_stay_until_a_checkpoint_has_them(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither Ctrl-C nor an error before the state is restored takes a published state along."""
    storage, spec = (
        open_storage(str(tmp_path / "runs")),
        make_spec(text, checkpoint={"every_steps": 1000}),
    )
    assert run_local(spec, storage.uri, "whole").code == 0
    whole, parts = RunDir(storage, "whole"), RunDir(storage, "parts")
    step_done = Reporter.step_done

    def labels() -> list[Label]:
        return node_snapshots(parts, os.uname().nodename, 1).labels()

    def interrupt_at_four(reporter: Reporter, *arguments: Any) -> float:
        if reporter._state.step == 4:
            wait_for(labels, 10, "a published state")
            raise KeyboardInterrupt
        return step_done(reporter, *arguments)

    def broken(task: LanguageModeling) -> Any:
        raise LookupError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "step_done", interrupt_at_four)
        with pytest.raises(KeyboardInterrupt):
            run_local(spec, storage.uri, "parts")
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModeling, "build_model", broken)
        with pytest.raises(LookupError):
            run_local(spec, storage.uri, "parts")
    [newest_left] = labels()[-1:]
    assert newest_left.step >= 1 and CheckpointStore(parts).list() == []
    assert run_local(spec, storage.uri, "parts").code == 0
    [_, restored] = [
        event.data
        for event in read_journal(parts, 1, None, 1000)[0]
        if event.kind is EventKind.RESTORED
    ]
    assert (restored["source"], restored["step"]) == ("snapshot", newest_left.step)
    assert equal(newest(whole), newest(parts))
    assert not (shared_memory_root() / "parts").exists()


def test_the_loop_without_ray_imports_no_ray() -> None:
    code = "import sys, train_fn.standalone.command; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_peer_that_died_before_it_could_be_watched_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then nobody would notice its death any more."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    aborted = threading.Event()
    monkeypatch.setattr(rank_module, "fails_by_itself", lambda: False)
    monkeypatch.setattr(rank_module, "abort_collectives", aborted.set)
    peers: Any = SimpleNamespace(
        rank=0, gather=lambda value: [value, (value[0], ended.pid), ("another host", ended.pid)]
    )
    watch = rank_module.PeerWatch(peers)
    assert aborted.wait(10)
    watch.close()
    aborted.clear()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as living:
        peers.gather = lambda value: [value, (value[0], living.pid)]
        watch = rank_module.PeerWatch(peers)
        assert not aborted.is_set()
        living.kill()
        assert aborted.wait(10)
        watch.close()
