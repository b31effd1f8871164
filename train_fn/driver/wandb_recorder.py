"""The process beside the driver that records the run at Weights & Biases."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping

from everstep.spec.run_spec import WANDB_KEY, RunSpec
from storage.run_dir import RunDir
from train_fn.errors import SecretMissing
from train_fn.node.secrets import read_secrets

logger = logging.getLogger(__name__)


class WandbRecorder:
    """Starts the process, and ends it with the driver."""

    def __init__(
        self, run_dir: RunDir, submission: int, spec: RunSpec, environ: Mapping[str, str]
    ) -> None:
        self._arguments = [run_dir.storage.uri, run_dir.run_id, str(submission)]
        self._environ = recorder_environment(spec, environ)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "train_fn.journal.wandb_process", *self._arguments]
        self._process = subprocess.Popen(command, env=self._environ, stdin=subprocess.PIPE)

    def close(self, timeout_s: float) -> None:
        """Let it record the remaining events, but end it after ``timeout_s`` seconds."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("wandb: not complete after %g s; `wandb sync` sends the rest", timeout_s)
            process.kill()
            process.wait()


def recorder_environment(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the process: the driver's, the run's variables for W&B, and the
    key. Without the key's file on this node it records offline."""
    found = {name: value for name, value in environ.items() if not name.startswith("WANDB_")}
    found |= {name: value for name, value in spec.env.items() if name.startswith("WANDB_")}
    if WANDB_KEY in spec.secrets:
        alone = spec.model_copy(update={"secrets": {WANDB_KEY: spec.secrets[WANDB_KEY]}})
        try:
            found |= read_secrets(alone, environ)
        except SecretMissing as exc:
            logger.warning("wandb: no key on the driver's node: %s", exc)
    return found
