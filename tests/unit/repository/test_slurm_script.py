"""deploy/slurm sets what docker-compose.yml sets."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "slurm" / "everstep.sbatch"
ELSEWHERE = re.compile(
    "AWS_.*|RAY_.*TLS.*|RAY_AUTH_TOKEN_PATH|EVERSTEP_SECRETS_DIR|RAY_gcs_storage.*"
)
"""Paths of secrets, TLS, and a volume of the head's, which a job does not have."""
OF_THE_HEAD = {
    "RAY_preload_python_modules",
    "RAY_worker_maximum_startup_concurrency",
    "RAY_num_workers_soft_limit",
}


def settings(part: str) -> dict[str, str]:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    found = compose["services"][part]["environment"].items()
    return {name: value for name, value in found if not ELSEWHERE.fullmatch(name)}


def test_ray_s_settings_are_those_of_the_compose_file() -> None:
    text = SCRIPT.read_text()
    exported = dict(re.findall(r"^export ([A-Za-z_]+)=([^\s$]+)", text, re.MULTILINE))
    wanted = settings("worker")
    assert {name: exported.get(name) for name in wanted} == wanted
    of_head = {name: value for name, value in settings("head").items() if name in OF_THE_HEAD}
    given = re.findall(r"(?m)(RAY_\w+)=(\S+)", text[text.index("# The head offers") :])
    assert {name: value for name, value in given if name in OF_THE_HEAD} == of_head


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
