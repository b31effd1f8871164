"""What the guides to one's own code tell a reader to type, against a real service."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service_process import ServiceProcess, wait_for

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "docs" / f"{page}.md" for page in ("bring-your-own", "own-loop", "unchanged")]
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with ServiceProcess(nodes=2, args=("--drills",)) as running:
        yield running


def command_with(words: str) -> list[str]:
    """The guides' one command that holds these words, lines joined, as this interpreter runs it."""
    text = re.sub(r" \\\n\s+", " ", "\n".join(guide.read_text() for guide in GUIDES))
    found = [
        line.strip()
        for line in text.splitlines()
        if line.startswith("    .venv/bin/") and words in line
    ]
    assert len(found) == 1, found
    arguments = shlex.split(found[0])
    program = {
        ".venv/bin/python": [sys.executable],
        ".venv/bin/everstep": [sys.executable, "-m", "everstep.cli.main"],
    }
    return [*program[arguments[0]], *arguments[1:]]


def typed(
    service: ServiceProcess, words: str, *more: str, run_id: str = "", exit_code: int = 0
) -> str:
    """Standard output of a command of the guides, with ``more`` at its end."""
    arguments = [argument.replace("RUN_ID", run_id) for argument in command_with(words)]
    env = {
        **os.environ,
        "EVERSTEP_URL": service.url,
        "EVERSTEP_TOKEN": service.token,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*arguments, *more],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == exit_code, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_from_a_script_to_a_recovered_run(service: ServiceProcess, tmp_path: Path) -> None:
    assert "accuracy 0." in typed(service, "digits_script.py")
    assert "done at step 10" in typed(service, "run --local", "--storage", str(tmp_path))
    run_id = typed(service, "--task task:DigitsTask --set train.epochs").strip()
    run = service.client().runs.get(run_id)
    wait_for(lambda: run.refresh().run.step > 100, PATIENCE_S, "step 100")
    assert run.guarantee is not None and "used exactly once" in run.guarantee
    drilled = typed(service, "kill_worker", run_id=run_id)
    assert re.search(r"cost\s+0 steps lost", drilled), drilled
    assert "worker_lost" in typed(service, "everstep why", run_id=run_id)
    run.cancel()
    assert "CANCELLED" in typed(service, "everstep watch", run_id=run_id, exit_code=1)


@pytest.mark.parametrize("example", ["examples/own_train_fn ", "examples/own_train_fn_fsdp"])
def test_a_ray_train_function_as_it_is(service: ServiceProcess, example: str) -> None:
    shown = typed(service, f"submit --code {example}", "--set", "code.config.epochs=4", "--json")
    assert '"SUCCEEDED"' in shown and '"step":4' in shown.replace(" ", "")
