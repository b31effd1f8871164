"""What the embedded cluster's processes inherit from the operator's shell, and what they must
not."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.options.model import SettingsError
from everstep.options.serve import FLAGS, as_variables
from service.embedded.environment import cluster_environment
from service.settings import Settings

SECRETS = {
    "EVERSTEP_DATABASE": "postgresql+psycopg://everstep:secret@db/everstep",
    "EVERSTEP_DATABASE_FILE": "/run/secrets/database_url",
    "EVERSTEP_NOTIFY_SECRET": "secret",
    "EVERSTEP_TOKEN": "secret",
    "EVERSTEP_METRICS_TOKEN_FILE": "/run/secrets/metrics",
    "EVERSTEP_TLS_KEY": "/run/secrets/key",
    "PGPASSWORD": "secret",
    "AWS_ACCESS_KEY_ID": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SHARED_CREDENTIALS_FILE": "/home/me/.aws/credentials",
    "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
    "AZURE_CLIENT_SECRET": "secret",
    "GITHUB_TOKEN": "secret",
    "GIT_ASKPASS": "/home/me/askpass",
    "SSH_AUTH_SOCK": "/tmp/ssh-x/agent",
    "KUBECONFIG": "/home/me/.kube/config",
    "HF_TOKEN": "secret",
    "WANDB_API_KEY": "secret",
    "MLFLOW_TRACKING_TOKEN": "secret",
    "PIP_INDEX_URL": "https://me:secret@index.example.org/simple",
    "RAY_REDIS_PASSWORD": "secret",
    "RAY_AUTH_TOKEN": "secret",
}
NEEDED = {
    "HOME": "/home/me",
    "LANG": "C.UTF-8",
    "LC_TIME": "C",
    "TZ": "UTC",
    "PYTHONPATH": "/srv/code",
    "OMP_PROC_BIND": "true",
    "MKL_NUM_THREADS": "2",
    "TORCH_LOGS": "recompiles",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "0",
    "LD_LIBRARY_PATH": "/opt/lib",
    "https_proxy": "http://proxy:3128",
    "SSL_CERT_FILE": "/etc/ssl/own.pem",
    "RAY_health_check_period_ms": "5000",
    "EVERSTEP_HOME": "/srv/everstep",
    "EVERSTEP_SECRETS_DIR": "/srv/secrets",
    "EVERSTEP_RECOVERY_POLL_S": "0.2",
}


def environment(
    inherited: dict[str, str], cpus_per_node: int = 1, patterns: tuple[str, ...] = ()
) -> dict[str, str]:
    return cluster_environment(
        inherited,
        temp_dir="/tmp/es-x",
        token_path=Path("/home/ray_token"),
        cpus_per_node=cpus_per_node,
        patterns=patterns,
    )


def test_the_services_secrets_stay_out_and_what_ranks_need_comes_along() -> None:
    made = environment({**SECRETS, **NEEDED, "A_SECRET_THAT_NOBODY_THOUGHT_OF": "secret"})
    assert made.keys() & {*SECRETS, "A_SECRET_THAT_NOBODY_THOUGHT_OF"} == set()
    assert NEEDED.items() <= made.items()


def test_the_operator_names_what_goes_along() -> None:
    made = environment(
        {**SECRETS, "HF_TOKENIZERS": "1"}, patterns=("HF_*", "WANDB_API_KEY", "RAY_AUTH_TOKEN")
    )
    assert made.keys() & {*SECRETS, "HF_TOKENIZERS"} == {
        "HF_TOKEN",
        "HF_TOKENIZERS",
        "WANDB_API_KEY",
    }
    read = Settings.read({"EVERSTEP_CLUSTER_ENV": "HF_*, WANDB_API_KEY,"})
    assert read.cluster_env == ("HF_*", "WANDB_API_KEY")
    for wrong in ("*", "A=b", "", "A*B"):
        with pytest.raises(SettingsError, match="is not the name of a variable"):
            Settings(home=Path("/srv/es"), cluster_env=(wrong,))


def test_no_pattern_hands_the_services_own_secrets_to_ranks() -> None:
    """``everstep serve`` turns its flags into variables. Runs must not read ``--database`` by
    that."""
    given = {
        **as_variables({"database_url": "postgresql+psycopg://everstep:secret@db/everstep"}),
        "EVERSTEP_NOTIFY_SECRET": "secret",
        "EVERSTEP_METRICS_TOKEN_FILE": "/run/secrets/metrics",
    }
    assert not environment(given, patterns=("EVERSTEP_*", *given)).keys() & given.keys()
    assert "EVERSTEP_OTHER" in environment({"EVERSTEP_OTHER": "1"}, patterns=("EVERSTEP_*",))


def test_flags_that_became_variables_are_not_inherited() -> None:
    given = as_variables({name: "1" for name in FLAGS})
    assert len(given) == len(FLAGS) and not environment(given).keys() & given.keys()


def test_other_settings_bring_what_they_need() -> None:
    def passed(**fields: object) -> set[str]:
        settings = Settings(home=Path("/srv/es"), **fields)  # type: ignore[arg-type]
        return environment(SECRETS, patterns=settings.cluster_variables).keys() & SECRETS.keys()

    assert passed() == set()
    assert passed(storage_uri="s3://bucket/runs") == {
        name for name in SECRETS if name.startswith("AWS_")
    }
    assert passed(storage_roots=("/data", "gs://bucket")) == {"GOOGLE_APPLICATION_CREDENTIALS"}
    assert passed(allow_pip="einops") == {"PIP_INDEX_URL"}
    tracked = environment({**SECRETS, "EVERSTEP_MLFLOW_TRACKING_URI": "http://mlflow:5000"})
    assert (
        tracked["MLFLOW_TRACKING_TOKEN"] == "secret"
        and tracked["EVERSTEP_MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    )


def test_nothing_leads_to_another_cluster_or_another_token() -> None:
    made = environment(
        {
            "RAY_ADDRESS": "auto",
            "RAY_AUTH_TOKEN": "theirs",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": "/elsewhere",
        }
    )
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR"} & made.keys()
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["RAY_AUTH_TOKEN_PATH"] == "/home/ray_token"


def test_all_ranks_list_sets_in_one_order_which_the_operator_may_choose() -> None:
    assert environment({})["PYTHONHASHSEED"] == "0"
    assert environment({"PYTHONHASHSEED": "12"})["PYTHONHASHSEED"] == "12"


def test_one_cpu_means_one_thread_unless_the_operator_says_otherwise() -> None:
    assert environment({})["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in environment({}, cpus_per_node=4)
