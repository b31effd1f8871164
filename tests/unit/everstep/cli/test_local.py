"""Commands without a service: a spec tried out in this process, a task of one's own begun."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from everstep.cli.main import app
from everstep.supported import install_command
from tests.support.code_archives import TASK
from train_fn.user_code import modules as own_code

ROOT = Path(__file__).parents[4]


def run_cli(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )


@pytest.fixture
def spec_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(
        "name: small\n"
        "task: {name: image_classification, model: {name: mini_resnet, args: {width: 8}}, data: "
        "{name: digits}}\n"
        "train: {max_steps: 2, loader: {num_workers: 3}}\nscaling: {use_gpu: false, max_workers: "
        "4}\n"
    )
    threads = torch.get_num_threads()
    yield path
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def test_a_spec_trains_in_this_process(spec_file: Path, tmp_path: Path) -> None:
    result = run_cli("run", spec_file, "--local", "--set", "train.max_steps=3", "--run-id", "mine")
    assert result.exit_code == 0
    assert "step 3, epoch 0: val_loss" in result.stdout
    assert (
        f"done at step 3; checkpoints are in {tmp_path}/out/local/runs/mine/checkpoints"
        in result.stdout
    )
    again = run_cli("run", spec_file, "--local", "--set", "train.max_steps=4", "--run-id", "mine")
    assert again.exit_code == 2
    assert "holds a run of another spec (train.max_steps differ)" in again.stderr


def test_a_program_reads_how_it_ended(spec_file: Path) -> None:
    result = run_cli("run", spec_file, "--local", "--json", "--storage", "here")
    assert result.exit_code == 0
    ended = json.loads(result.stdout)
    assert ended["step"] == 2
    assert ended["metrics"].keys() == {"val_loss", "val_accuracy"}
    assert Path(ended["checkpoints"]).is_dir()
    assert "step 2, epoch 0" in result.stderr


def test_a_task_of_ones_own_runs_from_where_it_lies(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_code, "_on_disk", {})
    mine = tmp_path / "mine"
    (mine / "local_try").mkdir(parents=True)
    task = mine / "local_try" / "task.py"
    task.write_text(TASK)
    options = (
        "--local",
        "--code",
        mine,
        "--task",
        "local_try.task:Line",
        "--set",
        "train.max_steps=2",
    )
    result = run_cli("run", *options)
    assert (result.exit_code, "done at step" in result.stdout) == (0, True), result.output
    assert sys.modules["local_try.task"].__file__ == str(task), (
        "breakpoints hold in the user's own file"
    )
    assert (
        "give --code DIRECTORY, the code itself"
        in run_cli("run", code_spec(tmp_path, "task"), "--local").stderr
    )
    assert (
        "runs under Ray Train" in run_cli("run", code_spec(tmp_path, "train_fn"), "--local").stderr
    )


def code_spec(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / f"{kind}.yaml"
    path.write_text(
        f"name: own\ncode: {{archive: 'sha256:{'0' * 64}', {kind}: 'local_try.task:Line'}}\n"
    )
    return path


def test_what_the_users_code_raises_is_shown_whole(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, model: object, batch: object) -> None:
        raise OSError("the disk of the data set is away")

    monkeypatch.setattr("train_fn.tasks.builtin.ImageClassification.loss", broken)
    result = run_cli("run", spec_file, "--local")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "in broken" in result.stderr


def test_without_local_or_torch_the_way_out_is_said(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "everstep submit" in run_cli("run", spec_file).stderr
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    result = run_cli("run", spec_file, "--local")
    assert result.exit_code == 2
    assert f"needs torch, not installed in this Python; run: {install_command('server')}" in (
        result.stderr
    )


def test_init_task_says_what_it_wrote(tmp_path: Path) -> None:
    result = run_cli("init", "task", "my_task", "--in", tmp_path, "--json")
    assert result.exit_code == 0
    files = json.loads(result.stdout)["files"]
    assert (len(files), Path(files[0]).parent) == (7, tmp_path / "my_task")
    assert str(tmp_path / "my_task" / "spec.schema.json") in files
    refused = run_cli("init", "my-task", "--in", tmp_path)
    assert (refused.exit_code, "not empty" in refused.stderr) == (2, True)


@pytest.mark.parametrize("entry", ["--script", "--train-fn"])
def test_a_script_and_a_ray_train_function_run_as_they_are(entry: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import sys\ndef train(config): print('config', config)\n"
        "if __name__ == '__main__': print('argv', sys.argv[1:])\n"
    )
    name, words, said = {
        "--script": ("own.py", ["--", "--lr", "1"], "argv ['--lr', '1']"),
        "--train-fn": ("own:train", ["--set", "code.config.lr=1"], "config {'lr': 1}"),
    }[entry]
    command = [sys.executable, "-m", "everstep.cli.main", "run", "--local", "--code", str(tmp_path)]
    done = subprocess.run([*command, entry, name, *words], capture_output=True, text=True)
    assert (done.returncode, said in done.stdout) == (0, True), done.stderr
