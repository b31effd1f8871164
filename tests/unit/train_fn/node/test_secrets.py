"""Secrets of ranks: read on the node, named when they are missing, and taken out of everything that
is kept."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.spec.parsing import parse_spec
from everstep.spec.run_spec import RunSpec
from everstep.wire import ErrorKind
from storage.filesystem import open_storage
from storage.run_dir import RunDir
from tests.support.api_service import spec as made_spec
from train_fn.errors import SecretMissing
from train_fn.journal.rank_log import RankLog
from train_fn.node.secrets import MASK, MAX_BYTES, Redactor, read_secrets
from train_fn.recovery.evidence import describe_error


def spec(**fields: Any) -> RunSpec:
    return parse_spec(made_spec(project="vision", secrets={"HUB_TOKEN": "hub"}, **fields))


def test_a_project_s_own_secret_comes_before_everybody_s(tmp_path: Path) -> None:
    environ = {"EVERSTEP_SECRETS_DIR": str(tmp_path)}
    (tmp_path / "hub").write_text("for-all\n")
    assert read_secrets(spec(), environ) == {"HUB_TOKEN": "for-all"}
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "hub").write_text("theirs only")
    assert read_secrets(spec(), environ) == {"HUB_TOKEN": "theirs only"}


@pytest.mark.parametrize(
    "content", [None, b"", b"\n", b"\xff\xfe", b"a\0b", b"x" * (MAX_BYTES + 1)]
)
def test_a_secret_that_cannot_be_had_is_named_without_a_value(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "hub").write_bytes(content)
    with pytest.raises(SecretMissing, match=r"secret 'hub' .*EVERSTEP_SECRETS_DIR") as raised:
        read_secrets(spec(), {"EVERSTEP_SECRETS_DIR": str(tmp_path)})
    assert str(tmp_path) in str(raised.value) and "xxx" not in str(raised.value)
    assert describe_error(raised.value, 0).kind is ErrorKind.USER


def test_a_directory_of_this_name_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    with pytest.raises(SecretMissing, match="cannot be read"):
        read_secrets(spec(), {"EVERSTEP_SECRETS_DIR": str(tmp_path)})


def test_values_are_taken_out_of_texts_and_errors() -> None:
    redact = Redactor()
    assert redact("hunter2-secret") == "hunter2-secret"
    redact.learn(
        ["hunter2-secret", "hunter2-secret-longer", "42", "-----BEGIN\nline-of-key\n-----END"]
    )
    assert redact("a hunter2-secret-longer b hunter2-secret c 42") == f"a {MASK} b {MASK} c 42"
    assert redact("line-of-key") == MASK, "logs are kept line by line"
    try:
        raise ValueError("bad token hunter2-secret")
    except ValueError as exc:
        error = redact.error(describe_error(exc, 1))
    assert "hunter2" not in error.message + error.traceback and MASK in error.summary


def test_no_line_of_a_log_holds_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_a")
    log = RankLog(run_dir, 1, 1, 0)
    redactor = log.redact = Redactor()
    redactor.learn(["hunter2-secret"])
    log.start()
    print("my token is hunter2-secret")
    sys.stderr.write("again hunter2-secret\n")
    logging.getLogger("task").info("logged hunter2-secret")
    log.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
    assert kept.count(MASK.encode()) == 3 and b"hunter2" not in kept
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err and f"my token is {MASK}" in shown.out
