"""The service's own log: what others choose, such as a path, does not steer the operator's
terminal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, structlog
from service.process.logs import configure_logging
configure_logging(sys.argv[1])
evil = "/v1/\\x1b[2J\\x9b1A\\u202e"
structlog.get_logger("x").info("a call was not let in", path=evil)
logging.getLogger("x").warning("a library says %s", evil)
try:
    raise ValueError(evil)
except ValueError:
    structlog.get_logger("x").exception("it failed")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_others_choose_does_not_steer_the_terminal(form: str) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, form], env=env, capture_output=True, check=True, timeout=60
    )
    said = ended.stderr.decode()
    assert "not let in" in said and "a library says /v1/" in said and "ValueError: /v1/" in said
    assert not set(said) & {"\x1b", "\x9b", "\u202e"}
