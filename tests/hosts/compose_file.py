"""docker-compose.yml as a test starts it: every part with its command, user, environment, mounts
and health check."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}


@dataclass(frozen=True)
class HealthCheck:
    """When a part counts as healthy; times in seconds."""

    argv: tuple[str, ...]
    interval_s: float
    timeout_s: float


@dataclass(frozen=True)
class Part:
    """One service of the compose file."""

    name: str
    image: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    uid: int
    gid: int
    secrets: tuple[str, ...]
    volumes: Mapping[str, str]
    """Target by source: a volume's name, or a path below the repository that begins with ``./``."""
    tmpfs: tuple[str, ...]
    shm_size: str
    read_only: bool
    restart: str
    health: HealthCheck | None
    depends_on: Mapping[str, str]


def read_compose(variables: Mapping[str, str]) -> dict[str, Part]:
    """The parts by name, with ``${NAME:-default}`` filled in from ``variables``."""
    text = (REPOSITORY / "docker-compose.yml").read_text()
    compose = yaml.safe_load(
        _VARIABLE.sub(lambda found: variables.get(found[1]) or found[2] or "", text)
    )
    return {name: _part(name, raw) for name, raw in compose["services"].items()}


def image_environment() -> dict[str, str]:
    """What the image's Dockerfile sets for every process of it."""
    lines = re.sub(r"\\\n\s*", "", (REPOSITORY / "Dockerfile").read_text()).splitlines()
    words = [
        word
        for line in lines
        if line.startswith("ENV ")
        for word in shlex.split(line.removeprefix("ENV "))
    ]
    return dict(word.split("=", 1) for word in words) | {"HOME": "/home/everstep"}


def _part(name: str, raw: Mapping[str, Any]) -> Part:
    uid, _, gid = str(raw.get("user", "0:0")).partition(":")
    command = raw.get("command", [])
    health = raw.get("healthcheck")
    return Part(
        name=name,
        image=raw["image"],
        argv=tuple(shlex.split(command) if isinstance(command, str) else command),
        env={key: str(value) for key, value in (raw.get("environment") or {}).items()},
        uid=int(uid),
        gid=int(gid or uid),
        secrets=tuple(raw.get("secrets", ())),
        volumes=dict(volume.split(":")[:2] for volume in raw.get("volumes", ())),
        tmpfs=tuple(raw.get("tmpfs", ())),
        shm_size=str(raw.get("shm_size", "64m")).replace("gb", "g").replace("mb", "m"),
        read_only=bool(raw.get("read_only")),
        restart=raw.get("restart", "no"),
        health=HealthCheck(
            tuple(health["test"][1:]), _seconds(health["interval"]), _seconds(health["timeout"])
        )
        if health
        else None,
        depends_on={other: rule["condition"] for other, rule in raw.get("depends_on", {}).items()},
    )


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * _SECONDS[unit]


def is_possible() -> bool:
    """Whether this machine lets the test make network namespaces: root, and Linux."""
    return os.geteuid() == 0 and Path("/proc/self/ns/net").exists()
