"""Which requests to Ray's dashboard are passed on, and what they do there.

Ray's dashboard has no roles: whoever has its token may stop jobs, and some GET requests act, for
example by attaching a profiler to a process. So a request is passed on only if it is listed here.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final


class RayAccess(StrEnum):
    """What a GET request to Ray's dashboard does."""

    READ = "read"
    PROFILE = "profile"
    """It attaches a profiler to a process on a node, which slows that process down."""


_ID: Final = r"[A-Za-z0-9_-]{1,200}"
_READS: Final = (
    r"api/cluster_status",
    r"api/data/datasets/ID",
    r"api/gcs_healthz",
    r"api/grafana_health",
    r"api/jobs/",
    r"api/jobs/ID",
    r"api/jobs/ID/logs",
    r"api/profiling_enabled",
    r"api/prometheus_health",
    r"api/ray/version",
    r"api/serve/applications/",
    r"api/train/v2/runs",
    r"api/train/v2/runs/v1",
    r"api/v0/(actors|jobs|nodes|objects|placement_groups|runtime_envs|tasks|workers)",
    r"api/v0/(actors|objects|tasks)/summarize",
    r"api/v0/(cluster_events|cluster_metadata|platform_events|runtime_env_redaction)",
    r"api/v0/logs",
    r"api/v0/logs/(file|stream)",
    r"api/v0/tasks/timeline",
    r"api/version",
    r"events",
    r"logical/actors",
    r"logical/actors/ID",
    r"nodes",
    r"nodes/ID",
    r"timezone",
    r"usage_stats_enabled",
)
_PROFILES: Final = (
    r"memory_profile",
    r"task/(cpu_profile|traceback)",
    r"worker/(cpu_profile|gpu_profile|jax_profile|traceback)",
)
_TAIL: Final = re.compile(rf"api/jobs/{_ID}/logs/tail")


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(patterns).replace("ID", _ID))


_TABLE: Final = {RayAccess.READ: _any_of(_READS), RayAccess.PROFILE: _any_of(_PROFILES)}


def access_to(path: str) -> RayAccess | None:
    """Return what GET of this path does; None for a path that is not passed on.

    >>> access_to("api/jobs/raysubmit_1"), access_to("worker/traceback"), access_to("test/dump")
    (<RayAccess.READ: 'read'>, <RayAccess.PROFILE: 'profile'>, None)
    """
    return next((access for access, known in _TABLE.items() if known.fullmatch(path)), None)


def is_log_tail(path: str) -> bool:
    """Return whether this path is the WebSocket that follows a job's log. It only reads."""
    return _TAIL.fullmatch(path) is not None
