"""Install a run's packages (``runtime_env.pip``) once per node, for this attempt and later ones.

Ray's own runtime_env would need a new process for every rank, so that every recovery would take
seconds longer. Instead, pip lists what the node lacks, and installs it into a directory for these
requirements. That directory comes last on the path, so that no package of the ranks is replaced.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train_fn.context import WorkerContext
from train_fn.errors import BadTask
from train_fn.node.node_dir import cache_root, once_a_node

INSTALL_S = 900.0
"""Longest wait for one call of pip."""
_LINES_SHOWN = 5

logger = logging.getLogger(__name__)


def bring_packages(ctx: WorkerContext) -> None:
    """Make the packages of a rank's spec importable, where it has such, and wait until all ranks
    have them: a node that installs takes longer than a collective would wait. Raises BadTask."""
    if ctx.spec.runtime_env is None:
        return
    add_packages(ctx.spec.runtime_env.pip)
    if ctx.world_size > 1:
        store = dist.distributed_c10d._get_default_store()
        store.set(_ready_key(ctx, ctx.world_rank), "")
        store.wait(
            [_ready_key(ctx, rank) for rank in range(ctx.world_size)],
            timedelta(seconds=2 * INSTALL_S),
        )


def _ready_key(ctx: WorkerContext, rank: int) -> str:
    return f"everstep/packages/{ctx.submission}/{ctx.attempt}/{rank}"


def add_packages(requirements: Sequence[str]) -> None:
    """Make the packages importable in this process. Raises BadTask where pip cannot, or would
    replace what ranks run with."""
    directory = packages_dir(requirements)
    once_a_node(directory, partial(_install, requirements))
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
    importlib.invalidate_caches()


def packages_dir(requirements: Sequence[str]) -> Path:
    """Where this node keeps what such requirements brought, for the Python that asks: another one
    has a directory of its own."""
    asked = json.dumps([sys.version, sys.prefix, sorted(requirements)])
    return cache_root() / "packages" / hashlib.sha256(asked.encode()).hexdigest()


def _install(requirements: Sequence[str], directory: Path) -> None:
    lacking = _lacking(requirements)
    if lacking:
        logger.info("installing %s", ", ".join(lacking))
        _pip("install", "--no-deps", "--target", str(directory), *lacking)


def _lacking(requirements: Sequence[str]) -> list[str]:
    """Return what pip would install, each with its version. Raises BadTask if it would replace a
    package."""
    report: dict[str, Any] = json.loads(
        _pip("install", "--dry-run", "--report", "-", *requirements)
    )
    chosen = {
        entry["metadata"]["name"]: entry["metadata"]["version"] for entry in report["install"]
    }
    for name, version in chosen.items():
        present = _version_of(name)
        if present is not None:
            raise BadTask(
                f"runtime_env.pip asks for {name} {version}, and this node's ranks run with "
                f"{name} {present}; allow {present} in "
                f"runtime_env.pip, or have {version} installed on the nodes"
            )
    return [f"{name}=={version}" for name, version in chosen.items()]


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip(*arguments: str) -> str:
    """Run pip, and return its standard output. Raises BadTask with the end of its error output."""
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(
            [*pip, "--quiet", *arguments],
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise BadTask(
            f"runtime_env.pip: pip took longer than {INSTALL_S:g} s on this node; is its package "
            "index in reach?"
        ) from exc
    if done.returncode:
        output = "; ".join(done.stderr.strip().splitlines()[-_LINES_SHOWN:])
        raise BadTask(f"runtime_env.pip: pip failed on this node: {output}")
    return done.stdout
