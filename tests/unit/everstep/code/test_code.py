"""Uploading from a directory: what goes along, the same bytes for the same files, and the command
line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep import Client, InvalidSpec, UsageError
from everstep.code import git_state, pack
from storage.code import CodeStore
from tests.support.api_service import ApiService
from tests.support.code_archives import TASK, zip_of
from tests.support.command_line import everstep


def write(root: Path, *names: str, **contents: str) -> Path:
    for name, text in {**dict.fromkeys(names, ""), **contents}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def packed(path: Path) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(pack(path))) as tar:
        return tar.getnames()


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "first", "a.py", "mine/b.py", "mine/__init__.py")
    second = write(tmp_path / "second", "mine/__init__.py", "mine/b.py", "a.py")
    os.utime(second / "a.py", (1, 1))
    (second / "a.py").chmod(0o600)
    assert pack(first) == pack(second)
    (second / "a.py").write_text("x = 1")
    assert pack(first) != pack(second)


def test_ignore_files_are_honoured_as_git_does(tmp_path: Path) -> None:
    root = write(
        tmp_path / "repo" / "project",
        *(
            "a.py",
            "big.bin",
            "data/x.csv",
            "data/keep.csv",
            "mine/b.py",
            "mine/notes.txt",
            "mine/c.log",
            "weights/w.pt",
            "build/d.py",
        ),
        **{
            ".gitignore": "*.bin\n/data/*\n!data/keep.csv\nbuild/\n",
            "mine/.gitignore": "*.txt\n",
            ".everstepignore": "weights/\n!big.bin\n",
            "../.gitignore": "*.log\n",
        },
    )
    write(root, ".venv/pyvenv.cfg", ".venv/lib/x.py", "__pycache__/a.pyc", "mine/e.pyc")
    (tmp_path / "repo" / ".git").mkdir()
    names = set(packed(root))
    assert names == {
        "a.py",
        "big.bin",
        "data/keep.csv",
        "mine/b.py",
        ".gitignore",
        ".everstepignore",
        "mine/.gitignore",
    }
    subprocess.run(["git", "init", "-q", tmp_path / "repo"], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "."],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    by_git = {
        name
        for name in listed
        if not name.startswith((".venv", "weights", "__pycache__")) and not name.endswith(".pyc")
    }
    assert names - {"big.bin"} == by_git


def test_a_vendored_package_is_packed_whole_whatever_its_gitignore_says(tmp_path: Path) -> None:
    """The wheel of hydra has a .gitignore with ``*`` beside the parser that it generates."""
    root = write(
        tmp_path / "project",
        *("train.py", "hydra/__init__.py", "hydra/grammar/gen/Parser.py", "hydra/weights.bin"),
        *("made/__init__.py", "made/by_protoc.py", "mine/__init__.py", "mine/notes.txt"),
        **{
            "hydra_core-1.3.dist-info/RECORD": (
                "hydra/__init__.py,,\nhydra/grammar/gen/Parser.py,sha256=x,9\n../../bin/x,,\n"
            ),
            "hydra/grammar/gen/.gitignore": "*\n!.gitignore\n",
            "hydra/.everstepignore": "*.bin\n",
            "made/.gitignore": "*\n",
            "mine/.gitignore": "*.txt\n",
        },
    )
    names = set(packed(root))
    assert {"hydra/grammar/gen/Parser.py", "made/by_protoc.py", "mine/__init__.py"} <= names
    assert not {"hydra/weights.bin", "mine/notes.txt"} & names


def test_links_are_followed_within_the_directory_only(tmp_path: Path) -> None:
    root = write(tmp_path / "project", "a.py", **{"mine/b.py": "x = 1"})
    (root / "c.py").symlink_to("mine/b.py")
    assert packed(root) == ["a.py", "c.py", "mine/b.py"]
    for target in ("/etc/passwd", "mine", "nowhere"):
        (root / "link").symlink_to(target)
        with pytest.raises(UsageError, match=r"link is a link .* \.everstepignore"):
            pack(root)
        (root / "link").unlink()
    (root / "link").symlink_to("/etc/passwd")
    (root / ".everstepignore").write_text("link\n")
    assert "link" not in packed(root)


def test_what_cannot_be_uploaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        pack(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no Python module"):
        pack(write(tmp_path / "texts", "a.txt"))
    with pytest.raises(UsageError, match="'train_fn' is reserved for Everstep itself"):
        pack(write(tmp_path / "taken", "train_fn.py"))
    monkeypatch.setattr("everstep.code.MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(
        UsageError, match=r"List data in \.everstepignore; the largest files are data\.bin"
    ):
        pack(write(tmp_path / "large", "a.py", **{"data.bin": "x" * 2000}))


def test_what_is_too_much_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path, "a.py", "data/1.txt", "data/2.txt", "notes/1.txt")
    (root / "data" / "0.bin").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr("everstep.code.MAX_ARCHIVE_BYTES", 1 << 20)
    with pytest.raises(UsageError, match=r"the largest files are data/0\.bin \(3\.0 MiB\)"):
        pack(root)
    monkeypatch.setattr("everstep.code.MAX_FILES", 4)
    with pytest.raises(UsageError, match=r"5 files.* the most files are data \(3\), "):
        pack(root)


def test_secrets_stay_here_unless_they_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ("task.py", "pkg/env.py", "ca.pem", ".env.example", "id_rsa.pub", "keys.py")
    secret = (".env", "pkg/.netrc", "pkg/host.pem", "pkg/id_rsa", ".ENV.local", "prod.env")
    secret += ("tls.KEY", "id_dsa", "pkg/credentials-gcp.json", "store.p12", "a.pfx")
    root = write(tmp_path, *kept, *secret, ".aws/config", **{".everstepignore": "!ca.pem\n"})
    assert packed(root) == sorted([".everstepignore", *kept])
    for name in (".aws", *secret, "!NAME"):
        assert name in caplog.text
    (root / ".gitignore").write_text("tls.KEY\n")
    caplog.clear()
    pack(root)
    assert "tls.KEY" not in caplog.text, "its owner leaves it out"


def git(root: Path, *commands: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in commands:
        subprocess.run(["git", *who, *command.split()], cwd=root, check=True)


def state_of(path: Path) -> str | None:
    return git_state(path, pack(path))


def test_code_says_which_commit_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path / "project", "task.py", "other/notes.py")
    assert state_of(root) is None
    git(root, "init -q -b tune")
    assert state_of(root) is None
    git(root, "add .", "commit -qm first")
    clean = state_of(root)
    assert clean is not None and re.fullmatch("[0-9a-f]{12} on tune", clean)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of-another-repository"))
    assert state_of(root) == clean
    monkeypatch.delenv("GIT_DIR")
    (root / "other" / "notes.py").write_text("more")
    assert state_of(root) == state_of(root / "other") == f"{clean}, with changes"
    assert state_of(root / "task.py") == clean, "it has not changed"
    (root / "other" / "code.zip").write_bytes(zip_of({"task.py": TASK}))
    assert state_of(root / "other" / "code.zip") is None, "nothing says what it was made from"
    git(root, "commit -qam second", "checkout -q --detach")
    (root / "other" / "code.zip").unlink()
    assert re.fullmatch("[0-9a-f]{12}", state_of(root) or "")
    with (root / ".git" / "HEAD").open("wb") as head:
        head.write(b"ref: refs/heads/f\xe9\n")
    (root / ".git" / "refs" / "heads" / "tune").rename(
        os.fsdecode(bytes(root) + b"/.git/refs/heads/f\xe9")
    )
    assert (state_of(root) or "").endswith(" on f\N{REPLACEMENT CHARACTER}")


def test_code_that_is_in_no_commit_has_changes(tmp_path: Path) -> None:
    root = write(
        tmp_path, "task.py", **{".gitignore": "scratch/\n", ".everstepignore": "!taken.py\n"}
    )
    git(root, "init -q -b tune", "add .", "commit -qm first", "config status.showUntrackedFiles no")
    clean = state_of(root)
    write(root, "scratch/train.py", "new.py")
    assert state_of(root) == state_of(root / "scratch" / "train.py") == f"{clean}, with changes"
    (root / "new.py").unlink()
    assert state_of(root) == clean, "what git ignores is not packed"
    (root / "link.py").symlink_to("scratch/train.py")
    git(root, "add link.py", "commit -qm second")
    for path in (root, root / "link.py"):
        assert (state_of(path) or "").endswith(" on tune, with changes"), "of what it leads to"


def test_git_runs_no_command_that_a_folder_names(tmp_path: Path) -> None:
    root = write(tmp_path / "project", **{"task.py": TASK})
    git(root, "init -q -b tune", "add .", "commit -qm first")
    hook = tmp_path / "hooks" / "post-index-change"
    write(tmp_path, **{"hooks/post-index-change": f"#!/bin/sh\ntouch {tmp_path}/ran\n"})
    hook.chmod(0o755)
    index = (root / ".git" / "index").read_bytes()
    git(root, f"config core.hooksPath {hook.parent}", f"config core.fsmonitor {hook}")
    os.utime(root / "task.py", (1, 1))  # git status would write its index anew
    assert state_of(root) is not None
    assert not (tmp_path / "ran").exists()
    assert (root / ".git" / "index").read_bytes() == index


def test_one_file_and_an_archive_are_taken_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, **{"task.py": TASK})
    assert packed(tmp_path / "task.py") == ["task.py"]
    archive = tmp_path / "code.zip"
    archive.write_bytes(zip_of({"task.py": TASK}))
    assert pack(archive) == archive.read_bytes()


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path / "service") as service:
        service.announce(monkeypatch)
        yield service


async def test_uploaded_and_submitted_by_hand(api: ApiService, tmp_path: Path) -> None:
    import asyncio

    root = write(tmp_path / "project", **{"task.py": TASK})

    def by_sdk() -> str:
        with Client() as client:
            archive = client.code.upload(root)
            assert client.code.upload(str(root)) == archive and archive.modules == ("task",)
            with pytest.raises(InvalidSpec, match="broken"):
                client.code.upload_packed(b"\x1f\x8bnot one")
            run = client.runs.create(
                {"name": "mine", "code": {"archive": archive.digest, "task": "task:Line"}}
            )
            return run.id

    run_id = await asyncio.to_thread(by_sdk)
    digest = (await api.get(f"/v1/runs/{run_id}/spec"))["code"]["archive"]
    result = await everstep(
        "submit",
        "--code",
        root,
        "--task",
        "task:Line",
        "--set",
        "train.epochs=3",
        "--set",
        "code.args.length=9",
    )
    assert result.exit_code == 0, result.stderr
    spec = await api.get(f"/v1/runs/{result.stdout.strip()}/spec")
    assert (spec["name"], spec["train"]["epochs"]) == ("Line", 3)
    assert spec["code"] | {"args": {}} == {
        "archive": digest,
        "task": "task:Line",
        "train_fn": None,
        "script": None,
        "args": {},
        "argv": [],
        "config": {},
        "datasets": None,
    }
    assert spec["code"]["args"] == {"length": 9}
    assert CodeStore(api.storage).read(digest)


async def test_a_spec_of_ones_own_code_and_its_faults(api: ApiService, tmp_path: Path) -> None:
    root = write(tmp_path / "project", **{"train.py": "def train_fn(config):\n    pass\n"})
    file = tmp_path / "spec.yaml"
    file.write_text("name: mine\ncode: {train_fn: 'train:train_fn', config: {epochs: 3}}\n")
    result = await everstep("submit", file, "--code", root)
    assert result.exit_code == 0, result.stderr
    spec = await api.get(f"/v1/runs/{result.stdout.split()[-1]}/spec")
    assert spec["code"]["config"] == {"epochs": 3}
    other = tmp_path / "other.yaml"
    other.write_text("name: mine\ncode: train.py\n")
    arguments = ("--set", "tags.a=b", "--", "--set", "x", "-v")
    result = await everstep("submit", "--code", root, "--script", "train.py", *arguments)
    assert result.exit_code == 0, result.stderr
    spec = await api.get(f"/v1/runs/{result.stdout.split()[-1]}/spec")
    assert (spec["name"], spec["tags"]) == ("train", {"a": "b"})
    assert (spec["code"]["script"], spec["code"]["argv"]) == ("train.py", ["--set", "x", "-v"])
    for arguments, words in (
        (("--code", root, "--train-fn", "train:nothing"), "train.py has no function 'nothing'"),
        (("--code", root), "set exactly one of task, script and train_fn"),
        (("--code", root, "--script", "tain.py"), "did you mean train.py?"),
        (("--code", root, "--task", "a:B", "--", "--lr"), "add --script FILE.py"),
        (("--task", "a:B"), "add --code DIRECTORY"),
        ((), "give a SPEC.yaml"),
        ((other, "--code", root), "code: 'train.py' is not a mapping; write for example"),
    ):
        result = await everstep("submit", *arguments)
        assert result.exit_code == 2 and words in result.stderr.replace("\n", " "), result.stderr


async def test_the_tag_of_the_commit_takes_no_place_of_the_users(
    api: ApiService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "project", **{"train.py": "def train_fn(config):\n    pass\n"})
    git(root, "init -q -b tune", "add .", "commit -qm first")
    spec = {"name": "mine", "code": {"train_fn": "train:train_fn"}}
    for number, given in ((1, {}), (64, {f"t{number}": "x" for number in range(64)})):
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps(spec | {"tags": given}))
        result = await everstep("submit", file, "--code", root)
        assert result.exit_code == 0, result.stderr
        tags = (await api.get(f"/v1/runs/{result.stdout.split()[-1]}/spec"))["tags"]
        assert len(tags) == number and tags.pop("git", "with room alone") and tags == given
    monkeypatch.chdir(tmp_path)
    file.write_text(json.dumps(spec | {"tags": ["a"]}))
    result = await everstep(
        "sweep", file, "--code", root, "--metric", "a", "--grid", "code.config.lr=1,2"
    )
    assert result.exit_code == 2 and "tags: " in result.stderr, result.stderr
