"""Secrets of ranks: read on the node, named when they are missing, and taken out of everything that
is kept."""

from __future__ import annotations

import base64
import html
import json
import logging
import shlex
import sys
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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


WRITTEN: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "repr": repr,
    "ascii": ascii,
    "repr of bytes": lambda value: repr(value.encode()),
    "unicode_escape": lambda value: value.encode("unicode_escape").decode(),
    "JSON": json.dumps,
    "JSON in UTF-8": lambda value: json.dumps(value, ensure_ascii=False),
    "URL": urllib.parse.quote,
    "query": urllib.parse.quote_plus,
    "shell": shlex.quote,
    "HTML": html.escape,
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "authorization": lambda value: base64.b64encode(f"user:{value}".encode()).decode(),
    "JSON in JSON": lambda value: json.dumps(json.dumps(value)),
    "repr in a URL": lambda value: urllib.parse.quote(repr(value)),
    "in colours": "\033[0m\033[1m".join,
}


def one_line(value: str) -> bool:
    return value.splitlines() == [value] and len(value.strip()) >= 6


@pytest.mark.parametrize("how", WRITTEN)
@given(
    value=st.text(
        st.characters(codec="utf-8", exclude_characters="\0\x1b"), min_size=6, max_size=40
    ).filter(one_line)
)
@example(value="a\\\\\"'%5c é$(x)\t&lt;😀")
def test_a_value_is_taken_out_however_a_program_writes_it(how: str, value: str) -> None:
    redact = Redactor()
    redact.learn([value])
    assert MASK in redact(f"token={WRITTEN[how](value)} end")


@pytest.mark.parametrize("piece", ["\\", "%5c", "%25", "x", "\\x"])
def test_looking_for_a_value_takes_time_in_proportion_to_the_text(piece: str) -> None:
    redact = Redactor()
    redact.learn(["\\" * 6 + "abc\\'%\"é" * 2])
    began = time.process_time()
    assert redact(piece * 60_000) == piece * 60_000
    assert time.process_time() - began < 10, "a minute and more if it grew with the square"


def test_no_line_of_a_log_holds_a_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir(open_storage(str(tmp_path)), "run_a")
    log = RankLog(run_dir, 1, 1, 0)
    redactor = log.redact = Redactor()
    awkward = "hunter2\"'\\é s"
    redactor.learn(["hunter2-secret", awkward])
    log.start()
    print({"token": awkward}, json.dumps(awkward), urllib.parse.quote(awkward))
    print("my token is hunter2-secret")
    sys.stderr.write("again hunter2-secret\n")
    logging.getLogger("task").info("logged hunter2-secret")
    log.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl"))
    assert kept.count(MASK.encode()) == 6 and b"hunter2" not in kept
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err and f"my token is {MASK}" in shown.out
