"""What the embedded cluster's processes inherit from the operator's shell, and what they must not."""

from __future__ import annotations

import sys
from pathlib import Path

from service.embedded.environment import cluster_environment


def environment(inherited: dict[str, str], cpus_per_node: int = 1) -> dict[str, str]:
    return cluster_environment(inherited, temp_dir="/tmp/es-x", token_path=Path("/home/ray_token"), cpus_per_node=cpus_per_node)


def test_nothing_leads_to_another_cluster_or_another_token() -> None:
    made = environment({"RAY_ADDRESS": "auto", "RAY_AUTH_TOKEN": "theirs", "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": "/elsewhere"})
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR"} & made.keys()
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["RAY_AUTH_TOKEN_PATH"] == "/home/ray_token"


def test_the_operators_timers_stay() -> None:
    assert environment({"RAY_health_check_period_ms": "5000"})["RAY_health_check_period_ms"] == "5000"
    assert environment({})["RAY_health_check_period_ms"] == "500"


def test_ray_s_dashboard_tracks_trainings_and_shows_the_operators_grafana() -> None:
    theirs = {"RAY_GRAFANA_HOST": "http://grafana:3000", "RAY_PROMETHEUS_HOST": "http://prometheus:9090"}
    made = environment(theirs)
    assert made["RAY_TRAIN_ENABLE_STATE_TRACKING"] == "1" and theirs.items() <= made.items()


def test_python_is_this_one() -> None:
    assert environment({"PATH": "/usr/bin"})["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert environment({})["PATH"] == str(Path(sys.executable).parent)


def test_one_cpu_means_one_thread_unless_the_operator_says_otherwise() -> None:
    assert environment({})["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in environment({}, cpus_per_node=4)
